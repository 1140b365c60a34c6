"""Where a block of CSV begins: told by the bytes near the cut, scanned for where they do not tell, always checked."""

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import BadRecordsError, FormatError
from headrace.readers import csv_cuts, csv_spans
from headrace.readers.csv_cuts import Cuts
from tests.streams import files
from tests.streams.formats.test_csv import written

Write = Callable[[str, bytes], Path]
T = 2**13
"""Bytes of a block here: cuts are far from the beginning of the file, compared with a window of 1,000."""


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_cuts, "WINDOWS_BYTES", (1000, 4000))


@pytest.fixture
def no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Cuts, cut: int) -> int:
        raise AssertionError(f"scanned for byte {cut}")

    monkeypatch.setattr(Cuts, "_scan", refuse)


def prose(number: int) -> str:
    quoted = f'He said: "number {number}, or\nis it?"' if number % 3 else ""
    return f"{quoted} line\n" * (number % 5) + "and so on, " * (number % 7)


TABLES: dict[str, Any] = {
    "numbers": ([(n, n / 7, -n) for n in range(5000)], csv.QUOTE_MINIMAL),
    "everything quoted": ([(n, "some words", "x" * (n % 90)) for n in range(3000)], csv.QUOTE_ALL),
    "prose with quotes and newlines": ([(n, prose(n), n % 2) for n in range(2000)], csv.QUOTE_MINIMAL),
    "prose, everything quoted": ([(n, prose(n), "") for n in range(2000)], csv.QUOTE_ALL),
    "empty quoted values": ([("", "", "") for n in range(5000)], csv.QUOTE_ALL),
    "values that end with a comma": ([(n, f"yes,\nno {n},", "a,") for n in range(3000)], csv.QUOTE_ALL),
    "one bad line in a hundred": (
        [(n, "a", "b", "c") if n % 100 == 0 else (n, "a", "b") for n in range(9000)],
        csv.QUOTE_MINIMAL,
    ),
}


@pytest.mark.usefixtures("small_windows", "no_scan")
@pytest.mark.parametrize("name", TABLES)
def test_ordinary_files_need_no_scan(write: Write, name: str) -> None:
    rows, quoting = TABLES[name]
    path = write("a.csv", written([("a", "b", "c"), *rows], quoting=quoting))
    wanted = [dict(zip("abc", map(str, row), strict=True)) for row in rows if len(row) == 3]
    options = {"block_bytes": T, "max_bad_records": 1000}
    found = files.joined(files.shares(path, 3, **options))
    assert files.as_bag(found) == files.as_bag(wanted)


@pytest.mark.usefixtures("small_windows")
def test_a_long_quoted_text_without_a_quote_near_the_cut_is_scanned_for(write: Write) -> None:
    essay = "No quotes here.\nJust lines, some with commas, some without.\n" * 1000
    rows = [(n, essay[: 20_000 * (n % 3)], "x") for n in range(12)]
    path = write("b.csv", written([("a", "b", "c"), *rows]))
    wanted = [dict(zip("abc", map(str, row), strict=True)) for row in rows]
    assert files.as_bag(files.joined(files.shares(path, 3, block_bytes=T))) == files.as_bag(wanted)


@pytest.mark.usefixtures("small_windows")
def test_a_wrong_guess_is_an_error_that_names_file_byte_and_remedy(write: Write) -> None:
    """A table inside a quoted value: nothing near the cut tells it from the records around it."""
    table = "1,2,3\n" * 5000
    path = write("c.csv", written([("a", "b", "c"), ("x", "y", "z"), ("x", table, "z"), ("x", "y", "z")]))
    for world in (1, 2, 3):
        errors = []
        for rank in range(world):
            # Others may read the inner table's lines, and find them odd too.
            try:
                list(headrace.stream(path, block_bytes=T, rank=rank, world_size=world))
            except (FormatError, BadRecordsError) as error:
                errors.append(str(error))
        named = re.compile(rf"c\.csv: judging by the bytes around byte {T}.*csv_cuts='scan'")
        assert any(named.search(error) for error in errors)
        parts = files.shares(path, world, block_bytes=T, csv_cuts="scan")
        assert files.as_bag(files.joined(parts)) == files.as_bag(
            [{"a": "x", "b": b, "c": "z"} for b in ("y", table, "y")]
        )


@pytest.mark.usefixtures("small_windows")
def test_a_stray_quote_does_not_read_the_rest_of_the_file_into_memory(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"a,b\n" + b"1,2\n" * 1000 + b'3,"4\n' + b"5,6\n" * 200_000
    path = write("d.csv", content)
    read = 0
    original = csv_spans._pieces

    def counted(*arguments: Any) -> Iterator[bytes]:
        nonlocal read
        for chunk in original(*arguments):
            read += len(chunk)
            yield chunk

    monkeypatch.setattr(csv_spans, "_pieces", counted)
    with pytest.raises(FormatError, match="csv_cuts='scan'"):
        list(headrace.stream(path, block_bytes=T))
    assert read < len(content) // 4


def test_a_scan_reads_the_file_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("e.csv", written([("a", "b"), *((n, "x\ny") for n in range(20_000))]))
    monkeypatch.setattr(csv_cuts, "_SCAN_BYTES", 1000)
    read = 0
    original = Cuts._read

    def counted(self: Cuts, position: int, count: int) -> Any:
        nonlocal read
        content = original(self, position, count)
        read += len(content)
        return content

    monkeypatch.setattr(Cuts, "_read", counted)
    stream = headrace.stream(path, csv_cuts="scan", block_bytes=T, seed=1)
    assert len(list(stream)) == 20_000
    assert read < 1.5 * path.stat().st_size
