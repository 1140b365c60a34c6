"""The proof of exact resumption must hold for a Loader that works, and must catch every kind that does not."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import SettingsError
from headrace.load.loader import Loader
from headrace.load.settings import LoaderSettings
from headrace.measure.proving.proof import Proof, prove_resume
from headrace.measure.proving.reference import row_digests
from headrace.measure.proving.stretches import default_rows
from headrace.order.stream import Places, RowStream
from headrace.rows.recipe import make_recipe
from tests.properties import examples

LENGTHS = [3, 40, 7, 1, 25, 12, 9, 0, 5, 18, 2, 31] * 6


@pytest.fixture(scope="module")
def dataset() -> headrace.Dataset:
    numbers = itertools.count()
    documents = [np.array([next(numbers) for _ in range(n)], dtype=np.uint16) for n in LENGTHS]
    return headrace.from_arrays({"tokens": documents})


def settings(**options: Any) -> LoaderSettings:
    return LoaderSettings(**{"batch_size": 4, "seq_len": 16, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": "windows", "shuffle": "block"},
        {"packing": "windows", "align_documents": True},
        {"packing": "pad", "overlong": "truncate", "shuffle": "none"},
        {"epochs": 3, "seed": 7},
        {"epochs": None},
        {"fields": ("max_seqlen",), "labels": "unshifted", "dtype": "int32"},
    ],
)
def test_a_loader_that_works_is_proved_right(dataset: headrace.Dataset, options: dict[str, Any]) -> None:
    chosen = settings(**options)
    proof = prove_resume(dataset, chosen, trials=4)
    assert proof.problems == ()
    assert proof.exact
    assert proof.whole
    assert proof.rows_per_epoch == Loader(dataset, **vars(chosen)).rows_per_epoch
    assert proof.rows > proof.rows_per_epoch * (chosen.epochs or 1)
    assert proof.trials == 4
    assert proof.stops > 4
    assert len(proof.world_sizes) > 3
    assert set(proof.world_sizes) <= set(range(1, 9))


def test_records_of_every_kind_are_proved(write_dataset: Callable[..., Any], tmp_path: Path) -> None:
    notations = {
        "label": "int64",
        "image": "float32[2,3]",
        "raw": "bytes",
        "boxes": "int16[*,4]",
        "none": "uint8[*]",
    }
    records = [
        {
            "label": number,
            "image": np.full((2, 3), number),
            "raw": bytes(number % 5),
            "boxes": np.full((number % 3, 4), number),
            "none": [],
        }
        for number in range(90)
    ]
    write_dataset(tmp_path / "data", notations, [records[:40], records[40:]])
    proof = prove_resume(str(tmp_path / "data"), LoaderSettings(batch_size=3), trials=3)
    assert (proof.problems, proof.rows_per_epoch) == ((), 90)


def test_objects_and_mixtures_are_proved(dataset: headrace.Dataset) -> None:
    words = [(f"word {number}", number, [number] * 3) for number in range(70)]
    assert prove_resume(words, LoaderSettings(batch_size=2), trials=3).exact
    mixture = headrace.mix({"all": (dataset, 0.7), "some": (dataset, 0.3)}, stop="all")
    assert prove_resume(mixture, settings(), trials=3).exact


def test_a_single_row_is_enough() -> None:
    proof = prove_resume([5], LoaderSettings(batch_size=32), trials=2)
    assert (proof.exact, proof.rows) == (True, 2)


def test_more_rows_than_the_limit_are_checked_in_stretches(dataset: headrace.Dataset) -> None:
    proof = prove_resume(dataset, settings(epochs=5, packing="windows"), trials=2, rows=64)
    total = 5 * proof.rows_per_epoch
    assert (proof.exact, proof.whole) == (True, False)
    assert 32 < proof.rows <= 64 + 8

    def holds(*positions: int) -> bool:
        return any(all(first <= p < last for p in positions) for first, last in proof.stretches)

    assert holds(0)
    assert holds(proof.rows_per_epoch - 1, proof.rows_per_epoch)
    assert holds(total - 1, total)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(proof.stretches))
    others = prove_resume(dataset, settings(epochs=5, packing="windows"), trials=1, rows=64, seed=1)
    assert others.stretches != proof.stretches


def test_the_same_seed_gives_the_same_trials_and_progress_is_told(dataset: headrace.Dataset) -> None:
    told: list[int] = []
    first = prove_resume(dataset, settings(), trials=3, seed=5, progress=lambda: told.append(1))
    again = prove_resume(dataset, settings(), trials=3, seed=5)
    assert len(told) == 4
    assert (first.stops, first.batch_sizes) == (again.stops, again.batch_sizes)


# Loaders that are broken


def resumes_beside(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    honest = Loader.load_state_dict

    def load(self: Loader, state: Any) -> None:
        honest(self, {**state, "position": max(0, state["position"] + shift)})

    monkeypatch.setattr(Loader, "load_state_dict", load)


def first_problem(proof: Proof) -> Any:
    assert not proof.exact
    assert {problem.trial for problem in proof.problems} == set(range(1, proof.trials + 1))
    return proof.problems[0]


def test_a_row_lost_at_a_resume_is_found(dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    resumes_beside(monkeypatch, 1)
    problem = first_problem(prove_resume(dataset, settings(), trials=3))
    assert f"position {problem.position:,} (epoch 0): it was never handed out" in problem.what
    assert f"continued with position {problem.position + 1:,}" in problem.what
    assert f"the job had continued at position {problem.position:,} with " in problem.what


def test_a_row_repeated_at_a_resume_is_found(
    dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumes_beside(monkeypatch, -1)
    problem = first_problem(prove_resume(dataset, settings(), trials=3))
    assert f"position {problem.position:,} (epoch 0): it was handed out again by rank 0" in problem.what
    assert f"when position {problem.position + 1:,} was due" in problem.what


def test_several_lost_rows_are_counted(dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    resumes_beside(monkeypatch, 3)
    problem = first_problem(prove_resume(dataset, settings(), trials=2))
    assert "it and the 2 after it were never handed out" in problem.what


def test_rows_that_are_others_than_they_say_are_found(
    dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Loader.__iter__

    def swapped(self: Loader) -> Iterator[Any]:
        resumed = self._place.position > 0
        iteration = honest(self)
        if resumed:
            make = iteration._batches  # type: ignore[attr-defined]
            iteration._batches = Reversing(make)  # type: ignore[attr-defined]
        return iteration

    class Reversing:
        def __init__(self, batches: Any) -> None:
            self._batches, self.close = batches, batches.close

        def __next__(self) -> dict[str, Any]:
            return {name: np.roll(array, 1, axis=0) for name, array in next(self._batches).items()}

    monkeypatch.setattr(Loader, "__iter__", swapped)
    problem = first_problem(prove_resume(dataset, settings(shuffle="none"), trials=3))
    assert "it held the row that belongs to position" in problem.what


def test_content_that_changes_is_found() -> None:
    class Restless:
        calls = itertools.count()

        def __len__(self) -> int:
            return 60

        def __getitem__(self, number: int) -> int:
            return next(self.calls)

    problem = first_problem(prove_resume(Restless(), LoaderSettings(batch_size=4), trials=2))
    assert problem.position == 0
    assert "its content differs from that of the run without a stop" in problem.what


def test_ranks_that_take_unequal_steps_are_found(
    dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Loader.__len__
    monkeypatch.setattr(Loader, "__len__", lambda self: honest(self) + self.world.rank)
    assert "different numbers of steps" in prove_resume(dataset, settings(), trials=2).problems[0].what
    monkeypatch.undo()
    begin = Loader.__iter__

    def short(self: Loader) -> Iterator[Any]:
        iteration = begin(self)
        return ShortOf(iteration) if self.world.rank == 1 else iteration

    class ShortOf:
        def __init__(self, iteration: Any) -> None:
            self._iteration, self.close = iteration, iteration.close

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            raise StopIteration

    monkeypatch.setattr(Loader, "__iter__", short)
    assert "one more step than others" in prove_resume(dataset, settings(), trials=2).problems[0].what


def test_states_that_are_wrong_or_differ_are_found(
    dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Loader.state_dict

    def saved(change: Callable[[Loader, dict[str, Any]], None]) -> str:
        def save(self: Loader) -> dict[str, Any]:
            state = honest(self)
            change(self, state)
            return state

        monkeypatch.setattr(Loader, "state_dict", save)
        return str(prove_resume(dataset, settings(), trials=3).problems[-1].what)

    assert "the saved state says" in saved(lambda _, state: state.update(position=state["position"] + 4))
    assert "saved a different state from rank 0" in saved(
        lambda loader, state: state.update(rank=loader.world.rank)
    )
    assert "was refused: " in saved(lambda _, state: state.update(seed=99))


def test_a_loader_that_gives_nothing_is_found(
    dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        def __next__(self) -> Any:
            raise StopIteration

        def close(self) -> None:
            pass

    monkeypatch.setattr(Loader, "__iter__", lambda self: Nothing())
    monkeypatch.setattr(Loader, "__len__", lambda self: 0)
    assert "returned no batch" in first_problem(prove_resume(dataset, settings(), trials=1)).what


def test_an_order_that_repeats_a_row_is_found_before_any_stop(
    dataset: headrace.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = RowStream.at

    def doubled(self: RowStream, positions: Any) -> Places:
        places = honest(self, positions)
        return Places(places.source, places.epoch, places.row // 2 * 2)

    monkeypatch.setattr(RowStream, "at", doubled)
    proof = prove_resume(dataset, settings(shuffle="none"), trials=1)
    assert [(problem.trial, problem.position) for problem in proof.problems] == [(0, 1)]
    assert "row 0 of epoch 0 appears at two positions" in proof.problems[0].what


# Digests


@examples(60)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=8), st.data())
def test_a_row_hashes_the_same_in_any_batch_and_otherwise_than_other_rows(
    rows: list[list[int]], data: st.DataObject
) -> None:
    def batch(some: list[list[int]]) -> dict[str, Any]:
        ends = np.cumsum([0, *map(len, some)])
        values = np.array([each for row in some for each in row], dtype=np.int64)
        sums = np.array([[sum(row)] * 2 for row in some], dtype=np.float32).reshape(len(some), 2)
        words = [str(row) for row in some]
        return {
            "values": values,
            "values_offsets": ends,
            "sums": sums,
            "words": words,
            "raw": [b""] * len(some),
        }

    whole = row_digests(batch(rows), len(rows)).tolist()
    first = data.draw(st.integers(0, len(rows) - 1))
    part = rows[first:]
    assert row_digests(batch(part), len(part)).tolist() == whole[first:]
    for (one, digest), (other, others) in itertools.combinations(zip(rows, whole, strict=True), 2):
        assert (digest == others) == (one == other)


@pytest.mark.parametrize(("options", "words"), [({"trials": 0}, "trials=0: "), ({"rows": 0}, "rows=0: ")])
def test_mistakes_are_explained(dataset: headrace.Dataset, options: dict[str, int], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        prove_resume(dataset, settings(), **options)


def test_rows_are_limited_by_the_largest_of_a_mixture() -> None:
    def sized(elements: int) -> Any:
        return headrace.from_arrays({"x": [np.zeros(elements, dtype=np.float32)] * 64})

    of_records = settings(seq_len=None)
    small, large = (sized(1), 0.5), (sized(2**16), 0.5)
    one_way = make_recipe(headrace.mix({"a": small, "b": large}), of_records)
    other_way = make_recipe(headrace.mix({"a": large, "b": small}), of_records)
    assert default_rows(one_way) == default_rows(other_way) == default_rows(make_recipe(large[0], of_records))
    assert default_rows(one_way) < default_rows(make_recipe(small[0], of_records))
