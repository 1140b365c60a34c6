"""Workers that are spawned: sent one pickle for all, from one process that imports everything once."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch import DataLoader
from tests.torch.dataloader import fault_datasets as faults
from tests.torch.leftovers import is_alive, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def test_a_dataset_is_pickled_once_and_its_arrays_are_not_copied(
    forkserver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults.Weighty, "pickled", 0)
    dataset = faults.Weighty()
    loader = DataLoader(dataset, batch_size=1, num_workers=4, multiprocessing_context=forkserver)
    batches = iter(loader)
    got = [tuple(int(part) for part in next(batches)) for _ in range(8)]
    assert faults.Weighty.pickled == 1
    # What workers write to is their own, but for what the user shares.
    assert got == [(index + 1, index + 1, 3_000_000) for index in range(8)]
    assert dataset.array[:8].tolist() == dataset.tensor[:8].tolist() == list(range(8))
    pids = batches._workers.pids()
    assert dataset.shared.tolist() == [pids[index % 4] for index in range(8)]
    # 48 MB of arrays, and none of them in four processes each.
    assert max(psutil.Process(pid).memory_full_info().uss for pid in pids) < 40 * 2**20


def test_each_worker_opens_the_dataset_for_itself(forkserver: Any, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(b"".join(number.to_bytes(4, "little") for number in range(200)))
    loader = DataLoader(
        faults.OpensItself(str(path)), batch_size=1, num_workers=3, multiprocessing_context=forkserver
    )
    # Processes that share an open file share the place in it, and would read each other's numbers.
    assert [int(batch) for batch in loader] == list(range(200))


def test_what_can_only_be_pickled_for_one_process_is(forkserver: Any) -> None:
    loader = DataLoader(
        faults.HoldsLock(forkserver.Lock()), batch_size=2, num_workers=2, multiprocessing_context=forkserver
    )
    assert torch.cat(list(loader))[:, 0].tolist() == list(range(8))


def test_what_cannot_be_pickled_is_said_as_pytorch_does() -> None:
    stock = torch.utils.data.DataLoader(faults.Unpicklable(), num_workers=1, multiprocessing_context="spawn")
    ours = DataLoader(faults.Unpicklable(), num_workers=1, multiprocessing_context="spawn")
    said = []
    for loader in (stock, ours):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(Exception, match="stays at home") as raised:
                iter(loader)
        said.append((type(raised.value), [str(warning.message) for warning in caught]))
    assert said[0] == said[1]


def test_a_dataset_that_cannot_be_opened_there_is_an_error_of_the_first_batch(forkserver: Any) -> None:
    loader = DataLoader(faults.BadWhenOpened(), num_workers=1, multiprocessing_context=forkserver)
    with pytest.raises(KeyError, match="not in this process"):
        next(iter(loader))


@pytest.mark.usefixtures("nothing_left")
def test_spawned_workers_are_of_one_fresh_process_and_one_that_is_killed_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "changed_by_the_test", True)
    loader = DataLoader(
        faults.Numbered(1000, 2, seconds=0.001),
        num_workers=2,
        multiprocessing_context="spawn",
        worker_init_fn=faults.must_be_fresh,
    )
    batches = iter(loader)
    next(batches)
    pids = batches._workers.pids()
    # One nursery for both, which is a child of this process.
    (nursery,) = {psutil.Process(pid).ppid() for pid in pids}
    assert psutil.Process(nursery).ppid() == os.getpid()
    os.kill(pids[1], signal.SIGSEGV)
    with pytest.raises(RuntimeError, match=rf"worker \(pid {pids[1]}\) is killed by signal: Segmentation"):
        for _ in batches:
            pass


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_left")
def test_however_many_spawned_workers_are_stuck_all_are_ended() -> None:
    """They get as long to leave as one would get alone. One after the other, most would outlive their nursery."""
    loader = DataLoader(faults.Numbered(1000, 2), num_workers=12, multiprocessing_context="spawn")
    batches = iter(loader)
    next(batches)
    pids = batches._workers.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    del batches
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
