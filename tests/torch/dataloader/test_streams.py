"""`headrace.stream` inside the DataLoader: every record once, another order each epoch, exact resume."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch import DataLoader

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

COUNT = 300
WAYS: dict[str, dict[str, Any]] = {
    "in the loop": {},
    "processes": {"num_workers": 2},
    "processes that stay": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 3, "worker_kind": "thread"},
    "threads that stay": {"num_workers": 2, "worker_kind": "thread", "persistent_workers": True},
}
FRESH = {"num_workers": 2, "multiprocessing_context": "forkserver"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in range(3):
        numbers = range(file * COUNT // 3, (file + 1) * COUNT // 3)
        (tmp_path / f"{file}.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in numbers))
    return tmp_path


def _loader(folder: Path, **way: Any) -> DataLoader[Any]:
    # A stream must be what PyTorch calls an IterableDataset, so it takes no sampler.
    return DataLoader(headrace.stream(folder, seed=1, block_bytes=100, buffer=16), batch_size=8, **way)  # type: ignore[arg-type]


def _numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["n"].tolist()]


@pytest.mark.parametrize("way", WAYS)
def test_every_epoch_has_every_record_once_in_another_order(folder: Path, way: str) -> None:
    _check_epochs(_loader(folder, **WAYS[way]))


@pytest.mark.usefixtures("forkserver")
def test_fresh_processes_have_every_record_once_in_another_order(folder: Path) -> None:
    _check_epochs(_loader(folder, **FRESH))


def _check_epochs(loader: DataLoader[Any]) -> None:
    epochs = [_numbers(loader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    # The trainer may say which.
    loader.dataset.set_epoch(0)  # type: ignore[attr-defined]
    assert _numbers(loader) == epochs[0]


@pytest.mark.parametrize(
    ("way", "step"),
    [
        *(("in the loop", step) for step in (0, 5, 17)),
        *(("threads", step) for step in (0, 5, 17)),
        *(("threads that stay", step) for step in (0, 5, 17)),
        ("processes", 5),
        ("processes that stay", 17),
    ],
)
def test_it_goes_on_in_the_middle_and_into_the_next_epochs(folder: Path, way: str, step: int) -> None:
    loader = _loader(folder, **WAYS[way])
    _numbers(loader)
    batches = iter(loader)
    for _ in range(step):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = _numbers(batches)
    after = _numbers(loader)
    other = _loader(folder, **WAYS[way])
    other.load_state_dict(state)
    assert _numbers(other) == rest
    assert _numbers(other) == after


@pytest.mark.parametrize("way", WAYS)
def test_a_state_from_the_end_of_an_epoch_leads_to_the_next(folder: Path, way: str) -> None:
    loader = _loader(folder, **WAYS[way])
    _numbers(loader)
    state = copy.deepcopy(loader.state_dict())
    second = _numbers(loader)
    other = _loader(folder, **WAYS[way])
    other.load_state_dict(state)
    assert _numbers(other) == second


def test_a_loop_that_was_left_begins_its_epoch_again(folder: Path) -> None:
    for way in WAYS.values():
        loader = _loader(folder, **way)
        first = _numbers(loader)
        second = _numbers([batch for batch, _ in zip(loader, range(7), strict=False)])
        again = _numbers(loader)
        assert again[: len(second)] == second
        assert sorted(again) == sorted(first)


def test_packed_rows_straight_from_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number} of the text\n" for number in range(500)))
    rows = headrace.stream(tmp_path / "a.txt").tokenize("bytes").pack(seq_len=64)
    loader = DataLoader(rows, batch_size=4, num_workers=2, drop_last=True)  # type: ignore[arg-type]
    for batch in loader:
        assert batch["tokens"].shape == batch["labels"].shape == (4, 64)
        assert bool(batch["loss_mask"].any())


def test_a_thread_calls_the_methods_of_its_own_copy() -> None:
    """As the example in PyTorch's documentation does: each worker is told its share when it starts."""
    dataset = Shares()
    loader = DataLoader(
        dataset, batch_size=2, num_workers=3, worker_kind="thread", worker_init_fn=dataset.configure
    )
    assert sorted(number for batch in loader for number in batch.tolist()) == list(range(12))
    assert dataset.numbers == range(12)


class Shares(torch.utils.data.IterableDataset[int]):
    def __init__(self) -> None:
        self.numbers = range(12)

    def configure(self, worker: int) -> None:
        self.numbers = range(worker, 12, 3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)
