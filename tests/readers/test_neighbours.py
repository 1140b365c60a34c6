"""The outcome for a line of JSON never depends on the lines beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.format.fields import parse_fields

ODD = [
    '{"t": "a", "n": 1}',
    ' {"t": "a"} ',
    '{"t": "a", "n": ' + "1" * 5000 + "}",
    '{"t": "a", "n": ' + "[" * 3000 + "]" * 3000 + "}",
    '{"t": "a", "n": NaN}',
    '{"t": "a", "n": 1e400}',
    '{"t": "a", "n": -0}',
    '{"t": "a", "n": 9007199254740993}',
    '{"t": "a", "n": 99999999999999999999}',
    '{"t": "a", "t": "b"}',
    '{"t": 1, "t": "b"}',
    '{"t": "a", "x": "\\ud800"}',
    '{"t": "\\ud800"}',
    '{"t": "a", "x": {"t": 1}}',
    '{"t": "a"} {"t": "b"}',
    '{"t": "a",}',
    '{"t": null}',
    '{"x": 1}',
    '{"t": "a", "n": 01}',
    '{"t": "a", "n": "1"}',
    '{"t": "\t"}',
    "null",
    "{",
    "[]",
    "",
    " ",
    "\ufeff{}",
    '{"t": "é", "n": true}',
]
SETTINGS: dict[str, dict[str, Any]] = {
    "texts": {"text_field": "t"},
    "chosen columns": {"fields": parse_fields({"t": "bytes", "n": "float64"})},
    "integers": {"fields": parse_fields({"t": "bytes", "n": "int64"})},
    "all columns": {
        "fields": parse_fields({"t": "bytes", "n": "float64"}),
        "inferred": ("t", "n"),
        "all_columns": True,
    },
}


@pytest.fixture(scope="module")
def alone(gather: Any, write: Any) -> dict[tuple[str, str], Any]:
    """The outcome for each line in a file of its own: its values, or why it is bad."""
    found = {}
    for name, settings in SETTINGS.items():
        for line in ODD:
            # Not first in the file, where a byte order mark is dropped.
            got = gather(write("a.jsonl", b"\n" + line.encode() + b"\n"), **settings)
            found[name, line] = (repr(got.columns), [reason for _, reason in got.bad])
    return found


@pytest.mark.parametrize("name", SETTINGS)
@given(lines=st.lists(st.sampled_from(ODD), max_size=6), block_bytes=st.sampled_from([1, 50, 10**6]))
def test_lines_of_builds(gather, write, alone, name, lines, block_bytes):
    path = write("b.jsonl", b"\n" + "".join(f"{line}\n" for line in lines).encode())
    got = gather(path, block_bytes=block_bytes, **SETTINGS[name])
    expected: dict[str, list[str]] = {}
    reasons = []
    for line in lines:
        values, bad = alone[name, line]
        reasons += bad
        for column, cells in eval(
            values, {"nan": float("nan"), "inf": float("inf")}
        ).items():  # what repr wrote
            expected.setdefault(column, []).extend(cells)
    assert repr({key: value for key, value in got.columns.items() if value}) == repr(
        {key: value for key, value in expected.items() if value}
    )
    assert sorted(reason for _, reason in got.bad) == sorted(reasons)


@pytest.fixture(scope="module")
def streamed(write: Any) -> Any:
    def records(lines: list[str], block_bytes: int = 10**6) -> list[str]:
        path = write("c.jsonl", b"\n" + "".join(f"{line}\n" for line in lines).encode())
        stream = headrace.stream(path, max_bad_records=100, block_bytes=block_bytes)
        return list(map(repr, stream))

    return records


@pytest.fixture(scope="module")
def streamed_alone(streamed: Any) -> dict[str, list[str]]:
    return {line: streamed([line]) for line in ODD}


@given(lines=st.lists(st.sampled_from(ODD), max_size=6), block_bytes=st.sampled_from([700, 10**6]))
def test_lines_of_streams(streamed, streamed_alone, lines, block_bytes):
    expected = [record for line in lines for record in streamed_alone[line]]
    assert streamed(lines, block_bytes) == expected


def test_an_odd_neighbour_changes_no_count(tmp_path: Path) -> None:
    odd = '{"text": "a", "n": ' + "1" * 5000 + "}\n"
    for number, neighbour in enumerate(['{"text": "b"}\n', ' {"text": "b"}\n', '{"text": "b"}\r\n']):
        path = tmp_path / "a.jsonl"
        path.write_text(neighbour + odd)
        report = headrace.build(path, tmp_path / f"o{number}", tokenizer="bytes", workers=1)
        assert report.records == 2
    assert json.loads(neighbour)
