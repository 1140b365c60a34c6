"""Batches: columns of arrays where values are numbers, of lists where they are not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError, StageError
from headrace.streams.batch import put_together
from tests.streams import files


def test_records_become_columns(tmp_path: Path) -> None:
    files.write_jsonl(tmp_path / "a.jsonl", 10)
    stream = headrace.stream(tmp_path).batch(4)
    batches = list(stream)
    assert [list(batch["n"]) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[0]["n"].dtype == np.int64
    assert batches[0]["x"].dtype == np.float64
    assert batches[1]["text"] == files.lines(8)[4:]
    assert len(list(headrace.stream(tmp_path).batch(4, drop_last=True))) == 2
    assert list(headrace.stream(tmp_path).batch(11, drop_last=True)) == []
    assert [len(group["n"]) for group in headrace.stream(tmp_path).batch(3).batch(2)] == [2, 2]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1, 2], np.array([1, 2])),
        ([1, 2.5], np.array([1.0, 2.5])),
        ([True, False], np.array([True, False])),
        ([True, 1], [True, 1]),
        ([1, None], [1, None]),
        ([2**63, 1], [2**63, 1]),
        (["a", "b"], ["a", "b"]),
        ([b"a", b"b"], [b"a", b"b"]),
        ([[1], [2]], [[1], [2]]),
        ([np.float32(1), np.float32(2)], np.array([1, 2], np.float32)),
        ([np.arange(3), np.arange(3)], np.array([[0, 1, 2], [0, 1, 2]])),
        ([np.arange(3), np.arange(2)], [np.arange(3), np.arange(2)]),
        ([np.arange(3), np.arange(3.0)], [np.arange(3), np.arange(3.0)]),
    ],
)
def test_what_becomes_of_values(values: list[Any], wanted: Any) -> None:
    found = put_together([{"v": value} for value in values])["v"]
    assert type(found) is type(wanted)
    assert files.plain(found) == files.plain(wanted)
    assert files.plain(put_together([(value, 0) for value in values])[0]) == files.plain(wanted)


def test_items_that_are_no_records() -> None:
    assert put_together(["a", "b"]) == ["a", "b"]
    assert put_together([1, 2]).tolist() == [1, 2]
    assert put_together([(1, "a"), (2,)]) == [(1, "a"), (2,)]


def test_records_of_other_fields_are_refused() -> None:
    with pytest.raises(
        StageError, match=r"record 1 of a batch has the fields \['b'\], but the first one has \['a'\]"
    ):
        put_together([{"a": 1}, {"b": 1}])


def test_settings_are_checked(tmp_path: Path) -> None:
    files.write_jsonl(tmp_path / "a.jsonl", 1)
    stream = headrace.stream(tmp_path)
    with pytest.raises(SettingsError, match="batch_size=0: must be at least 1"):
        stream.batch(0)
    with pytest.raises(SettingsError, match="drop_last=1: must be True or False"):
        stream.batch(2, drop_last=1)  # type: ignore[arg-type]


def test_integers_among_floats_are_not_rounded() -> None:
    assert put_together([{"n": 1}, {"n": 0.5}])["n"].tolist() == [1.0, 0.5]
    large = 2**53 + 1
    assert put_together([{"n": large}, {"n": 0.5}])["n"] == [large, 0.5]
    assert put_together([{"n": 2**54}, {"n": 0.5}])["n"].tolist() == [2.0**54, 0.5]
    assert put_together([{"n": 10**400}, {"n": 0.5}])["n"] == [10**400, 0.5]
