import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import CorruptError, FieldError, HeadraceError, SettingsError
from headrace.format.fields import parse_fields
from headrace.format.ragged import Ragged
from headrace.format.shard import ShardBuilder, load_shard
from headrace.store.local import LocalStore

FIELDS = parse_fields({"t": "uint16[*]", "x": "float32[2]", "b": "bytes"})


def columns(lengths, **changes):
    return {
        "t": Ragged.from_items([np.arange(n, dtype=np.uint16) for n in lengths], np.uint16),
        "x": np.ones((len(lengths), 2), np.float32),
        "b": Ragged.from_items([np.full(n, n, np.uint8) for n in lengths], np.uint8),
        **changes,
    }


@given(st.lists(st.integers(0, 300), max_size=50))
def test_a_shard_holds_its_histogram(lengths):
    with tempfile.TemporaryDirectory() as folder:
        builder = ShardBuilder({"t": FIELDS["t"]})
        values = np.zeros(sum(lengths), np.uint16)
        builder.append({"t": Ragged(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))})
        shard = load_shard(
            LocalStore(Path(folder)), builder.write(LocalStore(Path(folder))).stored, {"t": FIELDS["t"]}
        )
    distinct = sorted(set(lengths))
    assert [array.tolist() for array in shard.histogram("t")] == [
        distinct,
        [lengths.count(n) for n in distinct],
    ]
    assert shard.lengths("t").tolist() == lengths


def test_appended_columns_are_joined(tmp_path):
    builder = ShardBuilder(FIELDS)
    builder.append(columns([3, 0]))
    whole = columns([9, 1, 2, 9])["t"]
    stretch = Ragged(whole.values, whole.offsets[1:4])  # a part of a longer column
    builder.append(columns([1, 2], t=stretch))
    builder.append(columns([]))
    assert builder.records == 4
    entry = builder.write(LocalStore(tmp_path))
    stored = entry.stored
    assert stored.file == f"shard-{stored.checksum[:16]}.hdrc"
    assert entry.elements == {"t": 6, "x": 4, "b": 6}
    shard = load_shard(LocalStore(tmp_path), stored, FIELDS)
    assert [item.tolist() for item in shard["t"]] == [[0, 1, 2], [], [0], [0, 1]]
    assert shard["x"].shape == (4, 2)
    assert shard.lengths("t").tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"t": np.zeros(2, np.uint16)}, "'t' is uint16\\[\\*\\]: got ndarray"),
        ({"x": Ragged(np.zeros((2, 2), np.float32), np.arange(3))}, "'x' is float32\\[2\\]: got Ragged"),
        ({"x": [[1, 2], [3, 4]]}, "'x' is float32\\[2\\]: got list"),
        ({"x": np.zeros((2, 2))}, "got values of dtype float64"),
        ({"x": np.zeros((2, 2), ">f4")}, "got values of dtype >f4"),
        ({"x": np.zeros((2, 3), np.float32)}, "got values that each have shape \\(3,\\)"),
        ({"x": np.zeros((3, 2), np.float32)}, "columns of different lengths: .*'x': 3"),
        ({"t": Ragged(np.zeros(5, np.uint16), np.array([0, 4, 2]))}, "must not decrease"),
        ({"t": Ragged(np.zeros(5, np.uint16), np.array([0, 4, 6]))}, "beyond the values"),
        ({"t": Ragged(np.zeros(5, np.uint16), np.array([-1, 2, 5]))}, "must not decrease"),
        ({"t": Ragged(np.zeros(5, np.uint16), np.array([0.0, 2, 5]))}, "n \\+ 1 whole numbers"),
        ({"t": Ragged(np.zeros(5, np.uint16), np.array([], np.int64))}, "n \\+ 1 whole numbers"),
    ],
)
def test_columns_that_do_not_fit(changes, message):
    builder = ShardBuilder(FIELDS)
    with pytest.raises(SettingsError, match=message):
        builder.append(columns([1, 2], **changes))
    assert builder.records == 0


def test_columns_are_exactly_the_fields():
    builder = ShardBuilder(FIELDS)
    with pytest.raises(FieldError, match="must be exactly the fields"):
        builder.append({"x": np.zeros((2, 2), np.float32)})
    with pytest.raises(FieldError, match="must be exactly the fields"):
        builder.append(columns([1], more=np.zeros(1)))


def test_limits():
    """Broadcasting makes long columns of no size."""
    builder = ShardBuilder(parse_fields({"x": "int8"}))
    zero = np.zeros(1, np.int8)
    builder.append({"x": np.broadcast_to(zero, 2**32 - 1)})
    with pytest.raises(
        SettingsError, match="4,294,967,296 records in one shard; the maximum is 4,294,967,295"
    ):
        builder.append({"x": zero})
    builder = ShardBuilder(parse_fields({"t": "int8[*]"}))
    values = np.broadcast_to(zero, 2**32)
    with pytest.raises(SettingsError, match=r"a record has 4,294,967,296 elements; .*Split it"):
        builder.append({"t": Ragged(values, np.array([0, 2**32]))})
    builder.append({"t": Ragged(values, np.array([0, 2**32 - 1]))})


def change_section(directory, stored, name, values):
    """Overwrite the beginning of a section."""
    path = directory / stored.file
    content = bytearray(path.read_bytes())
    listed = json.loads(content[64 : stored.header_bytes])["sections"]
    section = next(section for section in listed if section["name"] == name)
    raw = np.asarray(values, section["dtype"]).tobytes()
    content[section["offset"] : section["offset"] + len(raw)] = raw
    path.write_bytes(content)


@pytest.mark.parametrize("field", ["t", "b"])
@pytest.mark.parametrize(
    "offsets",
    [
        *([1, 3, 3, 6], [0, 3, 3, 5], [0, 3, 3, 7], [0, 2**64 - 1, 3, 6], [0, 5, 2, 6], [0, 7, 7, 6]),
        *([0, 3, 2**63, 6], [0, 1000, 1000, 6], [2**64 - 1, 3, 3, 6], [6, 3, 3, 0], [0, 6, 0, 6]),
    ],
)
def test_wrong_offsets_never_reach_beyond_the_data(write_dataset, reseal, tmp_path, field, offsets):
    records = [{"t": [7, 8, 9], "b": b"abc"}, {"t": [], "b": b""}, {"t": [4, 5, 6], "b": b"def"}]
    manifest = write_dataset(tmp_path, {"t": "uint16[*]", "b": "bytes"}, [records, records[:1]])
    change_section(tmp_path, manifest.shards[0].stored, f"{field}/offsets", np.array(offsets, np.uint64))
    reseal(tmp_path)
    dataset = headrace.open(tmp_path)
    data = list(b"abcdef") if field == "b" else [7, 8, 9, 4, 5, 6]
    failures = 0
    for number in range(3):
        try:
            got = list(dataset[number][field])
        except HeadraceError as error:
            failures += 1
            message = str(error)
        else:
            assert got == data[offsets[number] : offsets[number + 1]]
            assert len(got) == offsets[number + 1] - offsets[number]
    assert failures
    assert "run `headrace verify`" in message or manifest.shards[0].stored.file in message
    for read in (
        lambda: dataset[:],
        lambda: dataset[[0, 1, 2]],
        lambda: list(dataset),
        lambda: dataset.__getitems__([0, 1, 2]),
        lambda: dataset.lengths_of(field),
    ):
        with pytest.raises(CorruptError):
            read()
    assert list(dataset[3]["b"]) == list(b"abc") or failures == 3
    problems = {verdict.file: verdict.problem for verdict in headrace.verify(tmp_path)}
    assert str(tmp_path / manifest.shards[0].stored.file) in problems[manifest.shards[0].stored.file]
    assert problems[manifest.shards[1].stored.file] == ""


def replace_header(directory, stored, edit):
    path = directory / stored.file
    content = path.read_bytes()
    body = json.loads(content[64 : stored.header_bytes])
    edit(body)
    room = stored.header_bytes - 64
    raw = json.dumps(body).encode()
    assert len(raw) <= room
    path.write_bytes(
        content[:12] + struct.pack("<I", room) + content[16:64] + raw.ljust(room) + content[64 + room :]
    )


@pytest.mark.parametrize(
    "edit",
    [
        lambda body: body.update(kind="index"),
        lambda body: body.update(records=2),
        lambda body: body.update(records=2**32),
        lambda body: body.update(records="3"),
        lambda body: body.pop("records"),
        lambda body: body.pop("fields"),
        lambda body: body["fields"][0].update(dtype="int16"),
        lambda body: body["sections"].pop(0),
        lambda body: body["sections"].pop(3),
        lambda body: body["sections"][0].update(shape=[]),
        lambda body: body["sections"][0].update(shape=[2, 1]),
        lambda body: body["sections"][0].update(shape=[1]),
        lambda body: body["sections"][0].update(dtype="int16"),
        lambda body: body["sections"][1].update(shape=[3]),
        lambda body: body["sections"][1].update(dtype="int64"),
        lambda body: body["sections"][2].update(dtype="int32"),
        lambda body: body["sections"][3].update(shape=[]),
        lambda body: body["sections"][3].update(shape=[1]),
        lambda body: body["sections"][3].update(dtype="int8"),
    ],
)
def test_forged_headers_are_refused(write_dataset, reseal, tmp_path, edit):
    manifest = write_dataset(tmp_path, {"t": "uint16[*]"}, [[{"t": [1, 2]}, {"t": []}, {"t": [3]}]])
    stored = manifest.shards[0].stored
    replace_header(tmp_path, stored, edit)
    reseal(tmp_path)
    dataset = headrace.open(tmp_path)
    with pytest.raises(CorruptError, match=stored.file):
        dataset[0]
    assert [bool(verdict.problem) for verdict in headrace.verify(tmp_path)] == [True, False, False]


def test_ragged_by_itself():
    ragged = Ragged.from_items([np.array([1, 2]), np.array([3])], np.int32)
    assert (len(ragged), ragged.values.dtype, ragged.lengths.tolist()) == (2, np.int32, [2, 1])
    assert ragged[-1].tolist() == ragged[1].tolist() == [3]
    assert repr(ragged) == "Ragged(2 items, 3 values of int32)"
    for index in (2, -3):
        with pytest.raises(IndexError, match="out of range for 2 items"):
            ragged[index]
    assert Ragged.from_items([], np.int8, (3,)).values.shape == (0, 3)
