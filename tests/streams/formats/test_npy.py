"""NumPy files as streams: a record is a row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import FieldError, FormatError
from tests.properties import examples


@examples(30)
@given(
    rows=st.integers(0, 60),
    shape=st.sampled_from([(), (3,), (2, 5), (0,)]),
    dtype=st.sampled_from(["<f4", ">i8", "u1", "?"]),
    block_bytes=st.integers(1, 600),
    consumers=st.integers(1, 4),
)
def test_every_row_once_however_it_is_cut_and_shared(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    shape: tuple[int, ...],
    dtype: str,
    block_bytes: int,
    consumers: int,
) -> None:
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    array = np.random.default_rng(rows).integers(0, 200, (rows, *shape)).astype(dtype)
    np.save(path, array)
    found = [record["data"] for record in headrace.stream(path, block_bytes=block_bytes)]
    assert len(found) == rows
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, array, strict=True))
    shared = [
        len(list(headrace.stream(path, block_bytes=block_bytes, rank=rank, world_size=consumers, seed=3)))
        for rank in range(consumers)
    ]
    assert sum(shared) == rows


def test_a_structured_array_has_its_columns(tmp_path: Path) -> None:
    array = np.zeros(5, dtype=[("x", "f4", (2,)), ("y", "i8")])
    array["y"] = np.arange(5)
    np.save(tmp_path / "a.npy", array)
    assert [record["y"] for record in headrace.stream(tmp_path)] == [0, 1, 2, 3, 4]
    assert [set(record) for record in headrace.stream(tmp_path, fields=["x"])] == [{"x"}] * 5
    with pytest.raises(FieldError, match="no column 'z'; the columns are 'x', 'y'"):
        list(headrace.stream(tmp_path, fields=["z"]))


def test_records_are_the_consumers_own(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12).reshape(4, 3))
    records: list[Any] = list(headrace.stream(tmp_path))
    records[0]["data"][:] = 7
    assert records[1]["data"].tolist() == [3, 4, 5]
    assert np.load(tmp_path / "a.npy")[0].tolist() == [0, 1, 2]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-10])
    with pytest.raises(FormatError, match=r"a\.npy: not a complete \.npy file"):
        list(headrace.stream(tmp_path))
