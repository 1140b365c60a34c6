import struct
import tempfile
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.dataset import export
from headrace.dataset.export import export_megatron
from headrace.errors import FieldError, SettingsError
from headrace.format.fields import parse_fields
from headrace.format.finish import finish_dataset
from headrace.format.ragged import Ragged
from headrace.format.shard import ShardBuilder
from headrace.store.local import LocalStore
from tests.properties import examples


def read_pair(prefix):
    """A reader from Megatron's layout alone."""
    raw = Path(f"{prefix}.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\0\0"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", raw, 9)
    assert version == 1
    names = dict(enumerate(["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"], 1))
    dtype = np.dtype(names[code])
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    index = np.frombuffer(raw, "<i8", entries, 34 + 12 * sequences)
    assert len(raw) == 34 + 12 * sequences + 8 * entries
    content = Path(f"{prefix}.bin").read_bytes()
    found = [np.frombuffer(content, dtype, n, p).tolist() for n, p in zip(lengths, pointers, strict=True)]
    assert sum(map(len, found)) * dtype.itemsize == len(content)
    return names[code], [list(chain(*found[a:b])) for a, b in pairwise(index)]


def make_dataset(directory, shards, dtype="uint16", extra=False):
    fields = parse_fields({"tokens": f"{dtype}[*]"} | ({"label": "int64"} if extra else {}))
    entries = []
    for documents in shards:
        builder = ShardBuilder(fields)
        columns = {"tokens": Ragged.from_items([np.array(d, dtype) for d in documents], np.dtype(dtype))}
        builder.append(columns | ({"label": np.arange(len(documents))} if extra else {}))
        entries.append(builder.write(LocalStore(directory)))
    finish_dataset(LocalStore(directory), fields, entries, "tests")
    return headrace.open(directory)


@examples(40)
@given(
    shards=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=6), max_size=3),
    dtype=st.sampled_from(
        ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "float32", "float64"]
    ),
    block=st.integers(1, 5),
)
def test_megatron_and_headrace_both_read_it_back(shards, dtype, block):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "BLOCK", block)
        dataset = make_dataset(Path(folder), shards, dtype)
        written = []
        done = export_megatron(dataset, Path(folder) / "out", progress=written.append)
        expected = list(chain(*shards))
        exported = "int32" if dtype == "uint32" else dtype
        assert read_pair(Path(folder) / "out") == (exported, expected)
        assert (done.documents, done.tokens, done.dtype) == (len(expected), dataset.num_tokens, exported)
        assert sum(written) == dataset.num_tokens
        again = headrace.open(Path(folder) / "out")
        assert [r["tokens"].tolist() for r in again] == expected
        assert again.fields["tokens"].dtype == exported


def test_only_tokens_are_exported(tmp_path):
    done = export_megatron(make_dataset(tmp_path, [[[1, 2]]], extra=True), tmp_path / "out" / "pair.bin")
    assert done.left_out == ("label",)
    assert done.idx_path == tmp_path / "out" / "pair.idx"
    assert read_pair(tmp_path / "out" / "pair") == ("uint16", [[1, 2]])


def test_ids_of_2_31_and_more_are_refused_and_leave_nothing(tmp_path):
    largest = make_dataset(tmp_path, [[[1]], [[2, 2**31 - 1]]], "uint32")
    export_megatron(largest, tmp_path / "fits")
    assert read_pair(tmp_path / "fits") == ("int32", [[1], [2, 2**31 - 1]])
    (tmp_path / "b").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SettingsError, match="2147483648"):
        export_megatron(make_dataset(tmp_path / "b", [[[1]], [[2, 2**31]]], "uint32"), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("dtype", ["uint64", "float16", "bool"])
def test_types_that_megatron_lacks_are_refused(tmp_path, dtype):
    with pytest.raises(FieldError, match=dtype):
        export_megatron(make_dataset(tmp_path, [[[1]]], dtype), tmp_path / "out")


def test_tokens_of_more_than_one_number_are_refused(tmp_path):
    with pytest.raises(FieldError, match="one number for each token"):
        export_megatron(headrace.from_arrays({"tokens": [np.zeros((3, 2), np.int32)]}), tmp_path / "out")


def test_too_long_documents_are_refused(tmp_path):
    # Nobody reads the values: zeros that take no room stand for them.
    long = Ragged(np.broadcast_to(np.zeros(1, np.uint8), (2**31,)), np.array([0, 2**31]))
    with pytest.raises(SettingsError, match="2,147,483,648 tokens"):
        export_megatron(headrace.from_arrays({"tokens": long}), tmp_path / "out")


def test_damaged_offsets_are_not_passed_on(tmp_path):
    damaged = Ragged(np.arange(6, dtype=np.uint8), np.array([0, 4, 2, 6]))
    with pytest.raises(ValueError):
        export_megatron(headrace.from_arrays({"tokens": damaged}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_unasked(tmp_path):
    dataset = make_dataset(tmp_path, [[[1]]])
    for ending in ("bin", "idx"):
        (tmp_path / f"out.{ending}").write_bytes(b"mine")
        with pytest.raises(SettingsError, match=f"out.{ending}: already exists"):
            export_megatron(dataset, tmp_path / "out")
        assert (tmp_path / f"out.{ending}").read_bytes() == b"mine"
        (tmp_path / f"out.{ending}").unlink()
    with pytest.raises(SettingsError, match="prefix"):
        export_megatron(dataset, tmp_path)


def test_overwriting_replaces_both(tmp_path):
    dataset = make_dataset(tmp_path, [[[1], [2, 3]]])
    export_megatron(dataset, tmp_path / "out")
    (tmp_path / "b").mkdir()
    export_megatron(make_dataset(tmp_path / "b", [[[4, 5], [6]]]), tmp_path / "out", overwrite=True)
    assert read_pair(tmp_path / "out") == ("uint16", [[4, 5], [6]])
    # Even a pair over itself: the old file stays mapped until it is read.
    again = headrace.open(tmp_path / "out")
    export_megatron(again, tmp_path / "out", overwrite=True)
    assert read_pair(tmp_path / "out") == ("uint16", [[4, 5], [6]])


def test_an_old_idx_never_stands_beside_a_new_bin(tmp_path, monkeypatch):
    dataset = make_dataset(tmp_path, [[[1], [2, 3]]])
    export_megatron(dataset, tmp_path / "out")
    replace, seen = export.os.replace, []

    def watch(source, target):
        if str(target).endswith(".bin"):
            seen.append((tmp_path / "out.idx").exists())
        replace(source, target)

    monkeypatch.setattr("headrace.store.local.os.replace", watch)
    export_megatron(dataset, tmp_path / "out", overwrite=True)
    assert seen == [False]
    assert read_pair(tmp_path / "out")[1] == [[1], [2, 3]]
