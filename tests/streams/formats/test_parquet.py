"""Parquet in blocks: row groups go where their first byte lies, each once, and only what is wanted is read."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import BadRecordsError, FieldError, FormatError
from headrace.readers import parquet
from tests.properties import examples
from tests.streams import files


@examples(20)
@given(
    rows=st.integers(0, 60),
    group=st.integers(1, 30),
    block_bytes=st.integers(1, 5000),
    world=st.sampled_from(files.WORLDS),
)
def test_every_row_comes_once(
    tmp_path_factory: pytest.TempPathFactory, rows: int, group: int, block_bytes: int, world: int
) -> None:
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    records = files.write_parquet(path, rows, group)
    assert list(headrace.stream(path, block_bytes=block_bytes)) == records
    found = files.joined(files.shares(path, world, block_bytes=block_bytes))
    assert files.as_bag(found) == files.as_bag(records)


def test_regular_row_groups_do_not_all_go_to_one_worker(tmp_path: Path) -> None:
    """Row groups of equal size begin in every so-manieth block: dealt out in turn, one worker would get them all."""
    for number in range(4):
        table = pa.table({"n": pa.array(range(8000), pa.int64())})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=1000, use_dictionary=False)
    with pq.ParquetFile(tmp_path / "0.parquet") as file:
        size = parquet.extent(file.metadata.row_group(1))[0] - parquet.extent(file.metadata.row_group(0))[0]
    for workers in (2, 4):
        parts = files.shares(tmp_path, workers, block_bytes=size // workers)
        assert sum(map(len, parts)) == 32_000
        assert min(map(len, parts)) >= 32_000 // workers // 3


def test_only_the_wanted_columns_are_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    bad = pa.array([b"fine", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"n": [1, 2], "text": bad, "t": pa.array([5, 6], pa.timestamp("s"))}), path)
    assert list(headrace.stream(path, fields=["n"])) == [{"n": 1}, {"n": 2}]
    with pytest.raises(BadRecordsError, match=r"a\.parquet, row 1: not UTF-8"):
        list(headrace.stream(path, fields=["text"]))
    assert list(headrace.stream(path, fields=["text", "n"], max_bad_records=1)) == [{"text": "fine", "n": 1}]
    with pytest.raises(FieldError, match=r"no column 'body'; the columns are 'n', 'text', 't'"):
        list(headrace.stream(path, fields=["body"]))


def test_row_groups_are_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    records = files.write_parquet(path, 1000, group=1000)
    monkeypatch.setattr(parquet, "READ_BYTES", 2000)
    sizes = []
    to_records = parquet.to_records

    def counted(*arguments):
        records = to_records(*arguments)
        sizes.append(len(records))
        return records

    monkeypatch.setattr(parquet, "to_records", counted)
    assert list(headrace.stream(path)) == records
    assert max(sizes) < 100


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    files.write_parquet(path, 100)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FormatError, match=r"a\.parquet"):
        list(headrace.stream(path))
