"""Text files by file, line and separator."""

import gzip

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, SettingsError
from headrace.readers import text
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import ReadOptions, Split
from tests.readers.places import infer

PIECES = st.lists(st.sampled_from(["a", "é", "\n", "\n\n", "\r\n", "<>", "-"]), max_size=50).map("".join)
SIZES = {"target_bytes": st.integers(1, 50), "block_bytes": st.integers(1, 50)}


def test_a_file_is_a_document(gather, write):
    for path in (write("a.txt", b"one\ntwo"), write("a.txt.gz", gzip.compress(b"one\ntwo"))):
        assert gather(path).columns == {"text": [b"one\ntwo"]}
        assert gather(path, text_field="body").columns == {"body": [b"one\ntwo"]}
    assert infer(path)["text"].notation == "bytes"


@given(content=PIECES, **SIZES)
def test_lines_are_those_of_python(gather, write, content, target_bytes, block_bytes):
    expected = [line.removesuffix("\r").encode() for line in content.split("\n")]
    if content.endswith("\n") or not content:
        expected.pop()
    path = write("a.txt", content.encode())
    got = gather(path, target_bytes, split=Split.LINE, block_bytes=block_bytes)
    assert got.columns.get("text", []) == expected
    assert got.input_bytes == len(content.encode())
    zipped = write("a.txt.zst", zstandard.compress(content.encode()))
    got = gather(zipped, target_bytes, split=Split.LINE, block_bytes=block_bytes)
    assert got.columns.get("text", []) == expected


@given(content=PIECES, separator=st.sampled_from([b"<>", b"\n\n", b"-"]), **SIZES)
def test_separated_documents_do_not_depend_on_the_cuts(
    gather, write, content, separator, target_bytes, block_bytes
):
    expected = content.encode().split(separator)
    if not expected[-1]:
        expected.pop()
    got = gather(
        write("a.txt", content.encode()),
        target_bytes,
        split=Split.SEPARATOR,
        separator=separator,
        block_bytes=block_bytes,
    )
    assert got.columns.get("text", []) == expected


@given(
    st.lists(st.sampled_from([b"ok", "é".encode(), b"\xff", b"a\xc3", b""]), max_size=20), st.integers(1, 30)
)
def test_lines_that_are_not_utf8_are_reported_with_their_place(gather, write, lines, block_bytes):
    path = write("a.txt", b"".join(line + b"\n" for line in lines))
    got = gather(path, split=Split.LINE, block_bytes=block_bytes)
    positions = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    good = [n for n, line in enumerate(lines) if line not in (b"\xff", b"a\xc3")]
    assert got.columns.get("text", []) == [lines[n] for n in good]
    assert got.where == [f"line {n + 1}, byte {positions[n]}" for n in good]
    bad = [n for n in range(len(lines)) if n not in good]
    assert [where for where, _ in got.bad] == [f"line {n + 1}, byte {positions[n]}" for n in bad]
    assert all("not UTF-8" in reason for _, reason in got.bad)


def test_an_empty_file_is_an_empty_document_and_holds_no_line(gather, write):
    path = write("a.txt", b"")
    assert gather(path, split=Split.FILE).columns == {"text": [b""]}
    assert gather(path, split=Split.LINE).where == []


def test_a_separator_is_needed(write):
    with pytest.raises(SettingsError, match="needs a separator, like"):
        text.plan(LocalRawFile(write("a.txt", b"x")), 10, ReadOptions(split=Split.SEPARATOR))


@pytest.mark.parametrize("split", [Split.FILE, Split.LINE])
def test_a_directory_is_told(tmp_path, split):
    with pytest.raises(HeadraceError, match="is a directory"):
        text.plan(LocalRawFile(tmp_path), 10, ReadOptions(split=split))
    with pytest.raises(HeadraceError, match="is a directory"):
        list(text.read(LocalRawFile(tmp_path), 0, 10, ReadOptions(split=split), lambda where, reason: None))
