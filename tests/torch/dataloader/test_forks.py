"""Forks of a process that has DataLoaders, and DataLoaders in the workers of others."""

import contextlib
import os
from typing import Any

import numpy as np
import pytest

import headrace

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch import DataLoader
from tests.torch.dataloader import fault_datasets as faults
from tests.torch.leftovers import wait_until

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def test_forking_while_threads_run() -> None:
    data = headrace.from_arrays({"x": np.arange(4000)})
    ahead = iter(headrace.Loader(data, batch_size=4, workers=3))
    next(ahead)
    threaded = iter(DataLoader(faults.Numbered(), batch_size=2, num_workers=3, worker_kind="thread"))
    next(threaded)
    for _ in range(5):
        got = list(DataLoader(faults.Numbered(40, 3), batch_size=4, num_workers=2))
        assert torch.cat(got)[:, 0].tolist() == list(range(40))
        next(ahead), next(threaded)
    ahead.close()  # type: ignore[attr-defined]


def test_loaders_in_loaders() -> None:
    wanted = [row.item() + 100 * index for index in range(4) for row in torch.arange(8)]

    def flat(loader: Any) -> list[int]:
        return [int(row[0]) for batch in loader for row in batch[0]]

    inner = faults.Inner(DataLoader)
    for workers in ("process", "thread"):
        assert flat(DataLoader(inner, num_workers=2, workers=workers)) == wanted
    threads_inside = faults.Inner(DataLoader, num_workers=2, worker_kind="thread")
    for workers in ("process", "thread"):
        assert flat(DataLoader(threads_inside, num_workers=2, workers=workers)) == wanted
    processes_inside = faults.Inner(DataLoader, num_workers=1)
    assert flat(DataLoader(processes_inside)) == wanted
    # As with PyTorch: a worker is a daemon, and those may have no children.
    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        flat(DataLoader(processes_inside, num_workers=1))


def test_an_iteration_goes_on_only_in_its_own_process() -> None:
    threaded = iter(DataLoader(faults.Numbered(), num_workers=1, worker_kind="thread"))
    next(threaded)
    # With a batch that is here already: the fork must not take it either.
    wait_until(lambda: threaded._workers.waiting() or threaded._arrived)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            try:
                next(threaded)
            except RuntimeError as error:
                os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert b"after a fork, start a new one" in os.read(reading, 1000)
    os.close(reading)
    next(threaded)


def test_a_fork_keeps_the_batches_that_it_has() -> None:
    loader = DataLoader(faults.Numbered(200), batch_size=2, num_workers=1)
    batches = iter(loader)
    next(batches)
    held = next(batches)
    go_reading, go_writing = os.pipe()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        # What the parent and its worker do meanwhile must not show here.
        os.read(go_reading, 1)
        os.write(writing, bytes(held[:, 5].tolist()))
        os._exit(0)
    del held
    for _ in range(50):
        next(batches)
    os.write(go_writing, b"x")
    os.waitpid(child, 0)
    assert os.read(reading, 10) == bytes([2, 3])
    for descriptor in (go_reading, go_writing, reading, writing):
        os.close(descriptor)
    del batches
