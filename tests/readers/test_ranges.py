"""Cutting, blocks and decompression of byte files."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, StorageError
from headrace.readers import ranges
from headrace.readers.raw_file import LocalRawFile

CONTENT = st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\n\n", b"xyx"]), max_size=60).map(b"".join)
DELIMITERS = st.sampled_from([b"\n", b"\n\n", b"xyx", b"ab"])


def delimiter_ends(content: bytes, delimiter: bytes) -> set[int]:
    """Where delimiters end for one who reads from the start."""
    ends, found = set(), content.find(delimiter)
    while found >= 0:
        ends.add(found + len(delimiter))
        found = content.find(delimiter, found + len(delimiter))
    return ends


@given(CONTENT, DELIMITERS, st.integers(1, 40))
def test_cuts_cover_the_file_and_fall_after_delimiters(write, content, delimiter, target):
    path = write("a.txt", content)
    cuts = ranges.cut(LocalRawFile(path), target, delimiter)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(content)
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in zip(cuts, cuts[1:], strict=False))
    assert {stop for _, stop in cuts[:-1]} <= delimiter_ends(content, delimiter)
    for start, stop in cuts[:-1]:
        assert stop == min(end for end in delimiter_ends(content, delimiter) if end >= start + target)


@given(CONTENT, DELIMITERS, st.integers(1, 40))
def test_blocks_are_the_content_cut_after_delimiters(write, content, delimiter, block_bytes):
    ends = delimiter_ends(content, delimiter)
    for path in (write("a.txt", content), write("a.txt.gz", gzip.compress(content, 1))):
        blocks = list(ranges.blocks(LocalRawFile(path), 0, len(content), delimiter, block_bytes))
        assert b"".join(block.tobytes() for block, _ in blocks) == content
        assert [position for _, position in blocks] == [0, *np.cumsum([len(b) for b, _ in blocks])][
            : len(blocks)
        ]
        assert {position + len(block) for block, position in blocks[:-1]} <= ends


def test_a_separator_that_overlaps_itself_is_found_as_if_read_from_the_start(write):
    # Two occurrences of the separator overlap in the run of three newlines; the first one counts.
    path = write("a.txt", b"x\n\n\ny\n\nz")
    assert ranges.cut(LocalRawFile(path), 4, b"\n\n") == [(0, 7), (7, 8)]
    assert [block.tobytes() for block, _ in ranges.blocks(LocalRawFile(path), 0, 8, b"\n\n", 4)] == [
        b"x\n\n",
        b"\ny\n\nz",
    ]


def test_a_long_record_makes_one_long_block(write):
    content = b"a" * 100_000 + b"\nb\n"
    for path in (write("l.txt", content), write("l.txt.gz", gzip.compress(content))):
        blocks = [
            block.tobytes() for block, _ in ranges.blocks(LocalRawFile(path), 0, len(content), b"\n", 10)
        ]
        assert b"".join(blocks) == content
        assert blocks[0].startswith(b"a" * 100_000 + b"\n")


def test_several_zstd_frames_are_read_to_the_end(write):
    path = write(
        "a.txt.zst", zstandard.compress(b"one\n") + zstandard.compress(b"") + zstandard.compress(b"two\n")
    )
    assert ranges.read_all(LocalRawFile(path)) == b"one\ntwo\n"


def test_a_large_zstd_file_is_read_in_pieces(write):
    content = np.random.default_rng(1).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()
    path = write("large.zst", zstandard.compress(content))
    pieces = list(ranges.decompressed(LocalRawFile(path)))
    assert b"".join(pieces) == content
    assert len(pieces) > 10


NOISE = np.random.default_rng(0).bytes(300_000)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.gz", gzip.compress(NOISE)[:100_000]),
        ("cut.zst", zstandard.compress(NOISE)[:100_000]),
        ("garbage.gz", b"this is no gzip file" * 100),
        ("garbage.zst", b"this is no zstd file" * 100),
        ("damaged.gz", gzip.compress(b"abc" * 1000)[:30] + b"\xff" * 40),
        ("tail.zst", zstandard.compress(b"abc") + b"garbage at the end"),
    ],
    ids=["cut.gz", "cut.zst", "garbage.gz", "garbage.zst", "damaged.gz", "tail.zst"],
)
def test_damaged_compressed_files_are_told(write, name, content):
    path = write(name, content)
    with pytest.raises(StorageError, match=rf"{name}: cannot be decompressed: .+ copied completely"):
        ranges.read_all(LocalRawFile(path))


def test_what_is_no_file_is_told(tmp_path: Path):
    with pytest.raises(StorageError, match="is a directory; give the files"):
        ranges.cut(LocalRawFile(tmp_path), 10, b"\n")
    with pytest.raises(StorageError, match="No such file"):
        list(ranges.blocks(LocalRawFile(tmp_path / "missing.txt"), 0, 1, b"\n", 10))
    with pytest.raises(HeadraceError):
        ranges.fingerprint(LocalRawFile(tmp_path), 0, 1)


def test_fingerprint_is_of_the_range(write):
    raw, other = (LocalRawFile(write(f"{end}.txt", b"aaaa" + 4 * end.encode())) for end in "bc")
    assert ranges.fingerprint(raw, 0, 4) != ranges.fingerprint(raw, 4, 8)
    assert ranges.fingerprint(raw, 0, 4) == ranges.fingerprint(other, 0, 4)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 100))
def test_joined_units_are_all_there_and_no_range_is_larger_than_needed(sizes, target):
    joined = ranges.join(sizes, target)
    assert [n for a, b in joined for n in range(a, b)] == list(range(len(sizes)))
    assert len(joined) >= 1
    for start, stop in joined:
        assert sum(sizes[start:stop]) <= target or sum(s > 0 for s in sizes[start:stop]) == 1
