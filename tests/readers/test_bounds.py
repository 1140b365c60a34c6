"""A record beyond max_record_bytes is bad, wherever blocks and spans begin, and the others are not touched."""

import csv as python_csv
import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import BadRecordsError, FormatError, SettingsError
from headrace.format.fields import parse_fields
from headrace.readers import csv_header
from headrace.readers.bounds import Bound
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import Split
from tests.readers.places import byte_of, place

SIZES = st.lists(st.integers(0, 30), max_size=12)
BLOCKS = st.integers(1, 60)
LIMITS = st.integers(1, 31)


def packed(write: Any, name: str, content: bytes) -> list[Path]:
    """The same content plain and compressed."""
    return [
        write(name, content),
        write(f"{name}.gz", gzip.compress(content, 1)),
        write(f"{name}.zst", zstandard.compress(content)),
    ]


@given(SIZES, LIMITS, BLOCKS, st.sampled_from([b"\n", b"--", b"aa"]), st.booleans())
def test_documents(gather, write, sizes, limit, block_bytes, separator, ends):
    documents = [b"x" * size for size in sizes]
    content = separator.join(documents) + (separator if ends and documents else b"")
    starts = [
        sum(len(each) + len(separator) for each in documents[:number]) for number in range(len(documents))
    ]
    if not ends and documents and not documents[-1]:
        documents.pop()  # there is nothing after the last separator
    long = [number for number, document in enumerate(documents) if len(document) > limit]
    short = [document for document in documents if len(document) <= limit]
    split = {"split": Split.SEPARATOR, "separator": separator}
    for path in packed(write, "a.txt", content):
        got = gather(path, max_record_bytes=limit, block_bytes=block_bytes, **split)
        assert got.columns.get("text", []) == short
        assert [where for where, _ in got.bad] == [place(content, starts[number]) for number in long]
        assert all(f"a record of {len(documents[n])} bytes" in got.bad[i][1] for i, n in enumerate(long))
        stream = headrace.stream(
            path,
            separator=separator.decode(),
            max_record_bytes=limit,
            block_bytes=block_bytes,
            max_bad_records=len(long),
        )
        assert [record["text"].encode() for record in stream] == short


@given(SIZES, st.integers(6, 36), BLOCKS, st.sampled_from(["x", '"', "\n", ","]))
def test_rows_of_csv(gather, write, sizes, limit, block_bytes, character):
    lines = [b"text,n\n"]
    for number, size in enumerate(sizes):
        text = io.StringIO(newline="")
        python_csv.writer(text, lineterminator="\n").writerow((character * size, number))
        lines.append(text.getvalue().encode())
    long = [number for number, line in enumerate(lines) if number and len(line) > max(limit, 7)]
    short = [number - 1 for number in range(1, len(lines)) if number not in long]
    content = b"".join(lines)
    fields = parse_fields({"n": "int64"})
    for path in packed(write, "a.csv", content):
        got = gather(path, fields=fields, max_record_bytes=max(limit, 7), block_bytes=block_bytes)
        assert got.columns.get("n", []) == short
        starts = [sum(map(len, lines[:number])) for number in long]
        assert [byte_of(where) for where, _ in got.bad] == starts
        stream = headrace.stream(
            path,
            max_record_bytes=max(limit, 7),
            block_bytes=block_bytes,
            max_bad_records=len(long),
            csv_cuts="scan",
        )
        assert [int(record["n"]) for record in stream] == short


@given(
    st.lists(st.sampled_from(["", "a", "bb", "x" * 20, "y" * 40]), min_size=1, max_size=12),
    st.integers(1, 41),
    st.integers(1, 100),
    st.booleans(),
)
def test_rows_of_arrow_and_parquet(gather, tmp_path_factory, texts, limit, block_bytes, as_dictionary):
    folder = tmp_path_factory.mktemp("rows")
    column = pa.array(texts)
    table = pa.table({"t": column.dictionary_encode() if as_dictionary else column})
    pq.write_table(table, folder / "a.parquet", row_group_size=5)
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table, 5)
    long = [number for number, text in enumerate(texts) if len(text) > limit]
    short = [text for text in texts if len(text) <= limit]
    for name in ("a.parquet", "a.arrow"):
        got = gather(folder / name, text_field="t", max_record_bytes=limit, block_bytes=block_bytes)
        assert got.columns.get("t", []) == [text.encode() for text in short]
        assert [where for where, _ in got.bad] == [f"row {number}" for number in long]
        stream = headrace.stream(folder / name, max_record_bytes=limit, max_bad_records=len(long))
        assert [record["t"] for record in stream] == short


def test_whole_files_and_arrays(gather, write, tmp_path):
    for path in packed(write, "b.txt", b"x" * 100):
        assert gather(path, max_record_bytes=100).columns == {"text": [b"x" * 100]}
        ((where, reason),) = gather(path, max_record_bytes=99).bad
        assert (where, reason.split(",")[0]) == ("line 1, byte 0", "a record of 100 bytes")
        with pytest.raises(BadRecordsError, match="max_record_bytes=100"):
            list(headrace.stream(path, split="file", max_record_bytes=99))
    np.save(tmp_path / "a.npy", np.zeros((3, 10), np.float32))
    fields = parse_fields({"data": "float32[10]"})
    assert len(gather(tmp_path / "a.npy", fields=fields, max_record_bytes=40).columns["data"]) == 3
    assert len(gather(tmp_path / "a.npy", fields=fields, max_record_bytes=39).bad) == 3
    assert list(headrace.stream(tmp_path / "a.npy", max_record_bytes=39, max_bad_records=3)) == []


def test_a_header_without_end_is_told(write, monkeypatch):
    monkeypatch.setattr(csv_header, "MAX_RECORD_BYTES", 1000)
    path = write("h.csv", b'"' + b"x" * 3000)
    with pytest.raises(FormatError, match=r"h\.csv: the header row has 3,001 bytes"):
        csv_header.read_header(LocalRawFile(path))
    assert Bound(1, lambda *_: None).most == 1


def test_a_larger_bound_lets_records_in_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short\n" + "long " * 100 + "\n")
    (tmp_path / "b.txt").write_text("other\n")
    options: dict[str, Any] = {"split": "line", "max_bad_records": 1, "workers": 1, "shard_bytes": 4096}
    report = headrace.build(
        [tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "o", max_record_bytes=100, **options
    )
    assert (report.records, report.bad_count) == (2, 1)
    again = headrace.build(
        [tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "o", max_record_bytes=100, **options
    )
    assert (again.built, again.bad_count) == (0, 1)
    larger = headrace.build([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "o", **options)
    assert (larger.records, larger.bad_count) == (3, 0)
    with pytest.raises(SettingsError, match="max_record_bytes=0: must be at least 1"):
        headrace.stream(tmp_path / "a.txt", max_record_bytes=0)
    with pytest.raises(SettingsError, match="max_record_bytes='1'"):
        headrace.build(tmp_path / "a.txt", tmp_path / "p", max_record_bytes="1")  # type: ignore[arg-type]
