"""CSV in blocks: records as Python's csv module reads the whole file, cut anywhere, or else a loud error."""

import csv
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import headrace
from headrace.errors import BadRecordsError, FieldError, FormatError, SettingsError
from headrace.readers import csv_cuts, csv_spans
from headrace.readers.quotes import QuoteScanner
from tests.properties import examples
from tests.streams import files

Write = Callable[[str, bytes], Path]
CELLS = st.lists(
    st.sampled_from(["a", "é", '"', ",", "\n", "\r\n", " ", "", 'say ""', "long text " * 4, '5" disk']),
    max_size=5,
).map("".join)
ROWS = st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=12)
PIECES = st.sampled_from(["a", "é", '"', '""', ",", "\n", "\r\n", "x,y", '"q"', ',"', '",', " ", "1"])
RAW = st.lists(PIECES, max_size=50).map("".join)
WINDOWS = st.sampled_from([(2, 4), (5, 9), (16, 32), (64, 128), (2**15, 2**20)])


def written(rows: Any, **dialect: Any) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, **dialect).writerows(rows)
    return text.getvalue().encode()


def as_python_reads(content: str) -> tuple[list[dict[str, str]], int]:
    """The records with as many values as the header, and how many others there are."""
    header, *rows = [row for row in csv.reader(io.StringIO(content, newline="")) if row]
    scanner = QuoteScanner(b",")
    scanner.advance(np.frombuffer(content.encode(), dtype=np.uint8))
    if scanner.inside:
        rows.pop()  # an open quote takes the rest of the file, which is one bad record
    good = [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]
    return good, len(rows) - len(good) + scanner.inside


def shares_or_error(path: Path, world: int, **options: Any) -> list[Any] | None:
    """What all ranks get, or None if one of them refuses to go on."""
    parts = []
    for rank in range(world):
        try:
            parts += list(headrace.stream(path, rank=rank, world_size=world, **options))
        except FormatError as error:
            assert "csv_cuts='scan'" in str(error)
            return None
    return parts


@examples(30)
@example(
    rows=[
        *[("", "", "")] * 5,
        *[("", "", "é"), ("", "", 'aa"'), ("", "", ""), ("", "a", '"')],
        *[("", "aaa", 'asay ""\nsay "",'), ("", "aa,", "aaa\n")],
    ],
    quoting=csv.QUOTE_MINIMAL,
    end="\n",
    last=False,
    block_bytes=1,
    world=3,
    windows=(16, 32),
)
@given(
    rows=ROWS,
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    block_bytes=st.integers(1, 80),
    world=st.sampled_from(files.WORLDS),
    windows=WINDOWS,
)
def test_what_was_written_comes_once_or_an_error_is_raised(
    write: Write,
    rows: Any,
    quoting: Any,
    end: str,
    last: bool,
    block_bytes: int,
    world: int,
    windows: tuple[int, int],
) -> None:
    header = ("id", "text", "more")
    content = written([header, *rows], quoting=quoting, lineterminator=end)
    path = write("a.csv", content if last else content.removesuffix(end.encode()))
    wanted = [dict(zip(header, row, strict=True)) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_cuts, "WINDOWS_BYTES", windows)
        assert list(headrace.stream(path, block_bytes=block_bytes, csv_cuts="scan")) == wanted
        scanned = files.joined(files.shares(path, world, block_bytes=block_bytes, csv_cuts="scan"))
        assert files.as_bag(scanned) == files.as_bag(wanted)
        found = shares_or_error(path, world, block_bytes=block_bytes)
        assert found is None or files.as_bag(found) == files.as_bag(wanted), "lost or doubled without a word"
        if windows[1] > len(content):
            assert found is not None, "the file's beginning is in the window: nothing to guess"


@examples(30)
@given(
    raw=RAW,
    block_bytes=st.integers(1, 60),
    world=st.sampled_from(files.WORLDS),
    windows=WINDOWS,
    read_bytes=st.sampled_from([3, 20, 2**20]),
)
@example(raw='a,"b\nc,d\n' * 3, block_bytes=5, world=2, windows=(2, 4), read_bytes=3)
@example(raw='"a"x""y,b\nc,"d\n"\n', block_bytes=5, world=3, windows=(2, 4), read_bytes=20)
def test_any_bytes_are_read_as_python_reads_them_or_an_error_is_raised(
    write: Write, raw: str, block_bytes: int, world: int, windows: tuple[int, int], read_bytes: int
) -> None:
    content = "l,r\n" + raw
    path = write("b.csv", content.encode())
    wanted, bad = as_python_reads(content)
    options = {"block_bytes": block_bytes, "max_bad_records": 99}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_cuts, "WINDOWS_BYTES", windows)
        patch.setattr(csv_cuts, "_SCAN_BYTES", read_bytes)
        patch.setattr(csv_spans, "READ_BYTES", read_bytes)
        scanned = headrace.stream(path, csv_cuts="scan", **options)
        assert list(scanned) == wanted
        found = shares_or_error(path, world, **options)
        assert found is None or files.as_bag(found) == files.as_bag(wanted), "lost or doubled without a word"
        if bad:
            with pytest.raises(BadRecordsError, match=rf"{bad} records? could not be read, and"):
                list(headrace.stream(path, csv_cuts="scan", block_bytes=block_bytes, max_bad_records=bad - 1))


def test_values_are_strings_or_what_their_type_makes_of_them(write: Write) -> None:
    path = write("c.csv", b'name,price,n\n"a, b",1.5,3\nc,x,4\n\nd,2,\xff\ne,0.5\nf,7,1\n')
    kept = headrace.stream(path, max_bad_records=2)
    assert next(iter(kept)) == {"name": "a, b", "price": "1.5", "n": "3"}
    with pytest.raises(BadRecordsError, match=r"c\.csv, line 5, byte 33: not UTF-8"):
        list(headrace.stream(path))
    typed = headrace.stream(path, types={"price": float, "n": int}, max_bad_records=3)
    assert list(typed) == [{"name": "a, b", "price": 1.5, "n": 3}, {"name": "f", "price": 7.0, "n": 1}]
    with pytest.raises(
        BadRecordsError,
        match=r"c\.csv, line 3, byte 26: 'price' holds 'x', which cannot be converted to float",
    ):
        list(headrace.stream(path, types={"price": float}))
    with pytest.raises(BadRecordsError, match=r"byte 39: 2 values, but the header names 3 columns"):
        list(headrace.stream(path, max_bad_records=1))
    chosen = headrace.stream(path, fields=["price", "name"], max_bad_records=1)
    assert [list(record) for record in chosen] == [["price", "name"]] * 4


def test_columns_are_found_by_their_names(write: Write, tmp_path: Path) -> None:
    path = write("d.csv", b"a,b,a\n1,2,3\n")
    assert list(headrace.stream(path, fields=["b"])) == [{"b": "2"}]
    with pytest.raises(FieldError, match="several columns are named 'a'"):
        list(headrace.stream(path))
    with pytest.raises(FieldError, match="no column 'c'; the columns are 'a', 'b'"):
        list(headrace.stream(path, fields=["c"]))
    with pytest.raises(FieldError, match="types= names 'c', but the columns are 'b'"):
        list(headrace.stream(path, fields=["b"], types={"c": int}))
    with pytest.raises(SettingsError, match="applies only to CSV files"):
        headrace.stream(write("d.txt", b"x"), types={"c": int})
    assert list(headrace.stream(write("d.tsv", b"a\tb\n1,5\t2\n"))) == [{"a": "1,5", "b": "2"}]
    for name, content in (("empty.csv", b""), ("header.csv", b"a,b\n"), ("header_only.csv", b"a,b")):
        assert list(headrace.stream(write(name, content))) == []


def test_compressed_files_and_headers_longer_than_a_block(write: Write) -> None:
    rows = [("x" * 50 + "\nname", "y"), *((f"a\n{n}", f"{n}") for n in range(100))]
    content = written(rows)
    wanted = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    for name, packed in (("e.csv", content), ("e.csv.gz", gzip.compress(content))):
        path = write(name, packed)
        assert list(headrace.stream(path, block_bytes=16)) == wanted
        found = files.joined(files.shares(path, 3, block_bytes=16))
        assert files.as_bag(found) == files.as_bag(wanted)
