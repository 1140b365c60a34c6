"""The memory of batches from workers: whole, nobody else's while it is held, and used again afterwards."""

import gc
import random
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch import DataLoader
from headrace.workers import segments
from tests.torch.dataloader import fault_datasets as faults
from tests.torch.leftovers import anonymous_memory, is_alive, mapped_segments

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


@pytest.mark.parametrize("worker_kind", ["process", "thread"])
def test_large_batches_of_uneven_sizes_arrive_whole(worker_kind: str) -> None:
    for batch in DataLoader(faults.Huge(10), batch_size=None, num_workers=2, worker_kind=worker_kind):
        number = int(batch["tensor"][0])
        size = faults.Huge.sizes[number % 5]
        assert batch["tensor"].shape == (size,)
        assert bool((batch["tensor"] == number).all())
        assert batch["array"].shape == (size // 2,)
        assert batch["bytes"] == bytes([number]) * (size // 4)
        assert batch["meta"].shape == (size,)
        assert batch["meta"].device.type == "meta"
        assert batch["strings"] == [str(number)] * min(size, 50_000)


@pytest.mark.parametrize("length", [120, pytest.param(600, marks=pytest.mark.soak)])
def test_a_batch_is_never_written_to_while_anyone_holds_it(length: int) -> None:
    dataset = faults.Keeping(length)
    loader = DataLoader(dataset, batch_size=1, num_workers=2, collate_fn=dataset.collate)
    rng, held = random.Random(1), {}
    for number, batch in enumerate(loader):
        held[number] = batch[0, 5:]  # a view of a view
        del batch
        if len(held) > 12:
            gone = rng.choice(sorted(held))
            assert bool((held.pop(gone) == gone).all())
    for number, part in held.items():
        assert bool((part == number).all())


NUMPY_VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda batch: batch.numpy(),
    "asarray": lambda batch: np.asarray(batch),
    "detached": lambda batch: batch.detach().cpu().numpy(),
    "a part": lambda batch: batch[1:, 3:].numpy(),
    "another shape": lambda batch: batch.view(-1).numpy()[5:],
    "in inference mode": lambda batch: _without_grad(batch),
}


def _without_grad(batch: Any) -> Any:
    with torch.inference_mode():
        return batch[1:].numpy()


@pytest.mark.parametrize("view", NUMPY_VIEWS)
@pytest.mark.parametrize("worker_kind", ["process", "thread"])
def test_numpy_views_of_a_batch_stay_as_they_are_when_it_moves_to_shared_memory(
    worker_kind: str, view: str
) -> None:
    """As it does in `share_memory_`, and when it is put into a queue of `torch.multiprocessing`."""
    kept = []
    loader = DataLoader(faults.Numbered(80), batch_size=2, num_workers=2, worker_kind=worker_kind)
    for step, batch in enumerate(loader):
        if step % 5 == 0:
            kept.append((NUMPY_VIEWS[view](batch), NUMPY_VIEWS[view](batch).copy()))
            batch.share_memory_()
        del batch
    for seen, copied in kept:
        assert (seen == copied).all()


def test_batches_beyond_a_bound_are_copied_and_all_that_are_kept_stay_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process can have only so many maps: 65,024 kept batches ended in an OSError."""
    in_use = _in_use_now()
    monkeypatch.setattr(segments, "MOST_IN_USE", 10 + len(in_use))
    before = mapped_segments()
    loader = DataLoader(faults.Numbered(200), batch_size=2, num_workers=2)
    batches = iter(loader)
    kept = [next(batches) for _ in range(60)]
    ahead = 2 * (loader.prefetch_factor or 2)
    assert mapped_segments() - before <= 10 + ahead + 2
    for number, batch in enumerate(kept):
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]
        assert batch[:, -1].tolist() == [2 * number, 2 * number + 1]
    # Batches that are gone do not count; those that have arrived ahead of their turn do.
    del kept
    assert len(segments._in_use.keys() - in_use) <= ahead
    assert next(batches)[0, 0] == 120
    assert len(segments._in_use.keys() - in_use) <= ahead


def _in_use_now() -> set[int]:
    """Those that a test before has left to the garbage collector are gone."""
    gc.collect()
    return set(segments._in_use)


def test_batches_that_outlive_their_loader_still_count() -> None:
    in_use = _in_use_now()
    kept = [batch for _ in range(2) for batch in DataLoader(faults.Numbered(12), batch_size=4, num_workers=1)]
    assert len(segments._in_use.keys() - in_use) == len(kept) == 6
    del kept
    assert segments._in_use.keys() <= in_use


def test_batches_of_worker_processes_can_be_written_to_and_outlive_them() -> None:
    iterator = iter(DataLoader(faults.Numbered(40), batch_size=4, num_workers=2))
    workers = iterator._workers.pids()
    batches = list(iterator)
    assert not any(is_alive(worker) for worker in workers)
    for number, batch in enumerate(batches):
        batch += 1
        assert batch[:, 0].tolist() == [4 * number + row + 1 for row in range(4)]


def test_without_shared_memory_batches_come_through_the_socket() -> None:
    loader = DataLoader(
        faults.Numbered(60), batch_size=6, num_workers=2, worker_init_fn=faults.no_files_of_that_size
    )
    firsts = [batch[:, -1].tolist() for batch in loader]
    assert firsts == [list(range(first, first + 6)) for first in range(0, 60, 6)]


_FULL = """
    import contextlib, sys
    sys.path.insert(0, {here!r})
    from headrace.torch import DataLoader
    from tests.torch.dataloader.fault_datasets import Numbered

    with open("/dev/shm/filler", "wb") as file, contextlib.suppress(OSError):
        file.write(bytes(2**20))
    batches = [batch[:, 0].tolist() for batch in DataLoader(Numbered(40), batch_size=8, num_workers=2)]
    assert batches == [list(range(first, first + 8)) for first in range(0, 40, 8)]
    print("done")
"""


def test_a_full_dev_shm_does_no_harm(child_environment: dict[str, str]) -> None:
    """PyTorch's workers die of it, with a bus error."""
    script = textwrap.dedent(_FULL.format(here=str(Path(__file__).parents[3])))
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("may not mount file systems here")
    ran = subprocess.run(
        [*alone, sys.executable, "-c", script],
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.stdout == "done\n", ran.stderr


@pytest.mark.parametrize(
    ("worker_kind", "turns"),
    [
        ("thread", 50),
        ("process", 10),
        pytest.param("thread", 1000, marks=pytest.mark.soak),
        pytest.param("process", 1000, marks=pytest.mark.soak),
    ],
)
def test_iterators_left_halfway_leave_nothing(worker_kind: str, turns: int) -> None:
    loader = DataLoader(faults.Numbered(), batch_size=2, num_workers=1, worker_kind=worker_kind)
    mapped, memory = mapped_segments(), []
    for turn in range(turns):
        batches = iter(loader)
        next(batches)
        if turn % 2:
            next(batches)
        del batches
        if turn % 20 == 19:
            gc.collect()
            memory.append(anonymous_memory())
    gc.collect()
    assert mapped_segments() <= mapped
    if len(memory) > 10:
        assert min(memory[-3:]) < min(memory[:3]) + 20 * 2**20, memory


def test_epochs_that_are_left_early_use_the_same_memory() -> None:
    loader = DataLoader(faults.Numbered(400), batch_size=4, num_workers=2, persistent_workers=True)
    counts = []
    for _ in range(40):
        for number, _ in enumerate(loader):
            if number == 5:
                break
        counts.append(mapped_segments())
    assert max(counts[20:]) <= max(counts[:10]) + 4, counts


class _Indices(list[int]):
    """A list that can be watched."""


class _Watched(torch.utils.data.Sampler[int]):
    def __init__(self, length: int) -> None:
        self._length, self.epochs = length, list[Any]()

    def __iter__(self) -> Iterator[int]:
        indices = _Indices(range(self._length))
        self.epochs.append(weakref.ref(indices))
        return iter(indices)

    def __len__(self) -> int:
        return self._length


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_kind": "thread"}, {"num_workers": 1}])
def test_an_epoch_left_early_is_freed_without_the_garbage_collector(options: dict[str, Any]) -> None:
    sampler = _Watched(100)
    loader = DataLoader(list(range(100)), batch_size=4, sampler=sampler, **options)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            next(iter(loader))
        # The loader keeps its last epoch, for `state_dict`.
        assert [epoch() for epoch in sampler.epochs[:2]] == [None, None]
    finally:
        gc.enable()
