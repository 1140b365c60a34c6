"""Targets as users write them, in a module of the working directory; a small dataset of tokens; a clock to hold."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.measure import clock
from headrace.observe import advice, host
from tests.measure import held_clock

TARGETS = """
import os
import sys
import time

import numpy as np

from headrace.measure import clock

BATCH = np.zeros((4, 10))


class Rows:
    def __init__(self, dies_at=None):
        self.dies_at = dies_at

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if index == self.dies_at:
            os.kill(os.getpid(), 9)
        return np.full(10, index)


def stock(batch_size=8, num_workers=0):
    from torch.utils.data import DataLoader

    return DataLoader(Rows(), batch_size=batch_size, num_workers=num_workers)


def fixed():
    from torch.utils.data import DataLoader

    return DataLoader(Rows(), batch_size=8, shuffle=True)


def dying():
    from torch.utils.data import DataLoader

    # Without tensors, which PyTorch sends by a connection to the worker: that fails in many ways when the worker dies.
    return DataLoader(Rows(dies_at=400), batch_size=8, num_workers=1, collate_fn=np.stack)


def sleeping(batch_size=4, num_workers=0, pause_ms=1.0):
    # Loads in parallel with its workers, as far as a clock can tell.
    batch = np.zeros((batch_size, 10))
    while True:
        clock.sleep(batch_size * pause_ms / 1e3 / max(1, min(num_workers, 4)))
        yield batch


def plain():
    return [BATCH] * 50


def raises():
    raise ValueError("no such bucket")


def never():
    hang()


def stalls():
    yield from [BATCH] * 20
    hang()


def hang():
    # Whoever waits for this file finds the process here.
    open(f"hanging-{os.environ.get('RANK', 0)}", "w").close()
    while True:
        time.sleep(600)


def empty():
    return []


def early():
    return iter([BATCH] * 10)


def fails_later():
    for number in range(10):
        yield BATCH
    raise OSError("disk gone")


def changing():
    return [BATCH, BATCH[:3]] * 100


def dies_at_once():
    os.kill(os.getpid(), 9)


def dies_in_the_warm_up():
    yield BATCH
    os.kill(os.getpid(), 9)


def crashes():
    print("about to crash", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 11)


def exits():
    print("usage: nothing")
    sys.exit(2)


def not_a_loader():
    return 7


def ranked():
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    print("rank", rank)
    return [np.zeros((int(rank) + 1, int(world)))] * 50


def step(batch):
    clock.sleep(0.002)


def bad_step(batch):
    raise RuntimeError("loss is nan")
"""


HELD = """
from held_clock import hold_the_clock
from measure_targets import *

hold_the_clock()
"""


@pytest.fixture(scope="session")
def folder_of_targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "measure_targets.py").write_text(TARGETS)
    (folder / "held_targets.py").write_text(HELD)
    shutil.copy(held_clock.__file__, folder / "held_clock.py")
    return folder


@pytest.fixture
def targets(folder_of_targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with all kinds of targets; `held_targets` has the same, on a clock that is held."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(folder_of_targets))
    monkeypatch.setenv("PYTHONPATH", str(folder_of_targets), prepend=os.pathsep)
    return "measure_targets"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> held_clock.HeldClock:
    """The clock of this process, held by the test; child processes have clocks of their own."""
    found = held_clock.HeldClock()
    monkeypatch.setattr(clock, "now", found.now)
    monkeypatch.setattr(clock, "sleep", found.sleep)
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 cores, 40 GB of memory to be had, no accelerator, one rank; nothing is silenced."""
    for name in (advice.VARIABLE, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(advice, "_said", advice._Said())
    monkeypatch.setattr(host, "accelerator_available", lambda: False)
    monkeypatch.setattr(host, "useful_cores", lambda: 4.0)
    monkeypatch.setattr(host, "available_bytes", lambda: 40 * 10**9)


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """All that was written to standard error so far."""
    parts: list[str] = []

    def read() -> str:
        parts.append(capfd.readouterr().err)
        return "".join(parts)

    return read


@pytest.fixture(scope="session")
def data(write_dataset: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measure") / "data"
    rng = np.random.default_rng(0)
    shards = [[{"tokens": rng.integers(0, 999, n)} for n in rng.integers(5, 300, 300)] for _ in range(3)]
    write_dataset(path, {"tokens": "uint16[*]"}, shards)
    return path
