"""The memory of batches from workers: whole, nobody else's while it is held, and used again afterwards."""

import gc
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

from headrace.torch import DataLoader
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
