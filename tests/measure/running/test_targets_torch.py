"""Targets that are DataLoaders: made with other settings, or made anew from their parts."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch's DataLoader")

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import headrace.torch
from headrace.errors import SettingsError
from headrace.measure.running.knobs import knobs_of
from headrace.measure.running.rebuild import rebuilt
from headrace.measure.running.targets import Target, find_target


def test_a_device_gives_tensors(data: Path) -> None:
    loader = Target(name=str(data), settings={"seq_len": 64, "device": "cpu"}).make()
    assert isinstance(next(iter(loader))["tokens"], torch.Tensor)


def test_a_function_gets_what_it_has_parameters_for(targets: str) -> None:
    loader = find_target(f"{targets}:stock", {"batch_size": 2}).make(num_workers=0)
    assert loader.batch_size == 2


def test_a_dataloader_is_made_anew_with_settings_that_its_function_does_not_take(targets: str) -> None:
    loader = find_target(f"{targets}:fixed", {}).make(num_workers=2, batch_size=16)
    assert (loader.num_workers, loader.batch_size, loader.prefetch_factor) == (2, 16, 2)
    assert type(loader.sampler).__name__ == "RandomSampler"


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_rebuilt_dataloader_gives_the_same_batches() -> None:
    rows = torch.arange(60).reshape(20, 3)
    plain = DataLoader(rows, batch_size=4, drop_last=True)
    assert _same(plain, rebuilt(plain, {"num_workers": 1}))
    own = DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), 3, False))
    assert _same(own, rebuilt(own, {"num_workers": 0}))
    unbatched = DataLoader(rows, batch_size=None)
    assert _same(unbatched, rebuilt(unbatched, {"num_workers": 1}))
    ours = headrace.torch.DataLoader(rows, batch_size=4, num_workers=2)
    again = rebuilt(ours, {"worker_kind": "thread", "prefetch_factor": 3})
    assert (str(again.worker_kind), again.prefetch_factor) == ("thread", 3)
    assert _same(ours, again)
    assert rebuilt(ours, {"num_workers": 0}).prefetch_factor is None


def test_batches_of_the_users_own_keep_their_size() -> None:
    class Own:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2]])

    loader = DataLoader(torch.arange(3), batch_sampler=Own())
    with pytest.raises(SettingsError, match="batch_sampler"):
        rebuilt(loader, {"batch_size": 2})
    assert [len(batch) for batch in rebuilt(loader, {"num_workers": 1})] == [2, 1]


def test_settings_of_workers_that_are_not_there_are_refused(targets: str) -> None:
    with pytest.raises(SettingsError, match="prefetch_factor: has no effect without workers"):
        find_target(f"{targets}:fixed", {"prefetch_factor": 4}).make()


def test_a_dataloader_with_a_constructor_of_its_own_is_told() -> None:
    class Mine(DataLoader[Any]):
        def __init__(self, rows: int) -> None:
            super().__init__(torch.arange(rows))

    with pytest.raises(SettingsError, match="a Mine cannot be made again"):
        rebuilt(Mine(3), {"num_workers": 1})


def test_a_setting_without_effect_is_refused(targets: str) -> None:
    with pytest.raises(SettingsError, match="colour"):
        find_target(f"{targets}:fixed", {"colour": "blue"}).make()


def test_what_can_be_tuned(targets: str) -> None:
    target = find_target(f"{targets}:fixed", {})
    knobs = knobs_of(target, target.make())
    assert (knobs.count, knobs.kind, knobs.depth) == ("num_workers", None, "prefetch_factor")
    assert knobs.now == {"num_workers": 0, "prefetch_factor": None, "batch_size": 8}
    ours = Target(name="ours", function=lambda: headrace.torch.DataLoader([1, 2], num_workers=1))
    knobs = knobs_of(ours, ours.make())
    assert (knobs.count, knobs.kind) == ("num_workers", "worker_kind")
    assert knobs.without(["worker_kind"]).kind is None
