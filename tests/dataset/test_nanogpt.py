import logging
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.dataset import sidecar
from headrace.dataset.nanogpt import NanogptFile
from headrace.dataset.neighbour import NeighbourSource
from headrace.dataset.sidecar import build_parts, sample_checksum
from headrace.errors import CorruptError, DatasetNotFoundError, FormatError, SettingsError
from headrace.store.address import open_store
from headrace.store.local import LocalStore
from tests.properties import examples


def split(tokens, eos_id):
    """The definition, one token at a time."""
    documents, current = [], []
    for token in tokens:
        current.append(token)
        if token == eos_id:
            documents.append(current)
            current = []
    return documents + ([current] if current else [])


def write(path, tokens, dtype="<u2"):
    np.array(tokens, dtype=dtype).tofile(path)
    return path


def test_documents_end_after_each_eos(tmp_path):
    path = write(tmp_path / "train.bin", [5, 6, 9, 7, 9, 9, 8])
    dataset = headrace.open(path, dtype="uint16", eos_id=9)
    assert [r["tokens"].tolist() for r in dataset] == [[5, 6, 9], [7, 9], [9], [8]]
    assert dataset.fields["tokens"].notation == "uint16[*]"
    assert not dataset[0]["tokens"].flags.writeable
    assert not dataset[0]["tokens"].flags.owndata


def test_without_eos_the_file_is_one_document(tmp_path):
    path = write(tmp_path / "train.bin", [5, 6, 9])
    assert [r["tokens"].tolist() for r in headrace.open(path)] == [[5, 6, 9]]


@examples(80)
@given(
    tokens=st.lists(st.integers(0, 4), max_size=60),
    dtype=st.sampled_from(["uint8", "uint16", "int32", "uint32", "int64"]),
    block_bytes=st.integers(8, 40),
    part_records=st.integers(1, 7),
    in_memory=st.booleans(),
)
def test_the_index_agrees_with_brute_force(tokens, dtype, block_bytes, part_records, in_memory):
    """Blocks and parts of any size, so that documents cross the borders of both."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sidecar.build_parts, "__defaults__", (part_records,))
        path = write(Path(folder) / "t.bin", tokens, dtype)
        source = NeighbourSource(
            NanogptFile(LocalStore(path.parent), path.name, dtype, 3, block_bytes), in_memory
        )
        dataset, expected = headrace.Dataset(source), split(tokens, 3)
        assert [r["tokens"].tolist() for r in dataset] == expected
        assert list(source.part_records) == [
            len(expected[i : i + part_records]) for i in range(0, len(expected), part_records)
        ]
        lengths = [len(document) for document in expected]
        distinct, counts = dataset.length_histogram()
        histogram = dict(zip(distinct.tolist(), counts.tolist(), strict=True))
        assert histogram == {n: lengths.count(n) for n in set(lengths)}
        order = source.length_table("tokens").order.tolist()
        assert order == sorted(range(len(lengths)), key=lengths.__getitem__)
        assert all(record["tokens"].dtype == np.dtype(dtype) for record in dataset)


def test_the_fingerprint_does_not_depend_on_parts(tmp_path, monkeypatch):
    for name in ("a.bin", "b.bin"):
        write(tmp_path / name, [1, 3, 2, 3, 3, 1])
    whole = headrace.open(tmp_path / "a.bin", eos_id=3).fingerprint
    monkeypatch.setattr(sidecar.build_parts, "__defaults__", (2,))
    assert headrace.open(tmp_path / "b.bin", eos_id=3).fingerprint == whole


def test_an_empty_file_has_no_documents(tmp_path):
    (tmp_path / "t.bin").touch()
    assert len(headrace.open(tmp_path / "t.bin")) == 0
    assert len(headrace.open(tmp_path / "t.bin", eos_id=1)) == 0


def test_too_many_tokens_for_one_document_asks_for_eos_id(tmp_path):
    path = tmp_path / "t.bin"
    path.touch()
    os.truncate(path, 2**32)  # sparse: takes no room
    with pytest.raises(SettingsError, match=r"4,294,967,296 tokens .* give eos_id"):
        headrace.open(path, dtype="uint8")
    assert headrace.open(path, dtype="uint16").lengths.tolist() == [2**31]


def test_a_document_beyond_the_limit_is_refused():
    assert build_parts([np.array([2**32 - 1])], "t.bin")[0].tolist() == [0, 2**32 - 1]
    with pytest.raises(FormatError, match=r"document has 4,294,967,296 tokens.*eos_id"):
        build_parts([np.array([5, 2**32 + 5])], "t.bin")


def test_the_index_is_made_again_for_another_eos_dtype_or_content(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "t.bin", [1, 2, 1, 2])
    assert headrace.open(path, eos_id=1).lengths.tolist() == [1, 2, 1]
    assert "made again" not in caplog.text
    assert headrace.open(path, eos_id=2).lengths.tolist() == [2, 2]
    assert headrace.open(path, dtype=np.uint8, eos_id=2).lengths.tolist() == [3, 4, 1]
    assert headrace.open(path).lengths.tolist() == [4]
    write(path, [1, 2, 2, 2, 2])
    assert headrace.open(path, eos_id=2).lengths.tolist() == [2, 1, 1, 1]
    assert caplog.text.count("made again") == 4


def test_a_file_that_grows_while_it_is_indexed_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "t.bin", [1, 2])
    documents = NanogptFile.documents

    def grow(self):
        write(path, [1, 2, 3])
        return documents(self)

    monkeypatch.setattr(NanogptFile, "documents", grow)
    with pytest.raises(headrace.HeadraceError, match="changed while it was being indexed"):
        headrace.open(path, eos_id=2)
    assert not list(tmp_path.glob("*.headrace-index"))


def test_pickles_reopen_with_their_settings(tmp_path):
    path = write(tmp_path / "t.bin", [1, 2, 1, 2], "<u4")
    for in_memory in (False, True):
        content = pickle.dumps(headrace.open(path, dtype="uint32", eos_id=1, in_memory=in_memory))
        assert len(content) < 1000
        assert [r["tokens"].tolist() for r in pickle.loads(content)] == [[1], [2, 1], [2]]


@pytest.mark.parametrize("dtype", ["float32", "uint7", ">u2", object, 5, "bool"])
def test_odd_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(SettingsError, match="dtype="):
        headrace.open(write(tmp_path / "t.bin", [1]), dtype=dtype)


@pytest.mark.parametrize("eos_id", [-1, 65536, 1.5, "1", True])
def test_odd_eos_ids_are_refused(tmp_path, eos_id):
    with pytest.raises(SettingsError, match="eos_id="):
        headrace.open(write(tmp_path / "t.bin", [1]), eos_id=eos_id)


def test_an_odd_size_is_refused(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"123")
    with pytest.raises(CorruptError, match="3 bytes"):
        headrace.open(tmp_path / "t.bin")


def test_the_header_of_llmc_is_not_read_as_tokens(tmp_path):
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 3
    (tmp_path / "t.bin").write_bytes(header.tobytes() + np.arange(3, dtype="<u2").tobytes())
    with pytest.raises(FormatError, match=r"llm\.c"):
        headrace.open(tmp_path / "t.bin", eos_id=2)


def test_a_file_of_another_name_needs_its_dtype(tmp_path):
    path = write(tmp_path / "tokens.u16", [1, 2])
    with pytest.raises(FormatError, match="give dtype too"):
        headrace.open(path)
    assert len(headrace.open(path, dtype="uint16")) == 1


def test_settings_on_a_directory_or_on_nothing(tmp_path):
    with pytest.raises(SettingsError, match="eos_id=3"):
        headrace.open(tmp_path, eos_id=3)
    with pytest.raises(DatasetNotFoundError):
        headrace.open(tmp_path / "none.bin", eos_id=3)


def test_the_sample_sees_the_ends_of_a_large_file_and_all_of_a_small_one(tmp_path):
    path = tmp_path / "t.bin"
    for size in (1, 5000, 65536, 300_000):
        content = bytearray(size)
        path.write_bytes(content)
        before = sample_checksum(LocalStore(tmp_path), "t.bin", size)
        for place in {0, size - 1, size // 2 if size <= 65536 else 0}:
            changed = bytearray(content)
            changed[place] = 1
            path.write_bytes(changed)
            assert sample_checksum(LocalStore(tmp_path), "t.bin", size) != before


def test_nothing_is_written_into_a_bucket_by_reading(s3_place):
    store = open_store(s3_place)
    with store.pending("train.bin") as pending:
        pending.file.write(np.array([1, 2, 9, 3, 9], "<u2").tobytes())
    for _ in range(2):
        dataset = headrace.open(f"{s3_place}/train.bin", eos_id=9)
        assert [record["tokens"].tolist() for record in dataset] == [[1, 2, 9], [3, 9]]
    assert list(store.everything()) == ["train.bin"]
