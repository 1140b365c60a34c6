"""Targets as users write them, in a module of the working directory; and a small dataset of tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TARGETS = """
import os
import sys
import time

import numpy as np

BATCH = np.zeros((4, 10))


class Rows:
    def __init__(self, pause=0.0, dies_at=None):
        self.pause, self.dies_at = pause, dies_at

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if index == self.dies_at:
            os.kill(os.getpid(), 9)
        time.sleep(self.pause)
        return np.full(10, index)


def stock(batch_size=8, num_workers=0):
    from torch.utils.data import DataLoader

    return DataLoader(Rows(), batch_size=batch_size, num_workers=num_workers)


def fixed():
    from torch.utils.data import DataLoader

    return DataLoader(Rows(pause=0.001), batch_size=8, shuffle=True)


def dying():
    from torch.utils.data import DataLoader

    return DataLoader(Rows(dies_at=400), batch_size=8, num_workers=1)


def sleeping(batch_size=4, num_workers=0, pause_ms=1.0):
    # Loads in parallel with its workers, as far as a clock can tell.
    batch = np.zeros((batch_size, 10))
    while True:
        time.sleep(batch_size * pause_ms / 1e3 / max(1, min(num_workers, 4)))
        yield batch


def plain():
    return [BATCH] * 50


def raises():
    raise ValueError("no such bucket")


def never():
    while True:
        time.sleep(0.1)


def stalls():
    for number in range(10**9):
        if number == 20:
            time.sleep(600)
        time.sleep(0.001)
        yield BATCH


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
    time.sleep(0.002)


def bad_step(batch):
    raise RuntimeError("loss is nan")
"""


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, with all kinds of targets."""
    # Another name for each test: a module is imported once in a process.
    name = f"targets_{abs(hash(tmp_path)) % 10**10}"
    (tmp_path / f"{name}.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture(scope="session")
def data(write_dataset: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measure") / "data"
    rng = np.random.default_rng(0)
    shards = [[{"tokens": rng.integers(0, 999, n)} for n in rng.integers(5, 300, 300)] for _ in range(3)]
    write_dataset(path, {"tokens": "uint16[*]"}, shards)
    return path
