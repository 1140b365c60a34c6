"""JSON Lines: Arrow's parser and Python's agree, and bad lines are named."""

import gzip
import json
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import headrace
from headrace.errors import HeadraceError, SettingsError
from headrace.format.fields import parse_fields
from headrace.format.ragged import Ragged
from headrace.readers.json_table import TableParser
from tests.readers.places import byte_of, infer, place

KEYS = st.sampled_from(["t", "u", "tt", "T", "t\x00", ""])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["2020-01-01", "\ud83d", "\udc00x", "😀", '"\\/', "a\x00b", " "]),
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=5
)
RECORDS = (
    st.dictionaries(KEYS, VALUES, max_size=4)
    .map(lambda r: {**r})
    .flatmap(
        lambda r: st.sampled_from(
            [json.dumps(r), json.dumps(r, ensure_ascii=False), json.dumps(r, indent=None)]
        )
    )
)
ODD_LINES = st.sampled_from(
    [
        *(
            "",
            " ",
            "null",
            "1",
            "[]",
            '"x"',
            "{",
            "}",
            '{"t":"a"',
            '{"t":"a"} {"t":"b"}',
            '{"t":"a"}{"t":"b"}',
        ),
        *('{"t":"a"} null', '{"t":"a","t":"b"}', '{"t":1,"t":"b"}', '{"u":1,"u":2,"t":"a"}', '{"t":"a",}'),
        *(
            '{"\\u0074":"x"}',
            '{"t":"\\ud83d\\ude00"}',
            '{"t":"\\ud83d"}',
            '{"t":"\\x"}',
            '{"t":"\t"}',
            '{"t":',
        ),
        *(
            '{"u":1e999,"t":"a"}',
            '{"u":01,"t":"a"}',
            '{"u":NaN,"t":"a"}',
            ' {"t":"a"} ',
            '{"t":"a"}\r{"t":"b"}',
        ),
        *(
            '"a"}',
            "{'t':'a'}",
            '{"t":"a"} // x',
            '{"t": {"t": "a"}}',
            '{"t":"a"}\x0b',
            "\ufeff{}",
            '{"u":-,"t":"a"}',
        ),
        *(
            '{"u":.5,"t":"a"}',
            '{"u":1.,"t":"a"}',
            '{"u":1e,"t":"a"}',
            '{"u":tru,"t":"a"}',
            '{"t":"\x7f"}',
            "{}{}",
        ),
    ]
)
LINES = st.lists(st.one_of(RECORDS, RECORDS, ODD_LINES), max_size=8)
ENDS = st.sampled_from(["\n", "\r\n"])


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # lone surrogates make a line that is not UTF-8


def oracle(lines: list[bytes], end: int) -> tuple[list[bytes], list[int], list[int]]:
    """Texts and their byte positions, and the positions of bad lines, by Python's json alone."""
    texts, good, bad, position = [], [], [], 0
    for line in lines:
        try:
            if line.strip(b" \t\r"):
                value = json.loads(line.decode())["t"]
                texts.append(value.encode())
                good.append(position)
        except (ValueError, KeyError, TypeError, AttributeError):
            bad.append(position)
        position += len(line) + end
    return texts, good, bad


@given(LINES, ENDS, st.integers(1, 200), st.integers(1, 200))
@example(["null"], "\n", 100, 100)
@example(['{"t":"a"}', "null"], "\n", 100, 100)
@example(['{"t":', '{"a":1}} {"t":"b"}'], "\n", 100, 100)
@example(['{"t":"a"} {"t":"b"}', '{"t":', '"c"}'], "\n", 100, 100)
def test_texts_are_those_of_python_json(gather, write, lines, end, target_bytes, block_bytes):
    raw = [encoded(line) for line in lines]
    content = b"".join(line + end.encode() for line in raw)
    texts, good, bad = oracle(raw, len(end))
    got = gather(write("a.jsonl", content), target_bytes, text_field="t", block_bytes=block_bytes)
    assert got.columns.get("t", []) == texts
    assert got.where == [place(content, position) for position in good]
    assert [where for where, _ in got.bad] == [place(content, position) for position in bad]
    assert got.input_bytes == len(content)
    zipped = gather(write("a.jsonl.gz", gzip.compress(content, 1)), text_field="t", block_bytes=block_bytes)
    assert (zipped.columns.get("t", []), zipped.where) == (texts, got.where)


FIELDS = parse_fields(
    {
        "i": "int32",
        "u": "uint64",
        "f": "float32",
        "b": "bool",
        "s": "bytes",
        "r": "float64[*]",
        "x": "int16[2]",
    }
)
GOOD = {"i": 1, "u": 2, "f": 0.1, "b": True, "s": "é", "r": [1, 2.5], "x": [3, -4]}
FIELD_RECORDS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "i": st.integers(-(2**33), 2**33) | st.sampled_from([1.0, True, "1", None]),
            "u": st.integers(-1, 2**65),
            "f": st.floats(width=64) | st.integers(-(2**80), 2**80) | st.sampled_from([None, "x", False]),
            "b": st.sampled_from([True, False, 0, None]),
            "s": st.text(max_size=4) | st.sampled_from([1, None, "\ud800"]),
            "r": st.lists(st.floats() | st.integers(-5, 5) | st.none(), max_size=4) | st.none(),
            "x": st.lists(st.integers(-40000, 40000), max_size=3) | st.sampled_from([[1, None], [[1], [2]]]),
        },
    ).map(lambda changes: {**GOOD, **changes}),
    max_size=6,
)


@given(FIELD_RECORDS)
def test_both_parsers_give_the_same_columns(gather, write, records):
    path = write("a.jsonl", b"".join(json.dumps(r).encode() + b"\n" for r in records))
    # One line a block: a bad record does not send the others to the slow parser.
    one_by_one = gather(path, fields=FIELDS, block_bytes=1)
    with mock.patch.object(TableParser, "_columns", return_value=None):
        slow = gather(path, fields=FIELDS)
    together = gather(path, fields=FIELDS)
    for other in (slow, together):
        assert repr(other.columns) == repr(one_by_one.columns)  # as text: NaN is not equal to itself
        assert other.where == one_by_one.where
        assert sorted(other.bad) == sorted(one_by_one.bad)
    for where, position in zip(slow.where, range(len(slow.where)), strict=True):
        record = json.loads(path.read_bytes()[byte_of(where) :].split(b"\n")[0])
        assert slow.columns["s"][position].decode() == record["s"]
        assert slow.columns["i"][position] == record["i"]
        assert len(slow.columns["r"][position]) == len(record["r"])


def test_columns_have_the_dtypes_and_shapes_of_their_fields(gather, write):
    path = write("a.jsonl", json.dumps(GOOD).encode() + b"\n" + json.dumps({**GOOD, "r": []}).encode())
    (block,) = gather(path, fields=FIELDS).blocks
    arrays = {n: c.values if isinstance(c, Ragged) else c for n, c in block.columns.items() if n != "s"}
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "i": "int32",
        "u": "uint64",
        "f": "float32",
        "b": "bool",
        "r": "float64",
        "x": "int16",
    }
    assert block.columns["x"].shape == (2, 2)
    assert block.columns["r"].offsets.tolist() == [0, 2, 2]


def test_bad_records_say_why(gather, write):
    lines = [
        *(
            b'{"t": "fine"}',
            b'{"t": null}',
            b'{"body": 1, "id": 2}',
            b'{"t": 5}',
            b"[1]",
            b'{"t": "\xff"}',
            b"{oops",
        ),
        b'{"t": "\\ud800"}',
    ]
    got = gather(write("a.jsonl", b"\n".join(lines)), text_field="t")
    assert got.columns == {"t": [b"fine"]}
    reasons = {where.partition(",")[0]: reason for where, reason in got.bad}
    said = [reasons[f"line {line}"] for line in range(2, len(lines) + 1)]
    assert said[0] == "'t' is null"
    assert said[1] == "no key 't'; the record has: 'body', 'id'; choose a key with text_field=NAME"
    assert said[2] == "'t' is int where text is expected: 5"
    assert said[3].startswith("not a JSON object, but list of int; if this is an array")
    assert said[4].startswith("not UTF-8: invalid start byte (byte 7")
    assert said[5].startswith("not JSON: ")
    assert "surrogates not allowed" in said[6]


def test_bad_numbers_say_why(gather, write):
    fields = parse_fields({"a": "uint8", "x": "int16[2]"})
    lines = [
        b'{"a":300,"x":[1,2]}',
        b'{"a":1,"x":[1,2,3]}',
        b'{"a":1,"x":[1,null]}',
        b'{"a":1}',
        b'{"a":7,"x":[8,9]}',
    ]
    got = gather(write("a.jsonl", b"\n".join(lines)), fields=fields)
    assert got.columns == {"a": [7], "x": [[8, 9]]}
    assert [reason for _, reason in got.bad] == [
        "'a' holds 300, which is not uint8",
        "'x' holds a list of length 3, but int16[2] needs length 2",
        "'x' holds a null inside a list",
        "no key 'x'; the record has: 'a'; fill it in, or leave the column out by naming the columns to keep with "
        "columns=",
    ]


def test_a_null_or_missing_float_is_nan(gather, write):
    got = gather(write("a.jsonl", b'{"f":null}\n{}\n{"f":1}\n'), fields=parse_fields({"f": "float16"}))
    assert [math.isnan(value) for value in got.columns["f"]] == [True, True, False]
    assert got.bad == []


def test_byte_order_mark_and_deep_nesting(gather, write):
    deep = b'{"u":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for mark in (b"", b"\xef\xbb\xbf"):
        got = gather(write("a.jsonl", mark + b'{"t":"a"}\n{"t":"b"}\n' + deep + b"\n"), text_field="t")
        assert got.columns == {"t": [b"a", b"b"]}
        assert len(got.bad) == 1


def test_blocks_are_bounded(gather, write):
    path = write("a.jsonl", b'{"t":"some text"}\n' * 10_000)
    got = gather(path, text_field="t", block_bytes=10_000)
    assert max(block.input_bytes for block in got.blocks) <= 15_000
    assert len(got.blocks) > 10
    assert len(got.columns["t"]) == 10_000


def test_an_empty_file_holds_no_record(gather, write):
    assert gather(write("a.jsonl", b""), text_field="t").where == []
    assert gather(write("a.jsonl", b"\n \n\r\n"), text_field="t").where == []
    with pytest.raises(HeadraceError, match="fields cannot be inferred"):
        infer(write("a.jsonl", b""))


def test_infer(write):
    record = {"i": 1, "f": 1, "b": True, "s": "x", "r": [1, 2], "q": [], "n": None}
    later = {"i": 2, "f": 0.5, "b": False, "s": "", "r": [], "q": [1, 0.5], "n": 3, "new": "2020-01-01"}
    path = write("a.jsonl", json.dumps(record).encode() + b"\nbroken\n" + json.dumps(later).encode())
    notations = {name: field.notation for name, field in infer(path).items()}
    assert notations == {
        "i": "int64",
        "f": "float64",
        "b": "bool",
        "s": "bytes",
        "r": "int64[*]",
        "q": "float64[*]",
        "n": "int64",
        "new": "bytes",
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": 1}, "'k' holds object"),
        (None, "'k' holds nothing but null"),
        ([], "list of nothing"),
        ([["a"]], "list of list of string"),
        ([1, "a"], "list of int and string"),
    ],
)
def test_infer_names_the_key_that_makes_no_field(write, value, said):
    with pytest.raises(SettingsError, match="a.jsonl: key .* columns=") as caught:
        infer(write("a.jsonl", json.dumps({"k": value}).encode()))
    assert said in str(caught.value)


def test_infer_looks_at_a_megabyte_only(write):
    path = write("a.jsonl.gz", gzip.compress(b'{"i": 1}\n' * 200_000 + b'{"late": 2}\n'))
    assert list(infer(path)) == ["i"]


def test_a_damaged_gzip_file_is_told(gather, write):
    content = np.random.default_rng(0).bytes(50_000).hex().encode()
    path = write("a.jsonl.gz", gzip.compress(b'{"t":"' + content + b'"}\n')[:1000])
    with pytest.raises(HeadraceError, match="cannot be decompressed"):
        gather(path, text_field="t")


@pytest.mark.parametrize("key", ['a"b', "back\\slash", "\x01", "\n", "", "é", "\x7f"])
def test_the_key_of_the_text_may_be_any_string(gather, write, key):
    path = write(
        "k.jsonl", json.dumps({key: "x", "other": 1}).encode() + b"\n" + json.dumps({key: "y"}).encode()
    )
    assert gather(path, text_field=key).columns == {key: [b"x", b"y"]}
    assert [record[key] for record in headrace.stream(path, fields=[key])] == ["x", "y"]
