"""Arrow files and streams."""

import hashlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FieldError, FormatError, HeadraceError, SettingsError
from headrace.format.fields import parse_fields
from headrace.readers import arrow, arrow_digest
from headrace.readers.formats import InputFormat
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import ReadOptions
from tests.readers.places import infer, without_remedies

TEXT = ReadOptions(text_field="text")


def content(table: pa.Table, rows: int, *, stream: bool = False, **options) -> bytes:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


@given(
    st.lists(st.none() | st.text(max_size=20), max_size=40),
    st.integers(1, 20),
    st.integers(1, 2000),
    st.integers(1, 200),
    st.sampled_from([pa.string(), pa.large_string(), pa.string_view(), "dictionary"]),
    st.sampled_from([{}, {"compression": "zstd"}, {"stream": True}]),
)
def test_texts_do_not_depend_on_batches_ranges_and_blocks(
    gather, write, texts, rows, target_bytes, block_bytes, kind, how
):
    array = pa.array(texts, pa.string() if kind == "dictionary" else kind)
    array = array.dictionary_encode() if kind == "dictionary" else array
    table = pa.table({"n": list(range(len(texts))), "text": array})
    path = write("a.arrow", content(table, rows, **how))
    got = gather(path, target_bytes, text_field="text", block_bytes=block_bytes)
    assert got.columns.get("text", []) == [text.encode() for text in texts if text is not None]
    assert got.where == [f"row {row}" for row, text in enumerate(texts) if text is not None]
    assert got.bad == [(f"row {row}", "'text' is null") for row, text in enumerate(texts) if text is None]


def test_texts_are_views_of_the_mapped_file(gather, write):
    path = write("a.arrow", content(pa.table({"text": ["abc" * 1000] * 1000}), 100))
    before = pa.total_allocated_bytes()
    got = gather(path, text_field="text", block_bytes=50_000)
    assert pa.total_allocated_bytes() - before < 100_000
    assert max(len(block.columns["text"].data) for block in got.blocks) <= 51_000
    assert got.input_bytes == pytest.approx(path.stat().st_size, rel=0.01)


def test_a_streams_progress_adds_up_to_the_file(gather, write):
    path = write(
        "a.arrow", content(pa.table({"text": ["x" * 1000] * 100, "n": list(range(100))}), 10, stream=True)
    )
    assert gather(path, text_field="text").input_bytes == pytest.approx(path.stat().st_size, rel=0.01)


def test_ranges_are_batches_and_a_stream_is_one(write):
    table = pa.table({"text": ["x" * 1000] * 100})
    path = write("a.arrow", content(table, 10))
    assert arrow.plan(LocalRawFile(path), 25_000, TEXT) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert arrow.plan(LocalRawFile(write("b.arrow", content(table, 10, stream=True))), 25_000, TEXT) == [
        (0, 1)
    ]
    assert arrow.plan(LocalRawFile(write("c.arrow", content(table, 1000))), 25_000, TEXT) == [(0, 1)]


@pytest.mark.parametrize("stream", [False, True])
def test_fields(gather, write, stream):
    table = pa.table(
        {
            "i": pa.array([1, None, 3, 4], pa.int16()),
            "x": pa.array([[1, 2], [3, 4], None, [7, 8]], pa.list_(pa.float32(), 2)),
            "r": pa.array([[1], [], [2], [3, 4]], pa.large_list(pa.uint8())),
            "s": ["a", "b", "c", ""],
        }
    )
    path = write("a.feather", content(table, 3, stream=stream))
    fields = infer(path)
    assert {name: field.notation for name, field in fields.items()} == {
        "i": "int16",
        "x": "float32[2]",
        "r": "uint8[*]",
        "s": "bytes",
    }
    got = gather(path, 1, fields=fields)
    assert got.columns == {"i": [1, 4], "x": [[1, 2], [7, 8]], "r": [[1], [3, 4]], "s": [b"a", b""]}
    assert without_remedies(got.bad) == [("row 1", "'i' is null"), ("row 2", "'x' is null")]
    assert got.where == ["row 0", "row 3"]


def test_columns_that_are_missing_or_make_no_field(gather, write):
    path = write("a.arrow", content(pa.table({"id": [1], "when": pa.array([0], pa.timestamp("s"))}), 10))
    with pytest.raises(FieldError, match="no column 'text'; the columns are: id, when"):
        gather(path, text_field="text")
    with pytest.raises(
        SettingsError, match=r"column 'when' is of type timestamp\[s\], which no field can hold"
    ):
        infer(path)
    with pytest.raises(FieldError, match="cannot become int64"):
        gather(path, fields=parse_fields({"when": "int64"}))


def test_fingerprints_follow_the_content_of_the_range(write):
    def prints(texts, name="text"):
        table = pa.table({name: texts, "kind": pa.array(texts).dictionary_encode()})
        path = write("a.arrow", content(table.select([name]), 10))
        return [arrow.fingerprint(LocalRawFile(path), n, n + 1) for n in range(4)]

    rows = [f"text {n}" for n in range(40)]
    first = prints(rows)
    rows[25] = "diff 25"
    assert [a == b for a, b in zip(first, prints(rows), strict=True)] == [True, True, False, True]
    assert prints(rows, "other")[0] != first[0]


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: pa.StructArray.from_arrays([a], ["x"])])
def test_fingerprints_see_dictionaries(write, wrap):
    found = set()
    for words in (["aa", "bb"], ["aa", "cc"]):
        array = wrap(pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(words)))
        found.add(
            arrow.fingerprint(LocalRawFile(write("a.arrow", content(pa.table({"d": array}), 10))), 0, 1)
        )
    assert len(found) == 2


def test_a_streams_fingerprint_is_of_the_whole_file(write):
    a = write("a.arrow", content(pa.table({"text": ["a", "b"]}), 1, stream=True))
    b = write("b.arrow", content(pa.table({"text": ["a", "c"]}), 1, stream=True))
    assert arrow.fingerprint(LocalRawFile(a), 0, 1) != arrow.fingerprint(LocalRawFile(b), 0, 1)


def test_empty_tables(gather, write):
    table = pa.table({"text": pa.array([], pa.string())})
    for stream in (False, True):
        assert gather(write("a.arrow", content(table, 10, stream=stream)), text_field="text").where == []


TABLE = pa.table({"text": [f"text number {n}" for n in range(100)]})
FILE, STREAM = content(TABLE, 10), content(TABLE, 10, stream=True)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"no arrow at all" * 10,
        FILE[:-40],
        FILE[:200],
        STREAM[: len(STREAM) // 2 + 3],
        b"ARROW1",
        b"\xff" * 100,
    ],
    ids=["empty", "garbage", "footer", "head", "stream", "magic", "ones"],
)
def test_damaged_files_are_told(gather, write, damaged):
    with pytest.raises(FormatError, match="a.arrow: not a complete Arrow file: .*copied completely"):
        gather(write("a.arrow", damaged), text_field="text")


def test_offsets_that_point_outside_are_refused(gather, write):
    array = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\xff\xff\xff\x6f\3\0\0\0"), pa.py_buffer(b"abc")]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([array], ["text"]))
    path = write("a.arrow", sink.getvalue().to_pybytes())
    with pytest.raises(FormatError, match="not a complete Arrow file"):
        gather(path, text_field="text")
    with pytest.raises(FormatError, match="not a complete Arrow file"):
        arrow.fingerprint(LocalRawFile(path), 0, 1)


def test_invalid_utf8_in_a_string_column_is_a_bad_record(gather, write):
    array = pa.array([b"ok", b"\xff"]).view(pa.string())
    got = gather(write("a.arrow", content(pa.table({"text": array}), 10)), text_field="text")
    assert got.columns == {"text": [b"ok"]}
    assert got.bad[0][0] == "row 1"


def test_old_feather_and_directories(write, tmp_path):
    with pytest.raises(SettingsError, match="Feather version 1"):
        arrow.plan(LocalRawFile(write("a.feather", b"FEA1" + b"\0" * 100)), 1, TEXT)
    with pytest.raises(HeadraceError, match="is a directory"):
        infer(tmp_path, InputFormat.ARROW)


@pytest.mark.parametrize(
    "values",
    [
        pa.array(range(20)),
        pa.array([True, False, None] * 7),
        pa.array([1.5, None] * 10, pa.float32()),
        pa.array([b"abcd", b"efgh"] * 10, pa.binary(4)),
        pa.array(["a", "b" * 50] * 10, pa.string_view()),
        pa.array(["a", None, "ccc"] * 7),
        pa.array([[1], [2, 3], None] * 7),
        pa.array([{"a": 1, "b": "x"}] * 20),
        pa.array(["a", "b"] * 10).dictionary_encode(),
    ],
    ids=lambda values: str(values.type),
)
def test_a_digest_is_of_the_values_in_a_slice_and_of_no_others(values):
    def digest(array):
        made = hashlib.sha256()
        arrow_digest.update(made, array)
        return made.hexdigest()

    part = values.slice(3, 9)
    if pa.types.is_dictionary(values.type):
        alone = pa.DictionaryArray.from_arrays(
            pa.array(part.indices.to_pylist(), pa.int32()), part.dictionary
        )
    else:
        alone = pa.array(part.to_pylist(), values.type)
    assert digest(part) == digest(alone)
    assert digest(part) != digest(values.slice(3, 8))
