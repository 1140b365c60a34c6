"""JSON lines in blocks: objects as decoded, and what is no object told with its place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import headrace
from headrace.errors import BadRecordsError
from headrace.readers import spans
from tests.properties import examples
from tests.streams import files

Write = Callable[[str, bytes], Path]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
RECORDS = st.lists(st.dictionaries(st.sampled_from(["a", "b", "c", "é"]), VALUES, max_size=3), max_size=12)
BREAKS = st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n"])


@examples(30)
@given(
    records=RECORDS,
    breaks=st.lists(BREAKS, min_size=12, max_size=12),
    ascii=st.booleans(),
    last=st.booleans(),
    block_bytes=st.integers(1, 60),
    world=st.sampled_from(files.WORLDS),
)
def test_every_object_comes_once(
    write: Write,
    records: list[dict[str, Any]],
    breaks: list[str],
    ascii: bool,
    last: bool,
    block_bytes: int,
    world: int,
) -> None:
    raw = "".join(
        json.dumps(record, ensure_ascii=ascii) + end for record, end in zip(records, breaks, strict=False)
    )
    path = write("a.jsonl", (raw if last else raw.rstrip()).encode("utf-8", "surrogatepass"))
    assert list(headrace.stream(path, block_bytes=block_bytes)) == records
    found = files.joined(files.shares(path, world, block_bytes=block_bytes))
    assert files.as_bag(found) == files.as_bag(records)


LINES = st.lists(
    st.sampled_from(
        [
            *(
                '{"a": 1}',
                '{"a": 2, "b": [1, {}]}',
                " {} ",
                "",
                '{"a": NaN}',
                '{"a": "\\ud800"}',
                '{"a": 1e999}',
            ),
            *("[1]", "null", "3", '{"a": 1} {"a": 2}', '{"a": 1', "}", '{"b": 3}', '{"a":\t4}'),
        ]
    ),
    max_size=8,
)


@examples(30)
@given(lines=LINES, block_bytes=st.integers(1, 50), read_bytes=st.integers(1, 60))
@example(lines=['{"a": 1}', '{"a": NaN}'], block_bytes=50, read_bytes=60)
def test_what_becomes_of_a_line_does_not_depend_on_its_neighbours(
    write: Write, lines: list[str], block_bytes: int, read_bytes: int
) -> None:
    path = write("b.jsonl", "\n".join(lines).encode())
    wanted, bad = [], 0
    for line in lines:
        try:
            value = json.loads(line) if line.strip() else None
        except ValueError:
            value = ""
        if isinstance(value, dict):
            wanted.append(repr(value))
        else:
            bad += bool(line.strip())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "READ_BYTES", read_bytes)
        found = list(headrace.stream(path, block_bytes=block_bytes, max_bad_records=99))
        assert list(map(repr, found)) == wanted
        if bad:
            with pytest.raises(
                BadRecordsError, match=rf"{bad} records? could not be read, and max_bad_records is {bad - 1}"
            ):
                list(headrace.stream(path, block_bytes=block_bytes, max_bad_records=bad - 1))


def test_chosen_fields_are_all_there_is(write: Write) -> None:
    path = write("c.jsonl", b'{"a": 1, "b": "x", "c": [2]}\n{"c": null, "a": 3}\r\n')
    assert list(headrace.stream(path, fields=["c", "a"])) == [{"c": [2], "a": 1}, {"c": None, "a": 3}]
    assert list(headrace.stream(path, fields="a")) == [{"a": 1}, {"a": 3}]
    with pytest.raises(
        BadRecordsError, match=r"c\.jsonl, line 2, byte 29: no key 'b'; the record has: 'c', 'a'"
    ):
        list(headrace.stream(path, fields=["a", "b"]))


def test_reasons_name_the_place(write: Write) -> None:
    for line, reason in [
        (b'{"a": 1', "not JSON"),
        (b"[1, 2]", "not a JSON object, but list of int"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": 1, "other": "\xff"}', "not UTF-8"),
    ]:
        path = write("d.jsonl", b'{"a": 0}\n' + line + b'\n{"a": 2}')
        for fields in (None, ["a"]):
            with pytest.raises(BadRecordsError, match=rf"d\.jsonl, line 2, byte 9: {reason}"):
                list(headrace.stream(path, fields=fields))
            kept = headrace.stream(path, fields=fields, max_bad_records=1)
            assert list(kept) == [{"a": 0}, {"a": 2}]


def test_a_byte_order_mark_is_no_part_of_the_first_record(write: Write) -> None:
    path = write("e.jsonl", b'\xef\xbb\xbf{"a": 0}\n{"a": 1}\n')
    assert files.as_bag(files.joined(files.shares(path, 2, block_bytes=4))) == files.as_bag(
        [{"a": 0}, {"a": 1}]
    )
