"""Small files that hold much more than they seem to: the memory that reading them takes, in a process of its own."""

import gzip
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard

DECODED_BYTES = 256 * 2**20
"""What each of the files would be in memory."""
MOST_BYTES = 290 * 2**20
"""The peak of a whole process, of which the libraries are about 110 MiB."""
ONE_TEXT = "z" * 2**20
ROWS = DECODED_BYTES // len(ONE_TEXT)

MEASURED = """
import logging, re, sys
from pathlib import Path
import headrace
from headrace.readers.formats import format_of
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import ReadOptions, reader_for
logging.disable(logging.WARNING)

def build(path):
    reader, options, bad = reader_for(format_of(path)), ReadOptions(text_field="text", max_record_bytes=2**24), []
    count, raw = 0, LocalRawFile(path)
    for start, stop in reader.plan(raw, 2**40, options):
        for block in reader.read(raw, start, stop, options, lambda *each: bad.append(each)):
            count += len(block)
    return count, len(bad)

def stream(path):
    records = headrace.stream(path, max_record_bytes=2**24, max_bad_records=10)
    return sum(1 for _ in records), 0

count, bad = {"build": build, "stream": stream}[sys.argv[1]](Path(sys.argv[2]))
# Not getrusage, which begins with the peak of the process that started this one.
status = Path("/proc/self/status").read_text()
print(count, bad, int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024)
"""


def write_parquet(path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"text": column}), path, row_group_size=ROWS, store_schema=False)


def write_dictionary(path: Path) -> None:
    write_parquet(path, pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), [ONE_TEXT, "short"]))


def write_arrow(path: Path) -> None:
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), [ONE_TEXT])})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


def chunks() -> Iterator[bytes]:
    """A short line, and one that is as long as all of it."""
    yield b'{"text": "short"}\n{"text": "'
    for _ in range(ROWS):
        yield ONE_TEXT.encode()
    yield b'"}\n'


def write_gzip(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for chunk in chunks():
            file.write(chunk)


def write_zstandard(path: Path) -> None:
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for chunk in chunks():
            writer.write(chunk)


def write_csv(path: Path) -> None:
    """A row with a quote that is never closed."""
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        writer.write(b'text,n\nshort,1\n"')
        for _ in range(ROWS):
            writer.write(ONE_TEXT.encode())


FILES: dict[str, tuple[Callable[[Path], None], int]] = {
    "a.parquet": (write_dictionary, ROWS),
    "a.arrow": (write_arrow, ROWS),
    "a.jsonl.gz": (write_gzip, 1),
    "a.jsonl.zst": (write_zstandard, 1),
    "a.csv.zst": (write_csv, 1),
}
"""By name: how it is written, and how many records it holds that are not too long."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a.parquet", "build"),
        ("a.parquet", "stream"),
        ("a.arrow", "build"),
        ("a.jsonl.gz", "stream"),
        ("a.jsonl.zst", "build"),
        ("a.csv.zst", "stream"),
    ],
)
def test_peak(tmp_path: Path, name: str, how: str) -> None:
    write, count = FILES[name]
    path = tmp_path / name
    write(path)
    assert path.stat().st_size < 8 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, how, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, _, peak = map(int, done.stdout.split())
    assert found == count
    assert peak < MOST_BYTES, f"{peak:,} bytes"
