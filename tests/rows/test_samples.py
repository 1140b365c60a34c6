"""Rows that are not packed: records of a dataset, and samples of any object with a length and numbered items."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import FieldError, SettingsError, StageError
from headrace.load.loader import Loader
from tests.load import streams
from tests.properties import examples

FIELDS = {"x": "float32[3]", "y": "int64", "words": "uint16[*]", "pairs": "int32[*,2]", "name": "bytes"}


def _record(number: int) -> dict[str, Any]:
    return {
        "x": np.full(3, number, dtype=np.float32),
        "y": number,
        "words": np.arange(number, number + number % 5, dtype=np.uint16),
        "pairs": np.full((number % 3, 2), number, dtype=np.int32),
        "name": b"n" * (number % 4),
    }


def _on_disk(directory: Path, count: int, shard_bytes: int = 300) -> headrace.Dataset:
    with headrace.Writer(directory, FIELDS, shard_bytes=shard_bytes) as writer:
        for number in range(count):
            writer.write(_record(number))
    return headrace.open(directory)


def _records_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A batch of records taken apart, as its users would."""
    records = []
    for row in range(len(batch["y"])):
        record = {"x": batch["x"][row], "y": int(batch["y"][row]), "name": batch["name"][row]}
        for name in ("words", "pairs"):
            start, stop = batch[f"{name}_offsets"][row : row + 2]
            record[name] = batch[name][start:stop]
        records.append(record)
    return records


def _check(record: Mapping[str, Any]) -> int:
    wanted = _record(int(record["y"]))
    for name, value in wanted.items():
        np.testing.assert_array_equal(record[name], value)
    return int(record["y"])


@examples(12)
@given(
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(1, 3),
    st.sampled_from([False, True, headrace.Shuffle(kind="block", block=4, window=2)]),
    st.integers(100, 2000),
)
def test_every_record_comes_once_with_all_its_fields(
    count: int, batch_size: int, world_size: int, shuffle: Any, shard_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = _on_disk(Path(directory), count, shard_bytes)
        options: dict[str, Any] = {
            "shuffle": shuffle,
            "drop_last": False,
            "epochs": 2,
            "world_size": world_size,
        }
        came: list[list[int]] = []
        for rank in range(world_size):
            loader = Loader(data, batch_size=batch_size, rank=rank, **options)
            came.append([_check(record) for batch in streams.take(loader) for record in _records_of(batch)])
        flat = sorted(number for numbers in came for number in numbers)
        assert flat == sorted([*range(count)] * 2)


def test_columns_have_the_types_of_their_fields(tmp_path: Path) -> None:
    batch = next(iter(Loader(_on_disk(tmp_path, 12), batch_size=5)))
    assert {name: str(value.dtype) for name, value in batch.items() if name != "name"} == {
        "x": "float32",
        "y": "int64",
        "words": "uint16",
        "words_offsets": "int64",
        "pairs": "int32",
        "pairs_offsets": "int64",
    }
    assert batch.x.shape == (5, 3)
    assert batch.pairs.shape[1:] == (2,)
    assert batch.words_offsets[0] == 0
    assert batch.words_offsets[-1] == len(batch.words)
    assert all(type(name) is bytes for name in batch.name)


def test_only_the_fields_that_are_asked_for_come(tmp_path: Path) -> None:
    data = _on_disk(tmp_path, 12)
    whole = streams.take(Loader(data, batch_size=5))
    for fields in (["y"], ["name", "words"], ("x",)):
        some = streams.take(Loader(data, batch_size=5, fields=fields))
        for batch, every in zip(some, whole, strict=True):
            assert streams.same([batch], [{name: every[name] for name in batch}])
            assert {name.removesuffix("_offsets") for name in batch} == set(fields)
    assert set(streams.take(Loader(data, batch_size=5, fields=["y"]).map(dict))[0]) == {"y"}


def test_one_field_may_be_named_without_a_list(tmp_path: Path) -> None:
    assert set(next(iter(Loader(_on_disk(tmp_path, 12), batch_size=5, fields="words")))) == {
        "words",
        "words_offsets",
    }


def test_fields_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"fields=.*: the dataset has no 'z'; its fields are 'x', 'y'"):
        Loader(_on_disk(tmp_path, 12), batch_size=5, fields=["x", "z"])
    with pytest.raises(SettingsError, match="fields"):
        Loader(headrace.open(tmp_path), batch_size=5, fields=[])
    with pytest.raises(SettingsError, match="fields"):
        # The samples of a user's own data are what they are.
        Loader(streams.Numbers(5), batch_size=2, fields=["x"])


def test_a_field_called_like_the_offsets_of_another_is_not_mixed_up_with_them() -> None:
    data = headrace.from_arrays({"x": [np.arange(2), np.arange(3)], "x_offsets": np.arange(2)})
    with pytest.raises(SettingsError, match="x_offsets"):
        next(iter(Loader(data, batch_size=2, prefetch=0)))


SAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dicts": (
        [{"a": n, "b": np.ones(2) * n} for n in range(4)],
        {"a": [0, 1, 2, 3], "b": [[n, n] for n in range(4)]},
    ),
    "tuples": ([(n, float(n)) for n in range(4)], {"field0": [0, 1, 2, 3], "field1": [0.0, 1.0, 2.0, 3.0]}),
    "arrays": (np.arange(8).reshape(4, 2), {"data": [[0, 1], [2, 3], [4, 5], [6, 7]]}),
    "numbers": ([3, 1, 4, 1], {"data": [3, 1, 4, 1]}),
    "texts": (["a", "bb", "", "c"], {"data": ["a", "bb", "", "c"]}),
    "flags": ([True, False, True, True], {"data": [True, False, True, True]}),
    "mappings": ([MappingProxyType({"a": n}) for n in range(4)], {"a": [0, 1, 2, 3]}),
    "a range": (range(4), {"data": [0, 1, 2, 3]}),
    "numbers of two kinds": ([1, 2.5, 3, 4], {"data": [1.0, 2.5, 3.0, 4.0]}),
    "nothing": ([{"a": None, "b": n} for n in range(4)], {"a": [None] * 4, "b": [0, 1, 2, 3]}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_any_object_with_a_length_and_numbered_items_will_do(name: str) -> None:
    data, wanted = SAMPLES[name]
    (batch,) = Loader(data, batch_size=4, shuffle=False)
    assert list(batch) == list(wanted)
    for field, values in wanted.items():
        found = batch[field]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == values
    assert sorted(map(repr, (b[field] for b in Loader(data, batch_size=1)))) == sorted(
        map(repr, (b[field] for b in Loader(data, batch_size=1, shuffle=False)))
    )


def test_large_batches_of_samples_are_stacked() -> None:
    (batch,) = Loader(streams.Numbers(3000), batch_size=3000, shuffle=False)
    assert batch.number.tolist() == list(range(3000))


def test_data_that_fetches_many_at_once_is_asked_for_a_whole_batch() -> None:
    class Bulk(streams.Numbers):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            asked.append(len(indices))
            return [self[index] for index in indices]

    asked: list[int] = []
    batches = streams.take(Loader(Bulk(10), batch_size=5, prefetch=0))
    assert asked == [5, 5]
    assert streams.same(batches, streams.take(Loader(streams.Numbers(10), batch_size=5)))

    class Short(streams.Numbers):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            return [self[index] for index in indices[1:]]

    with pytest.raises(headrace.HeadraceError, match="__getitems__ returned 4 samples for 5 numbers"):
        list(Loader(Short(10), batch_size=5))


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_sample_that_cannot_be_fetched_names_its_rows_and_keeps_the_cause(prefetch: int) -> None:
    class Broken(streams.Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 7:
                raise OSError("the disk is on fire")
            return super().__getitem__(index)

    loader = Loader(Broken(10), batch_size=2, shuffle=False, prefetch=prefetch)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(
        StageError, match=r"begins at row 6 of the stream.*\[6, 7\].*OSError: the disk is on fire"
    ) as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, OSError)
    assert loader.state_dict()["position"] == 6, "the batch that failed counts as handed out"


def test_samples_that_do_not_fit_together_are_refused_with_the_field() -> None:
    with pytest.raises(
        headrace.HeadraceError, match=r"field 'data' of sample 1 has shape \(3,\).*pad or crop"
    ):
        list(Loader([np.ones(2), np.ones(3)], batch_size=2, shuffle=False))
    with pytest.raises(
        headrace.HeadraceError,
        match=r"sample 1 of the batch has the fields \['b'\], but the first has \['a'\]",
    ):
        list(Loader([{"a": 1}, {"b": 1}], batch_size=2, shuffle=False))


@pytest.mark.parametrize("data", [5, None, object(), iter([1]), {1, 2}])
def test_data_without_numbered_items_is_refused(data: Any) -> None:
    with pytest.raises(SettingsError, match="data of type"):
        Loader(data, batch_size=1)


def test_a_dict_of_datasets_is_told_to_be_a_mixture() -> None:
    with pytest.raises(SettingsError, match="mix"):
        Loader({"web": streams.token_dataset([4] * 4)}, batch_size=1, seq_len=4)
    with pytest.raises(SettingsError, match="mix"):
        Loader({"web": streams.Numbers(4)}, batch_size=1)


def test_empty_data_is_refused() -> None:
    for data in ([], streams.Numbers(0), headrace.from_arrays({"x": np.empty(0)})):
        with pytest.raises(SettingsError, match="no rows"):
            Loader(data, batch_size=1)


def test_own_data_has_the_same_order_ranks_and_epochs_as_records() -> None:
    records = headrace.from_arrays({"number": np.arange(20)})
    for options in ({}, {"rank": 1, "world_size": 2}, {"shuffle": False}, {"epochs": 3, "seed": 4}):
        mine = [b["number"].tolist() for b in Loader(streams.Numbers(20), batch_size=3, **options)]
        theirs = [b["number"].tolist() for b in Loader(records, batch_size=3, **options)]
        assert mine == theirs
