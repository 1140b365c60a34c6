"""`loader.rows(positions)`: the same rows that a Loader hands out, at any positions, in any order, anywhere."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace import Loader
from headrace.errors import SettingsError, StageError
from tests.properties import examples


def tokens(lengths: list[int], first: int = 1) -> headrace.Dataset:
    documents = [
        np.arange(first + n, first + n + length, dtype=np.uint16) for n, length in enumerate(lengths)
    ]
    return headrace.from_arrays({"tokens": documents})


def numbers(count: int) -> headrace.Dataset:
    words = [np.arange(n % 5, dtype=np.int16) for n in range(count)]
    return headrace.from_arrays({"x": np.arange(count), "words": words})


class Objects:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.int64(index), "name": str(index)}


def jittered(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    kept = {name: value for name, value in sample.items() if name != "words"}
    return {**kept, "drawn": rng.integers(2**40)}


def centred(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] - batch["x"].mean(), "first": np.full(len(batch["x"]), batch["x"][0])}


LOADERS: dict[str, Any] = {
    "packed": lambda **more: Loader(tokens([3, 9, 1, 30, 8, 8, 2] * 5), seq_len=8, **more),
    "windows": lambda **more: Loader(tokens([3, 9, 30, 8] * 5), seq_len=8, packing="windows", **more),
    "records": lambda **more: Loader(numbers(37), **more),
    "objects": lambda **more: Loader(Objects(), **more),
    "mixture": lambda **more: Loader(
        headrace.mix({"a": (tokens([5] * 20), 0.7), "b": (tokens([7] * 9, 500), 0.3)}), seq_len=6, **more
    ),
    "drawn": lambda **more: Loader(numbers(37), **more).map(jittered),
    "packed and drawn": lambda **more: Loader(tokens([3, 9, 30] * 5), seq_len=8, **more).map(jittered),
}


def row_of(columns: Any, number: int, rows: int) -> dict[str, Any]:
    """One row's values, as plain Python; what belongs to a batch is left out."""
    found = {}
    for name in columns.keys():  # noqa: SIM118 - a Batch makes its fields when they are asked for
        column = columns[name]
        offsets = columns.get(f"{name}_offsets")
        if offsets is not None:
            found[name] = column[offsets[number] : offsets[number + 1]].tolist()
        elif name not in ("cu_seqlens", "max_seqlen") and not name.endswith("_offsets"):
            assert len(column) == rows
            found[name] = column[number].tolist() if isinstance(column, np.ndarray) else column[number]
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_they_are_what_the_loaders_of_all_ranks_hand_out(kind: str) -> None:
    make = LOADERS[kind]
    expected: dict[int, dict[str, Any]] = {}
    for rank in range(2):
        for batch in make(batch_size=3, epochs=2, rank=rank, world_size=2, drop_last=False, prefetch=0):
            for number in range(batch.info.rows):
                expected[batch.info.position + number] = row_of(batch, number, batch.info.rows)
    rows = make(batch_size=5).rows
    assert len(expected) == 2 * rows.rows_per_epoch
    order = np.random.default_rng(0).permutation(len(expected))
    found = rows(order)
    for number, position in enumerate(order.tolist()):
        assert row_of(found, number, len(order)) == expected[position]


@examples(30)
@given(st.data())
def test_asking_for_many_is_asking_for_each(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=3, max_size=12))
    shuffle = data.draw(st.sampled_from(["global", "none", "block"]))
    packing = data.draw(st.sampled_from(["best-fit", "windows", "pad"]))
    if sum(lengths) < 6:
        return
    rows = Loader(tokens(lengths), seq_len=6, batch_size=1, shuffle=shuffle, packing=packing).rows
    positions = data.draw(st.lists(st.integers(0, 5 * rows.rows_per_epoch), max_size=10))
    together = rows(positions)
    for number, position in enumerate(positions):
        for name in ("tokens", "labels", "segment_ids"):
            assert together[name][number].tolist() == rows([position])[name][0].tolist()
    assert together["tokens"].shape == (len(positions), 6)


def test_positions_far_beyond_any_run_have_rows_too() -> None:
    rows = Loader(numbers(10), batch_size=2, seed=3).rows
    far = 10 * 10**15
    assert sorted(rows(np.arange(far, far + 10))["x"].tolist()) == list(range(10))


def test_asking_changes_nothing_and_keeps_nothing() -> None:
    loader = Loader(numbers(20), batch_size=4)
    batches = iter(loader)
    next(batches)
    before = loader.state_dict()
    first = loader.rows([0, 1])
    kept = {name: value.copy() for name, value in first.items()}
    for position in range(20):
        loader.rows([position])
    assert loader.state_dict() == before
    for name, value in first.items():
        np.testing.assert_array_equal(value, kept[name])


def test_they_can_be_pickled_and_asked_elsewhere() -> None:
    loader = Loader(numbers(37), batch_size=4).map(jittered)
    again = pickle.loads(pickle.dumps(loader.rows))
    ours, theirs = loader.rows([5, 36, 40]), again([5, 36, 40])
    assert ours.keys() == theirs.keys()
    for name, column in ours.items():
        np.testing.assert_array_equal(column, theirs[name])


def test_new_weights_count_from_where_they_were_given() -> None:
    mixture = headrace.mix({"a": (numbers(100), 0.5), "b": (numbers(100), 0.5)})
    loader = Loader(mixture, batch_size=10, epochs=None)
    batches = iter(loader)
    next(batches)
    loader.reweight({"a": 1.0, "b": 0.0})
    handed = next(batches)
    np.testing.assert_array_equal(loader.rows(np.arange(10, 20))["x"], handed["x"])


def test_functions_of_batches_get_whole_batches() -> None:
    loader = Loader(numbers(22), batch_size=4, drop_last=False, prefetch=0).map(centred, per="batch")
    batches = {batch.info.position: batch for batch in loader}
    rows = loader.rows
    for position, batch in batches.items():
        np.testing.assert_array_equal(rows(np.arange(position, position + batch.info.rows))["x"], batch["x"])
    several = rows([8, 9, 10, 11, 0, 1, 2, 3])
    np.testing.assert_array_equal(several["x"], np.concatenate([batches[8]["x"], batches[0]["x"]]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [21, 22, 23, 24, 25])
def test_the_short_batches_at_the_end_are_those_of_any_rank(count: int, world_size: int) -> None:
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size}
        loader = Loader(numbers(count), batch_size=4, drop_last=False, prefetch=0, **options)
        loader = loader.map(centred, per="batch")
        for batch in loader:
            if batch.info.rows:
                positions = np.arange(batch.info.position, batch.info.position + batch.info.rows)
                np.testing.assert_array_equal(loader.rows(positions)["x"], batch["x"])


def test_several_batches_of_tokens_are_one_with_its_bounds() -> None:
    """As if no function took whole batches."""
    documents = [np.arange(1, length, dtype=np.uint16) for length in (9, 14, 3, 8, 21, 5, 6, 17)]
    data = headrace.from_arrays({"tokens": documents, "other": documents})
    for options in ({"seq_len": 8}, {}):
        plain = Loader(data, batch_size=2, **options)
        several = plain.map(lambda batch: dict(batch), per="batch").rows(range(8))
        expected = plain.rows(range(8))
        assert several.keys() == expected.keys()
        for name, column in expected.items():
            np.testing.assert_array_equal(several[name], column)


@pytest.mark.parametrize("positions", [[0, 1, 2], [0, 2, 4, 6], [3, 2, 1, 0], [0, 1, 2, 3, 4]])
def test_other_positions_than_those_of_whole_batches_are_refused(positions: list[int]) -> None:
    rows = Loader(numbers(22), batch_size=4).map(centred, per="batch").rows
    with pytest.raises(SettingsError, match="whole batches: 4 consecutive positions"):
        rows(positions)


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (5, "a list of whole numbers"),
        ([0.5], "a list of whole numbers"),
        (["a"], "a list of whole numbers"),
        ([[1, 2]], "a list of whole numbers"),
        ([[1], [2, 3]], "a list of whole numbers"),
        ([True], "a list of whole numbers"),
        ([-1], "0 to 2"),
        ([2**63], "0 to 2"),
    ],
)
def test_what_is_no_position_is_refused(positions: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Loader(numbers(5), batch_size=1).rows(positions)


def test_a_function_that_fails_names_the_row() -> None:
    def picky(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["x"] == 3:
            raise ValueError("three")
        return {"x": sample["x"]}

    rows = Loader(numbers(5), batch_size=1, shuffle=False).map(picky).rows
    assert rows([4, 2])["x"].tolist() == [4, 2]
    with pytest.raises(StageError, match=r"map\(.*picky\) failed on row 3 of the stream: ValueError: three"):
        rows([4, 3])


def test_any_type_of_whole_numbers_will_do() -> None:
    rows = Loader(numbers(300), batch_size=1, shuffle=False).rows
    assert rows(np.array([3, 255], dtype=np.uint8))["x"].tolist() == [3, 255]
    assert rows(range(3))["x"].tolist() == [0, 1, 2]
    assert len(rows([])["x"]) == 0
