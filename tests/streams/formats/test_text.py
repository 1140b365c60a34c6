"""Text in blocks: cut anywhere, every record once, as one who reads the file from its beginning would have it."""

import gzip
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

import headrace
from headrace.errors import BadRecordsError, FieldError, StorageError
from tests.properties import examples
from tests.streams import files

Write = Callable[[str, bytes], Path]
RAW = st.lists(
    st.sampled_from(["a", "é", "水", "\n", "\r\n", "\n\n", "\r", "long line " * 3, ""]), max_size=30
).map("".join)
BLOCKS = st.integers(1, 40)


def lines_of(raw: str) -> list[str]:
    """What a line is, said once more: up to a newline, or up to the end if anything is there."""
    found = raw.split("\n")
    if not found[-1]:
        found.pop()
    return [line.removesuffix("\r") for line in found]


@examples(60)
@given(raw=RAW, block_bytes=BLOCKS, world=st.sampled_from(files.WORLDS))
@example(raw="", block_bytes=1, world=3)
@example(raw="\n", block_bytes=1, world=2)
@example(raw="no newline at the end", block_bytes=4, world=2)
@example(raw="a\n" + "x" * 500 + "\nb", block_bytes=3, world=7)
def test_every_line_comes_once(write: Write, raw: str, block_bytes: int, world: int) -> None:
    path = write("a.txt", raw.encode())
    wanted = [{"text": line} for line in lines_of(raw)]
    assert list(headrace.stream(path, block_bytes=block_bytes)) == wanted
    assert files.as_bag(files.joined(files.shares(path, world, block_bytes=block_bytes))) == files.as_bag(
        wanted
    )


@examples(60)
@given(
    raw=st.text(st.sampled_from("ab|é"), max_size=60),
    separator=st.sampled_from(["|", "ab", "aa", "aba", "éaé", "abab"]),
    block_bytes=BLOCKS,
    world=st.sampled_from(files.WORLDS),
)
@example(raw="baaab", separator="aa", block_bytes=3, world=2)
@example(raw="a" * 50, separator="aa", block_bytes=7, world=3)
def test_separators_that_overlap_themselves_are_cut_as_when_read_in_one_go(
    write: Write, raw: str, separator: str, block_bytes: int, world: int
) -> None:
    path = write("b.txt", raw.encode())
    found = raw.split(separator)
    wanted = [{"text": text} for text in (found if found[-1] else found[:-1])]
    options = {"separator": separator, "block_bytes": block_bytes}
    assert list(headrace.stream(path, **options)) == wanted
    assert files.as_bag(files.joined(files.shares(path, world, **options))) == files.as_bag(wanted)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_go_to_one_reader_whole(write: Write, ending: str) -> None:
    texts = files.lines(500)
    content = "\n".join(texts).encode()
    packed = gzip.compress(content) if ending == ".gz" else zstandard.compress(content)
    path = write(f"c.txt{ending}", packed)
    wanted = [{"text": text} for text in texts]
    assert list(headrace.stream(path, block_bytes=10)) == wanted
    assert sorted(map(len, files.shares(path, 3, block_bytes=10))) == [0, 0, 500]


def test_a_damaged_archive_is_named(write: Write) -> None:
    path = write("d.txt.gz", gzip.compress(b"one\ntwo\n" * 5000)[:-20])
    with pytest.raises(StorageError, match=r"d\.txt\.gz: cannot be decompressed"):
        list(headrace.stream(path))


def test_a_file_can_be_one_record(tmp_path: Path) -> None:
    for number, text in enumerate(["one\ntwo\r\n", "", "three"]):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    (tmp_path / "3.txt.gz").write_bytes(gzip.compress(b"four"))
    wanted = [{"text": text} for text in ("one\ntwo\r\n", "", "three", "four")]
    assert list(headrace.stream(tmp_path, split="file", block_bytes=2)) == wanted
    assert files.as_bag(files.joined(files.shares(tmp_path, 3, split="file"))) == files.as_bag(wanted)


def test_bad_utf8_is_told_with_its_place_and_left_out_if_allowed(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    path = write("e.txt", b"fine\n\xff\xfe\nr\xc3\xa9sum\xc3\xa9\r\nb\xffd\nlast")
    with pytest.raises(BadRecordsError, match=r"max_bad_records is 0.*e\.txt, line 2, byte 5: not UTF-8"):
        list(headrace.stream(path))
    for block_bytes in (1, 7, 100):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = list(headrace.stream(path, block_bytes=block_bytes, max_bad_records=2))
        assert [record["text"] for record in found] == ["fine", "résumé", "last"]
        assert ["byte 5:" in text for text in caplog.messages] == [True, False]
        assert "byte 18:" in caplog.messages[1]
    with pytest.raises(
        BadRecordsError, match=r"2 records could not be read, and max_bad_records is 1.*byte 18"
    ):
        list(headrace.stream(path, max_bad_records=1))
    path = write("f.txt", b"\xff")
    with pytest.raises(BadRecordsError, match="byte 0: not UTF-8"):
        list(headrace.stream(path, split="file"))


def test_text_has_one_field(write: Write) -> None:
    path = write("g.txt", b"one")
    assert list(headrace.stream(path, fields=["text"])) == [{"text": "one"}]
    with pytest.raises(FieldError, match="a text file has only one field, 'text'"):
        list(headrace.stream(path, fields=["body"]))


def test_a_file_that_changed_since_is_not_read(write: Write) -> None:
    path = write("h.txt", b"one\ntwo\nthree\n")
    stream = headrace.stream(path, block_bytes=4)
    records = iter(stream)
    assert next(records) == {"text": "one"}
    path.write_bytes(b"one\ntwo\n")
    with pytest.raises(StorageError, match="has 8 bytes now but had 14.*Create the stream again"):
        list(records)
    path.unlink()
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        list(stream)
