import json
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptError, FormatError, SettingsError, VersionError
from headrace.format.container import Chunks, Section, parse_head, write_container
from headrace.format.fields import DTYPES
from headrace.store.local import LocalStore
from tests.properties import examples

SECTIONS = st.dictionaries(
    # Every file has a section of its own with the last name.
    st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "blocks"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    max_size=6,
)


def array(dtype, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)


@examples(60)
@given(sections=SECTIONS)
def test_sections_come_back(tmp_path_factory, sections):
    directory = tmp_path_factory.mktemp("container")
    arrays = {name: array(dtype, shape) for name, (dtype, shape) in sections.items()}
    stored = write_container(
        LocalStore(directory), "a", "test", {"note": "ü"}, {name: Chunks.of(a) for name, a in arrays.items()}
    )
    raw = np.fromfile(directory / stored.file, np.uint8)
    assert stored.bytes == len(raw)
    assert stored.checksum == xxhash.xxh3_128_hexdigest(raw)
    assert stored.file == f"a-{stored.checksum[:16]}.hdrc"
    assert stored.header_checksum == xxhash.xxh3_64_hexdigest(raw[: stored.header_bytes])
    header = parse_head(raw[: stored.header_bytes].tobytes(), len(raw), "a")
    assert (header.kind, header.attributes) == ("test", {"note": "ü"})
    assert list(header.sections) == [*arrays, "blocks"]
    for name, want in arrays.items():
        got = header.sections[name].view(raw)
        assert got.dtype == want.dtype
        assert header.sections[name].offset % 64 == 0
        np.testing.assert_array_equal(got, want)


def test_pieces_are_joined_and_must_match_what_they_claim(tmp_path):
    pieces = [np.arange(3, dtype="<i4"), np.arange(8, dtype="<i4")[::2]]
    stored = write_container(
        LocalStore(tmp_path), "a", "test", {}, {"x": Chunks(np.dtype("<i4"), (7,), pieces)}
    )
    assert (tmp_path / stored.file).read_bytes()[stored.header_bytes :][:28] == struct.pack(
        "<7i", 0, 1, 2, 0, 2, 4, 6
    )
    with pytest.raises(FormatError, match="got 28 bytes, but its shape"):
        write_container(LocalStore(tmp_path), "b", "test", {}, {"x": Chunks(np.dtype("<i4"), (70,), pieces)})
    assert [path.name for path in tmp_path.iterdir()] == [stored.file]


def test_the_same_content_has_the_same_name(tmp_path):
    first = write_container(LocalStore(tmp_path), "a", "test", {}, {"x": Chunks.of(np.arange(3))})
    assert write_container(LocalStore(tmp_path), "a", "test", {}, {"x": Chunks.of(np.arange(3))}) == first
    assert (
        write_container(LocalStore(tmp_path), "a", "test", {}, {"x": Chunks.of(np.arange(4))}).file
        != first.file
    )


def test_a_header_that_no_reader_takes_is_not_written(tmp_path):
    with pytest.raises(SettingsError, match="use fewer fields"):
        write_container(LocalStore(tmp_path), "a", "test", {"note": "x" * (64 * 2**20)}, {})
    with pytest.raises(FormatError, match="more than 2\\^62 bytes"):
        Section(np.dtype("<i8"), (2**40, 2**40, 0), 0)


def head_of(body, *, magic=b"HEADRACE", version=1, total=None, room=None, zeros=bytes(40), data_bytes=1024):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    padded = raw.ljust(-(-len(raw) // 64) * 64)
    file_bytes = 64 + len(padded) + data_bytes
    preamble = struct.pack(
        "<8sIIQ",
        magic,
        version,
        len(padded) if room is None else room,
        file_bytes if total is None else total,
    )
    return preamble + zeros + padded, file_bytes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"magic": b"SOMETHIN"}, FormatError, "not a Headrace file: it starts with b'SOMETHIN'"),
        ({"version": 2}, VersionError, "format version 2.*upgrade Headrace"),
        ({"version": 0}, VersionError, "format version 0.*rebuild the dataset"),
        ({"total": 3}, CorruptError, "its header says 3: the file was truncated or overwritten"),
        ({"room": 2**32 - 64}, CorruptError, "claims 4294967232 bytes"),
        ({"room": 63}, CorruptError, "claims 63 bytes"),
        ({"room": 128}, CorruptError, "it has 192 bytes, but the manifest says 128"),
        ({"zeros": bytes(39) + b"\x01"}, CorruptError, "do not end in zeros"),
    ],
)
def test_preambles(changes, error, message):
    head, size = head_of({"kind": "test", "sections": []}, **changes)
    with pytest.raises(error, match=message):
        parse_head(head, size, "name")


def test_a_head_that_is_too_short():
    with pytest.raises(CorruptError, match="name: 5 bytes of header are too few"):
        parse_head(b"PENST", 5, "name")


def section(**changes):
    return {"name": "x", "dtype": "uint8", "shape": [10], "offset": 512, **changes}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"kind": "a", "sections": []}x'),
        '{"kind": "a", "sections": []}'.encode("utf-16"),
        {"kind": "a"},
        {"sections": []},
        *({"kind": kind, "sections": []} for kind in (3, None, ["a"])),
        *({"kind": "a", "sections": sections} for sections in (None, {}, 3, "x", [3], [None], [[]], [{}])),
    ],
)
def test_headers_that_are_not_headers(body):
    head, size = head_of(body)
    with pytest.raises(CorruptError, match="name: damaged header"):
        parse_head(head, size, "name")


@pytest.mark.parametrize(
    "sections",
    [
        *([section(name=name)] for name in (3, None, [])),
        *([section(dtype=dtype)] for dtype in ("object", "O", "float128", "<u1", "", None, 3, ["uint8"])),
        *([section(shape=[size])] for size in (-1, 1.0, True, None, "3", [3], 2**63, float("nan"), 10**9)),
        *([section(shape=shape)] for shape in (3, None, "33", {}, {"3": 3}, [1] * 18, [2**62] * 2)),
        [section(shape=[2**62, 2**62, 0])],
        [section(shape=[2**32, 2**32])],
        *([section(offset=offset)] for offset in (-64, 0, 64, 513, 2**62, 512.0, "512", None, 10**30)),
        [section(), section(offset=576)],
        [section(), section(name="y")],
        [section(), section(name="y", offset=448)],
        [section(shape=[65]), section(name="y", offset=576)],
    ],
)
def test_sections_that_cannot_be(sections):
    head, size = head_of({"kind": "a", "sections": sections})
    with pytest.raises(CorruptError, match="name: damaged header") as caught:
        parse_head(head, size, "name")
    assert len(str(caught.value)) < 500


def test_unknown_keys_and_sections_are_ignored():
    head, size = head_of(
        {"kind": "a", "later": 1, "sections": [section(shape=[0]), section(name="y", codec=1)]}
    )
    header = parse_head(head, size, "name")
    assert set(header.sections) == {"x", "y"}
