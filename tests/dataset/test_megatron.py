import logging
import os
import pickle
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.dataset import megatron
from headrace.dataset.neighbour import NeighbourSource
from headrace.errors import CorruptError, DatasetNotFoundError, FormatError, SettingsError, VersionError
from headrace.store.local import LocalStore
from tests.properties import examples

MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def write_pair(prefix, documents, code=8, *, document_index=None, lead=b"", tail=b"", modes=b"", change=None):
    """Written from the layout, not with Headrace. A document is a list of sequences."""
    dtype = np.dtype(DTYPES[code])
    sequences = [np.asarray(sequence, dtype=dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    sizes = lengths.astype("<i8") * dtype.itemsize
    pointers = len(lead) + np.cumsum(sizes) - sizes
    if document_index is None:
        document_index = np.cumsum([0, *(len(document) for document in documents)])
    arrays = {
        "lengths": lengths,
        "pointers": pointers.astype("<i8"),
        "index": np.array(document_index, dtype="<i8"),
    }
    if change:
        change(arrays)
    Path(f"{prefix}.bin").write_bytes(lead + b"".join(s.tobytes() for s in sequences) + tail)
    head = MAGIC + struct.pack("<QBQQ", 1, code, len(sequences), len(arrays["index"]))
    Path(f"{prefix}.idx").write_bytes(head + b"".join(a.tobytes() for a in arrays.values()) + modes)
    return [np.concatenate([np.empty(0, dtype), *document]).astype(dtype) for document in documents]


THREE = [[[1, 2], [3]], [], [[4, 5, 6]]]
SIDECAR = "pair.bin.headrace-index"


@pytest.mark.parametrize("spelling", ["pair", "pair.bin", "pair.idx"])
def test_opens_by_prefix_bin_or_idx(tmp_path, spelling):
    write_pair(tmp_path / "pair", THREE)
    dataset = headrace.open(tmp_path / spelling)
    assert [record["tokens"].tolist() for record in dataset] == [[1, 2, 3], [], [4, 5, 6]]
    assert dataset.num_tokens == 6
    assert dataset.manifest is None
    assert (tmp_path / SIDECAR).is_file()
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_prefix_may_hold_dots(tmp_path):
    write_pair(tmp_path / "corpus.v1.text", THREE)
    for ending in ("", ".bin", ".idx"):
        assert len(headrace.open(tmp_path / f"corpus.v1.text{ending}")) == 3


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype(tmp_path, code):
    write_pair(tmp_path / "pair", [[[1, 2]], [[100]]], code)
    dataset = headrace.open(tmp_path / "pair")
    assert dataset.fields["tokens"].dtype == np.dtype(DTYPES[code]).name
    assert dataset[0]["tokens"].tolist() == [1, 2]
    assert dataset[1]["tokens"].dtype == np.dtype(DTYPES[code])


@examples(60)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=4), max_size=12),
    in_memory=st.booleans(),
    block=st.integers(1, 5),
)
def test_documents_and_the_by_length_index_agree_with_brute_force(documents, in_memory, block):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "BLOCK", block)
        expected = write_pair(Path(folder) / "pair", documents)
        dataset = headrace.open(Path(folder) / "pair", in_memory=in_memory)
        assert [r["tokens"].tolist() for r in dataset] == [e.tolist() for e in expected]
        lengths = [len(e) for e in expected]
        assert dataset.lengths.tolist() == lengths
        distinct, counts = dataset.length_histogram()
        histogram = dict(zip(distinct.tolist(), counts.tolist(), strict=True))
        assert histogram == {n: lengths.count(n) for n in set(lengths)}
        order = dataset.source.length_table("tokens").order.tolist()
        assert order == sorted(range(len(lengths)), key=lengths.__getitem__)


def test_values_are_read_only_views_of_the_file(tmp_path):
    write_pair(tmp_path / "pair", THREE)
    dataset = headrace.open(tmp_path / "pair")
    first, last = dataset[0]["tokens"], dataset[2]["tokens"]
    assert not first.flags.writeable
    assert not first.flags.owndata
    assert last.__array_interface__["data"][0] - first.__array_interface__["data"][0] == 6
    held = headrace.open(tmp_path / "pair", in_memory=True)[0]["tokens"]
    assert held.tolist() == [1, 2, 3]
    assert not held.flags.writeable


def test_a_pickle_is_small_and_reopens(tmp_path, monkeypatch):
    write_pair(tmp_path / "pair", [[[7] * 50_000]])
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps(headrace.open("pair"))
    monkeypatch.chdir("/")
    assert len(content) < 1000
    assert len(pickle.loads(content)[0]["tokens"]) == 50_000
    write_pair(tmp_path / "pair", [[[8] * 50_000]])
    with pytest.raises(FormatError, match="has changed since"):
        pickle.loads(content)
    (tmp_path / "pair.bin").unlink()
    with pytest.raises(DatasetNotFoundError, match=r"pair\.bin"):
        pickle.loads(content)


def test_the_index_is_made_once(tmp_path, monkeypatch):
    write_pair(tmp_path / "pair", THREE)
    fingerprint = headrace.open(tmp_path / "pair").fingerprint
    monkeypatch.setattr(megatron.MegatronPair, "documents", lambda self: pytest.fail("indexed again"))
    assert headrace.open(tmp_path / "pair").fingerprint == fingerprint


def test_the_index_is_made_again_when_the_content_changes_though_size_and_time_do_not(tmp_path):
    write_pair(tmp_path / "pair", [[[1, 2]], [[3]]])
    assert headrace.open(tmp_path / "pair").lengths.tolist() == [2, 1]
    times = os.stat(tmp_path / "pair.idx").st_mtime_ns
    write_pair(tmp_path / "pair", [[[1]], [[2, 3]]])
    os.utime(tmp_path / "pair.idx", ns=(times, times))
    assert headrace.open(tmp_path / "pair").lengths.tolist() == [1, 2]


def test_copies_have_the_same_fingerprint_and_other_tokens_another(tmp_path):
    for name, token in (("a", 1), ("b", 1), ("c", 2)):
        write_pair(tmp_path / name, [[[token, 5]]])
    a, b, c = (headrace.open(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c


def test_a_damaged_sidecar_is_replaced(tmp_path, caplog):
    write_pair(tmp_path / "pair", THREE)
    headrace.open(tmp_path / "pair")
    sidecar = tmp_path / SIDECAR
    whole = sidecar.read_bytes()
    for cut in (0, 10, 70, len(whole) // 2, len(whole) - 1):
        sidecar.write_bytes(whole[:cut])
        assert headrace.open(tmp_path / "pair").lengths.tolist() == [3, 0, 3]
        assert sidecar.read_bytes() == whole
    assert "cannot be used" in caplog.text


def test_without_a_place_for_the_index_it_is_held_in_ram_and_a_warning_says_so(tmp_path, caplog):
    write_pair(tmp_path / "pair", THREE)
    (tmp_path / SIDECAR).mkdir()  # the tests may run as root, whom no permission stops
    with caplog.at_level(logging.WARNING):
        dataset = headrace.open(tmp_path / "pair")
    assert [r["tokens"].tolist() for r in dataset] == [[1, 2, 3], [], [4, 5, 6]]
    assert "held in RAM" in caplog.text
    assert not [path for path in tmp_path.iterdir() if path.is_file() and path.suffix not in (".bin", ".idx")]
    assert [r["tokens"].tolist() for r in pickle.loads(pickle.dumps(dataset))] == [[1, 2, 3], [], [4, 5, 6]]


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory(tmp_path, caplog):
    write_pair(tmp_path / "pair", THREE)
    tmp_path.chmod(0o500)
    assert len(headrace.open(tmp_path / "pair")) == 3
    tmp_path.chmod(0o700)
    assert "held in RAM" in caplog.text


@pytest.mark.parametrize("index", [[], [0]])
def test_without_marked_documents_each_sequence_is_one(tmp_path, caplog, index):
    write_pair(tmp_path / "pair", THREE, document_index=index)
    dataset = headrace.open(tmp_path / "pair")
    assert [r["tokens"].tolist() for r in dataset] == [[1, 2], [3], [4, 5, 6]]
    assert "no documents are marked" in caplog.text


def test_tokens_that_begin_later_end_earlier_or_have_modes(tmp_path, caplog):
    write_pair(tmp_path / "pair", THREE, lead=b"xyz", tail=b"12345", modes=bytes(3))
    dataset = headrace.open(tmp_path / "pair")
    assert [r["tokens"].tolist() for r in dataset] == [[1, 2, 3], [], [4, 5, 6]]
    assert "8 bytes belong to no sequence" in caplog.text


def test_no_documents_at_all(tmp_path):
    write_pair(tmp_path / "pair", [])
    dataset = headrace.open(tmp_path / "pair")
    assert len(dataset) == 0
    assert dataset.num_tokens == 0
    assert dataset.length_histogram()[0].tolist() == []


def _set(name, place, value):
    def change(arrays):
        arrays[name][place] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_set("pointers", 1, 6), FormatError, "are contiguous"),
        (_set("pointers", 1, -2), CorruptError, "past that"),
        (_set("pointers", 2, 2**62), CorruptError, "past that"),
        (_set("pointers", 0, 2**63 - 1), CorruptError, "past that"),
        (_set("lengths", 2, 2**31 - 1), CorruptError, "truncated"),
        (_set("lengths", 0, -1), CorruptError, "negative"),
        (_set("index", 1, 9), CorruptError, "decreases"),
        (_set("index", -1, 2), CorruptError, "instead of from 0 to 3"),
        (_set("index", 0, 1), CorruptError, "instead of from 0 to 3"),
        (_set("index", 2, -(2**63)), CorruptError, "decreases"),
    ],
)
def test_forged_arrays_are_refused(tmp_path, change, error, words):
    write_pair(tmp_path / "pair", THREE, change=change)
    with pytest.raises(error, match=words):
        headrace.open(tmp_path / "pair")
    assert not (tmp_path / SIDECAR).exists()


@pytest.mark.parametrize(
    ("at", "content", "error"),
    [
        (0, b"PK", FormatError),
        (9, struct.pack("<Q", 2), VersionError),
        (17, b"\x09", CorruptError),
        (18, struct.pack("<Q", 2**60), CorruptError),
        (26, struct.pack("<Q", 2**64 - 1), CorruptError),
    ],
)
def test_forged_headers_are_refused(tmp_path, at, content, error):
    write_pair(tmp_path / "pair", THREE)
    raw = bytearray((tmp_path / "pair.idx").read_bytes())
    raw[at : at + len(content)] = content
    (tmp_path / "pair.idx").write_bytes(raw)
    with pytest.raises(error):
        headrace.open(tmp_path / "pair")


def test_every_truncation_is_refused(tmp_path):
    write_pair(tmp_path / "pair", THREE)
    raw = (tmp_path / "pair.idx").read_bytes()
    for cut in range(len(raw)):
        (tmp_path / "pair.idx").write_bytes(raw[:cut])
        with pytest.raises(FormatError):
            headrace.open(tmp_path / "pair")
    (tmp_path / "pair.idx").write_bytes(raw)
    (tmp_path / "pair.bin").write_bytes((tmp_path / "pair.bin").read_bytes()[:-1])
    with pytest.raises(CorruptError, match="copy both again"):
        headrace.open(tmp_path / "pair")


@examples(150)
@given(at=st.integers(0, 200), value=st.integers(0, 255))
def test_a_changed_byte_raises_only_our_errors(at, value):
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "pair"
        write_pair(prefix, THREE)
        raw = bytearray(Path(f"{prefix}.idx").read_bytes())
        raw[at % len(raw)] = value
        Path(f"{prefix}.idx").write_bytes(raw)
        try:
            for record in headrace.open(prefix):
                assert len(record["tokens"]) <= 6
        except FormatError:
            pass


def test_a_missing_half_is_named(tmp_path):
    write_pair(tmp_path / "pair", THREE)
    (tmp_path / "pair.bin").rename(tmp_path / "other.bin")
    for spelling in ("pair", "pair.idx", "pair.bin"):
        with pytest.raises(DatasetNotFoundError, match=r"pair\.bin: missing"):
            headrace.open(tmp_path / spelling)
    with pytest.raises(DatasetNotFoundError, match=r"other\.idx: missing"):
        headrace.open(tmp_path / "other")


def test_settings_of_raw_files_are_refused(tmp_path):
    write_pair(tmp_path / "pair", THREE)
    with pytest.raises(SettingsError, match="eos_id=3"):
        headrace.open(tmp_path / "pair", eos_id=3)
    with pytest.raises(SettingsError, match="dtype='uint16'"):
        headrace.open(tmp_path / "pair.bin", dtype="uint16")


def test_many_may_open_it_for_the_first_time_at_once(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    write_pair(tmp_path / "pair", THREE)
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: headrace.open(tmp_path / "pair").lengths.tolist(), range(32)))
    assert opened == [[3, 0, 3]] * 32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.bin", SIDECAR, "pair.idx"]


def test_the_length_table_finds_every_record(tmp_path):
    expected = write_pair(tmp_path / "pair", THREE)
    source = NeighbourSource(megatron.MegatronPair(LocalStore(tmp_path), "pair.bin"))
    table = source.length_table("tokens")
    for length, start, stop in zip(table.lengths, table.starts[:-1], table.starts[1:], strict=True):
        for place in range(int(start), int(stop)):
            assert len(expected[int(table.order[place])]) == length
