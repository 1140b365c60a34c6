"""Blocks between delimiters: who reads which record, and how much is read for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.readers import ranges, spans
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile
from headrace.readers.spans import Span, delimited_pieces

Write = Callable[[str, bytes], Path]


def blocks_of(path: Path, block_bytes: int) -> list[Span]:
    size = path.stat().st_size
    file = InputFile(str(path), InputFormat.TEXT, size)
    return [Span(file, cut, min(cut + block_bytes, size)) for cut in range(0, size, block_bytes)]


def test_the_example_of_the_module_is_true(write: Write) -> None:
    path = write("a.txt", b"abc\ndefg\nh\nijklmnop\n")
    found = [list(delimited_pieces(block, b"\n")) for block in blocks_of(path, 6)]
    assert found == [[(b"abc\ndefg\n", 0)], [(b"h\nijklmnop\n", 9)], [], []]


@pytest.mark.parametrize("read_bytes", [1, 3, 1000])
def test_pieces_are_whole_records_and_as_small_as_reads(
    write: Write, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"".join(b"%d\n" % number for number in range(2000))
    path = write("b.txt", content)
    monkeypatch.setattr(spans, "READ_BYTES", read_bytes)
    pieces = [piece for block in blocks_of(path, 700) for piece in delimited_pieces(block, b"\n")]
    assert b"".join(piece for piece, _ in pieces) == content
    assert all(content[position:].startswith(piece) and piece.endswith(b"\n") for piece, position in pieces)
    assert max(len(piece) for piece, _ in pieces) <= read_bytes + 5


def test_a_record_over_many_blocks_is_looked_through_once_a_block(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from each of them to its end."""
    path = write("c.txt", b"a\n" + b"x" * 200_000 + b"\nb\n")
    read = 0
    original = ranges.first_delimiter

    def counted(content, delimiter, start, wanted, stop=None):
        nonlocal read
        found = original(content, delimiter, start, wanted, stop)
        read += (found if found >= 0 else stop or len(content)) - wanted
        return found

    monkeypatch.setattr(ranges, "first_delimiter", counted)
    found = [piece for block in blocks_of(path, 1000) for piece, _ in delimited_pieces(block, b"\n")]
    assert b"".join(found) == path.read_bytes()
    assert read < 2.1 * path.stat().st_size
