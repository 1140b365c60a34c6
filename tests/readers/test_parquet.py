"""Parquet: row groups, columns of all kinds, and what damaged files say."""

import decimal
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FieldError, FormatError, HeadraceError, SettingsError
from headrace.format.fields import parse_fields
from headrace.readers import parquet
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import ReadOptions
from tests.readers.places import infer, without_remedies

TEXT = ReadOptions(text_field="text")


def store(path, columns, **settings):
    pq.write_table(pa.table(columns), path, **settings)
    return path


@pytest.fixture
def save(tmp_path):
    return lambda columns, **settings: store(tmp_path / "a.parquet", columns, **settings)


@given(
    st.lists(st.none() | st.text(max_size=20), max_size=40),
    st.integers(1, 20),
    st.integers(1, 400),
    st.integers(1, 200),
    st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.string_view(), "dictionary"]),
)
def test_texts_do_not_depend_on_groups_ranges_and_blocks(
    gather, write, texts, group_rows, target_bytes, block_bytes, kind
):
    values = [
        None if text is None else text.encode("utf-8") if kind == pa.binary() else text for text in texts
    ]
    array = pa.array(values, pa.string() if kind == "dictionary" else kind)
    array = array.dictionary_encode() if kind == "dictionary" else array
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": list(range(len(texts))), "text": array}), sink, row_group_size=group_rows)
    path = write("a.parquet", sink.getvalue().to_pybytes())
    got = gather(path, target_bytes, text_field="text", block_bytes=block_bytes)
    assert got.columns.get("text", []) == [text.encode() for text in texts if text is not None]
    assert got.where == [f"row {row}" for row, text in enumerate(texts) if text is not None]
    assert got.bad == [(f"row {row}", "'text' is null") for row, text in enumerate(texts) if text is None]


def test_ranges_are_groups_joined_to_the_target(save):
    path = save(
        {"text": ["x" * 1000 + str(n) for n in range(100)], "other": ["y" * 9999] * 100}, row_group_size=10
    )
    assert parquet.plan(LocalRawFile(path), 25_000, TEXT) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert parquet.plan(LocalRawFile(path), 1, TEXT) == [(n, n + 1) for n in range(10)]
    assert parquet.plan(LocalRawFile(path), 10**9, TEXT) == [(0, 10)]


def test_progress_adds_up_to_the_file(save, gather):
    noise = np.random.default_rng(0)
    path = save(
        {"text": [noise.bytes(500).hex() for _ in range(500)], "n": list(range(500))}, row_group_size=64
    )
    got = gather(path, 50_000, text_field="text", block_bytes=10_000)
    assert 0.9 < got.input_bytes / path.stat().st_size <= 1
    assert max(len(block.columns["text"].data) for block in got.blocks) < 40_000


COLUMNS = {
    "i8": pa.array([1, -2, 3], pa.int8()),
    "u64": pa.array([1, 2**64 - 1, 3], pa.uint64()),
    "f16": pa.array([1.5, 2.5, None], pa.float16()),
    "f32": pa.array([1.5, None, math.inf], pa.float32()),
    "b": pa.array([True, False, True]),
    "s": pa.array(["", "é", "c"]),
    "raw": pa.array([b"\xff", b"", b"\x00"], pa.binary()),
    "fsb": pa.array([b"ab", b"cd", b"ef"], pa.binary(2)),
    "dict": pa.array(["u", "v", "u"]).dictionary_encode(),
    "r": pa.array([[1, 2], [], [3]], pa.list_(pa.int32())),
    "lr": pa.array([[0.5], [], [1, 2]], pa.large_list(pa.float64())),
    "fix": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.uint16(), 2)),
    "grid": pa.array([[[1, 2]] * 3] * 3, pa.list_(pa.list_(pa.int64(), 2), 3)),
    "frames": pa.array([[[1.0, 2.0]], [], [[3.0, 4.0]] * 2], pa.list_(pa.list_(pa.float32(), 2))),
}
NOTATIONS = {
    "i8": "int8",
    "u64": "uint64",
    "f16": "float16",
    "f32": "float32",
    "b": "bool",
    "s": "bytes",
    "raw": "bytes",
    "fsb": "bytes",
    "dict": "bytes",
    "r": "int32[*]",
    "lr": "float64[*]",
    "fix": "uint16[2]",
    "grid": "int64[3,2]",
    "frames": "float32[*,2]",
}


def test_infer_and_read_all_kinds(save, gather):
    path = save(COLUMNS)
    fields = infer(path)
    assert {name: field.notation for name, field in fields.items()} == NOTATIONS
    got = gather(path, fields=fields)
    assert got.bad == []
    (block,) = got.blocks
    for name, field in fields.items():
        column = block.columns[name]
        expected = COLUMNS[name].to_pylist()
        if field.notation == "bytes":
            expected = [value.encode() if isinstance(value, str) else value for value in expected]
        elif name in ("f16", "f32"):
            expected = [math.nan if value is None else value for value in expected]
        else:
            assert got.columns[name] == expected
        np.testing.assert_equal(got.columns[name], expected)
        if not field.variable:
            assert column.dtype == field.numpy_dtype
            assert column.shape == (3, *field.shape)


def test_values_that_do_not_convert_are_bad_records(save, gather):
    path = save(
        {
            "i": pa.array([1, 300, 3, None, 5, 6, 7, 8], pa.int64()),
            "f": pa.array([1.0, 2.0, 2.5, 4.0, 5.0, 6.0, 7.0, None]),
            "x": pa.array(
                [[1, 2], [1, 2], [1, 2], [1, 2], [1], [1, None], None, [1, 2]], pa.list_(pa.int64())
            ),
        }
    )
    got = gather(path, fields=parse_fields({"i": "uint8", "f": "int32", "x": "int8[2]"}))
    assert got.columns == {"i": [1], "f": [1], "x": [[1, 2]]}
    assert without_remedies(got.bad) == [
        ("row 1", "'i' holds 300, which is not uint8"),
        ("row 2", "'f' holds 2.5, which is not int32"),
        ("row 3", "'i' is null"),
        ("row 4", "'x' holds a list of length 1, but int8[2] needs length 2"),
        ("row 5", "'x' holds a null inside a list"),
        ("row 6", "'x' is null"),
        ("row 7", "'f' is null"),
    ]


@given(
    st.lists(st.none() | st.lists(st.none() | st.integers(-200, 200), max_size=4), max_size=20),
    st.lists(st.none() | st.floats(width=32), min_size=20, max_size=20),
    st.integers(1, 100),
)
def test_lists_with_nulls_against_plain_python(gather, write, lists, floats, block_bytes):
    floats = floats[: len(lists)]
    sink = pa.BufferOutputStream()
    table = pa.table({"x": pa.array(lists, pa.list_(pa.int16())), "f": pa.array(floats, pa.float32())})
    pq.write_table(table, sink, row_group_size=7)
    path = write("lists.parquet", sink.getvalue().to_pybytes())
    good = [
        row
        for row, items in enumerate(lists)
        if items is not None and all(item is not None and -128 <= item < 128 for item in items)
    ]
    got = gather(path, fields=parse_fields({"x": "int8[*]", "f": "float64"}), block_bytes=block_bytes)
    assert got.columns.get("x", []) == [lists[row] for row in good]
    expected = [math.nan if floats[row] is None else floats[row] for row in good]
    np.testing.assert_equal(got.columns.get("f", []), expected)
    assert got.where == [f"row {row}" for row in good]
    assert [where for where, _ in got.bad] == [f"row {row}" for row in range(len(lists)) if row not in good]


def test_invalid_utf8_is_a_bad_text_and_good_bytes(save, gather):
    path = save({"text": pa.array([b"ok", b"\xff", None, "é".encode(), b""], pa.binary())})
    got = gather(path, text_field="text")
    assert got.columns == {"text": [b"ok", "é".encode(), b""]}
    assert got.bad == [
        ("row 1", "not UTF-8: invalid start byte (byte 0 of the text)"),
        ("row 2", "'text' is null"),
    ]
    assert gather(path, fields=parse_fields({"text": "bytes"})).columns["text"][1] == b"\xff"


def test_strings_split_inside_a_character_are_bad_though_their_bytes_together_are_fine(save, gather):
    path = save({"text": pa.array([b"\xc3", b"\xa9"], pa.binary())})
    assert len(gather(path, text_field="text").bad) == 2


@pytest.mark.parametrize(
    "array",
    [
        pa.array([{"a": 1}]),
        pa.array([0], pa.timestamp("us")),
        pa.array([decimal.Decimal("1.5")]),
        pa.array([[["a"]]]),
        pa.array([None]),
    ],
    ids=lambda array: str(array.type),
)
def test_types_that_make_no_field_are_named(save, gather, array):
    path = save({"fine": [1], "odd": array})
    with pytest.raises(SettingsError, match="a.parquet: column 'odd' is of type .*, which no field can hold"):
        infer(path)
    assert gather(path, fields=parse_fields({"fine": "int64"})).columns == {"fine": [1]}


def test_columns_that_are_missing_or_of_another_kind(save, gather):
    path = save({"id": [1], "body": ["x"]})
    with pytest.raises(FieldError, match="no column 'text'; the columns are: id, body.*text_field=NAME"):
        gather(path, text_field="text")
    with pytest.raises(FieldError, match="column 'id' is of type int64, not text"):
        gather(path, text_field="id")
    for notation in ("int64", "float32[*]"):
        with pytest.raises(FieldError, match="column 'body' is of type string, which cannot become"):
            gather(path, fields=parse_fields({"body": notation}))
    with pytest.raises(FieldError, match="column 'id' is of type int64, which cannot become bytes"):
        gather(path, fields=parse_fields({"id": "bytes"}))


def test_names_with_dots_and_nested_neighbours(save, gather):
    path = save({"a.b": ["x"], "a": [{"b": "y"}], "b": ["z"]})
    assert gather(path, text_field="a.b").columns == {"a.b": [b"x"]}
    assert gather(path, text_field="b").columns == {"b": [b"z"]}


def test_empty_tables(save, gather):
    for path in (
        save({"text": pa.array([], pa.string())}),
        save({"text": pa.array([], pa.string())}, row_group_size=1),
    ):
        assert gather(path, text_field="text").where == []


def test_fingerprints_follow_the_content_of_the_range(save):
    rows = [f"text {n}" for n in range(40)]
    first = [
        parquet.fingerprint(LocalRawFile(save({"text": rows}, row_group_size=10)), n, n + 1) for n in range(4)
    ]
    rows[25] = "changed"
    second = [
        parquet.fingerprint(LocalRawFile(save({"text": rows}, row_group_size=10)), n, n + 1) for n in range(4)
    ]
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True]
    renamed = parquet.fingerprint(LocalRawFile(save({"other": rows}, row_group_size=10)), 0, 1)
    assert renamed != second[0]
    plain = save({"text": rows}, row_group_size=10, use_dictionary=False)
    assert len({parquet.fingerprint(LocalRawFile(plain), n, n + 1) for n in range(4)}) == 4


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 3
    return {
        "empty": b"",
        "cut": content[:-100],
        "garbage": b"no parquet at all" * 10,
        "footer": content[:-50] + b"\xff" * 20 + content[-30:],
        "pages": content[:4] + b"\xff" * middle + content[4 + middle :],
    }


@pytest.mark.parametrize("how", ["empty", "cut", "garbage", "footer", "pages"])
def test_damaged_files_are_told(save, gather, tmp_path, how):
    path = save({"text": [f"text {n}" for n in range(1000)]})
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(damaged(path.read_bytes())[how])
    with pytest.raises(
        FormatError, match="bad.parquet: not a complete Parquet file: .*copied completely"
    ) as told:
        gather(bad, text_field="text")
    assert ".." not in str(told.value), "Arrow's own sentence may end with a full stop"


def test_a_directory_is_told(tmp_path):
    for call in (
        parquet.look,
        lambda raw: parquet.plan(raw, 1, TEXT),
        lambda raw: parquet.fingerprint(raw, 0, 1),
    ):
        with pytest.raises(HeadraceError, match="is a directory"):
            call(LocalRawFile(tmp_path))


def test_an_index_beyond_its_dictionary_is_a_damaged_file(tmp_path):
    """Every bit of a small file with a dictionary is flipped: the same rows, others, or a clear error."""
    path = tmp_path / "a.parquet"
    column = pa.array(["a text", "another", "a text"]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), path, compression="none")
    whole, refused = path.read_bytes(), 0
    # Beyond the pages comes the footer, at which pyarrow itself may end the process.
    meta = pq.ParquetFile(path).metadata.row_group(0).column(0)
    for place in range(4, 4 + meta.total_compressed_size):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                list(parquet.read(LocalRawFile(path), 0, 1, TEXT, lambda *_: None))
            except HeadraceError:
                refused += 1
    assert refused > 100
