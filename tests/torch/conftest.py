"""What tests of the torch package share. Nothing here needs torch: where it is missing, they are skipped."""

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
from collections.abc import Iterator
from typing import Any

import pytest

from tests.torch.leftovers import leftovers, wait_until

# Failures of these are explained as those of tests are.
pytest.register_assert_rewrite("tests.torch.dataloader.parity", "tests.torch.dataloader.resuming")


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process, thread, open file or shared memory is left of what the test did."""
    # It is multiprocessing's, starts with the first spawned process, and stays.
    multiprocessing.resource_tracker.ensure_running()
    before = leftovers()
    yield
    if not leftovers() <= before:
        # What refers to itself goes when someone looks for such things.
        gc.collect()
    wait_until(lambda: leftovers() <= before, lambda: f"left: {sorted(leftovers() - before)}")


@pytest.fixture(scope="session")
def forkserver() -> Iterator[Any]:
    """A context that starts fresh processes, from a server which imports once for all of them what takes long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "headrace.torch.dataloader", "pytest"])
    multiprocessing.forkserver.ensure_running()
    yield context
    # It would live as long as this process.
    multiprocessing.forkserver._forkserver._stop()
