"""Arrow files as streams: the file format, whose batches are shared, and the stream format, one consumer's alone."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import BadRecordsError, FieldError, FormatError
from tests.properties import examples

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string()), ("xs", pa.list_(pa.float32()))])


def rows_of(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"n": n, "text": f"row {n} ü" * (n % 3), "xs": [n / 2] * (n % 4)} for n in range(first, first + count)
    ]


def write(path: Path, sizes: list[int], *, stream: bool = False) -> list[dict[str, Any]]:
    """A batch for each size; gives all rows."""
    open_writer = pa.ipc.new_stream if stream else pa.ipc.new_file
    rows: list[dict[str, Any]] = []
    with open_writer(path, SCHEMA) as writer:
        for size in sizes:
            some = rows_of(len(rows), size)
            writer.write_batch(pa.RecordBatch.from_pylist(some, schema=SCHEMA))
            rows += some
    return rows


@examples(30)
@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    blocks=st.integers(1, 60),
    consumers=st.integers(1, 4),
    stream=st.booleans(),
)
def test_every_row_once_however_it_is_cut_and_shared(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], blocks: int, consumers: int, stream: bool
) -> None:
    path = tmp_path_factory.mktemp("arrow") / "a.arrow"
    rows = write(path, sizes, stream=stream)
    # As many blocks, not blocks of a few bytes, which would be thousands.
    block_bytes = -(-path.stat().st_size // blocks)
    assert list(headrace.stream(path, block_bytes=block_bytes)) == rows
    shared = [
        record
        for rank in range(consumers)
        for record in headrace.stream(path, block_bytes=block_bytes, rank=rank, world_size=consumers, seed=3)
    ]
    assert sorted(record["n"] for record in shared) == [row["n"] for row in rows]


def test_it_goes_on_from_a_state(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.arrow", [7] * 20)
    stream = headrace.stream(tmp_path, block_bytes=500)
    items = iter(stream)
    begun = [next(items) for _ in range(45)]
    again = headrace.stream(tmp_path, block_bytes=500)
    again.load_state_dict(stream.state_dict())
    assert begun + list(again) == rows


def test_only_the_wanted_columns(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.arrow", [3, 4])
    found = list(headrace.stream(tmp_path, fields=["xs", "n"]))
    assert found == [{"xs": row["xs"], "n": row["n"]} for row in rows]
    with pytest.raises(FieldError, match="no column 'body'; the columns are 'n', 'text', 'xs'"):
        list(headrace.stream(tmp_path, fields=["body"]))


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_is_none_is_told_with_its_row(tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "a.arrow"
    texts = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    open_writer = pa.ipc.new_stream if stream else pa.ipc.new_file
    with open_writer(path, pa.schema([("text", pa.string())])) as writer:
        for _ in range(2):
            writer.write_batch(pa.RecordBatch.from_arrays([texts], ["text"]))
    found = list(headrace.stream(path, max_bad_records=2))
    assert found == [{"text": "good"}, {"text": "fine"}] * 2
    with pytest.raises(BadRecordsError, match=r"a\.arrow, row 4: not UTF-8"):
        list(headrace.stream(path, max_bad_records=1))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, [100])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FormatError, match=r"a\.arrow"):
        list(headrace.stream(path))
