"""The fields of tables: every column of every input, with a type that changes no value."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import FieldError, SettingsError
from headrace.readers.formats import format_of
from headrace.readers.found import RecordFields, check_text_field, find_fields
from headrace.readers.inputs import InputFile
from headrace.readers.json_lines import split_lines
from tests.readers.places import infer

NUMBER_TEXTS = st.sampled_from(
    [
        *("0", "-0", "7", "-7", "+5", "00501", "007", "1_000", " 5", "5 ", "0x10", "1,5", "٣"),
        *("9007199254740992", "9007199254740993", "9223372036854775807", "9223372036854775808"),
        *("-9223372036854775808", "12345678901234567890", "1" * 30, "1" * 400, "-" + "9" * 19),
        *("0.5", ".5", "5.", "-.5", "1.50", "0.1", "1e3", "1E-3", "1e400", "-1e400", "1e-400", "01.5", "+.5"),
        *(
            "inf",
            "-inf",
            "Infinity",
            "infinity",
            "true",
            "False",
            "TRUE",
            "1d",
            "NA",
            "nan",
            "",
            "x",
            "--1",
            "-",
        ),
    ]
)


def find(*paths: Path, **chosen: str | None) -> RecordFields:
    files = [InputFile(str(path), format_of(path) or "", 0) for path in paths]  # type: ignore[arg-type]
    return find_fields(files, chosen)


def read_back(gather: Any, found: RecordFields, path: Path, **options: Any) -> Any:
    return gather(path, fields=found.fields, inferred=found.inferred, all_columns=True, **options)


def is_same(text: str, value: Any) -> bool:
    """Whether a stored value is what a CSV file says, with nothing lost."""
    if isinstance(value, bytes):
        return value.decode() == text
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int):
        return str(value) == text
    if text in ("", "NA", "nan"):
        return math.isnan(value)
    try:
        exact = int(text)
    except ValueError:
        return (
            not math.isnan(value) and float(text) == value and (math.isfinite(value) or "inf" in text.lower())
        )
    return (exact == value and text[0] not in "+0") or text in ("0", "-0")


@given(
    head=st.lists(NUMBER_TEXTS, min_size=1, max_size=4),
    rest=st.lists(NUMBER_TEXTS, max_size=4),
    block_bytes=st.sampled_from([1, 10**6]),
)
@example(head=["501"], rest=["00501"], block_bytes=10**6)
@example(head=["0.5"], rest=["9007199254740993"], block_bytes=1)
@example(head=["12345678901234567890", "12345678901234567891"], rest=[], block_bytes=1)
@example(head=["true"], rest=["0"], block_bytes=1)
@example(head=["true"], rest=["NA"], block_bytes=1)
def test_csv_values_are_kept_exactly_or_reported(gather, write, head, rest, block_bytes):
    """The types are inferred from one file and used for another, as for what follows the first megabyte."""
    start = write("head.csv", "\n".join(["v,w", *(f'"{text}",x' for text in head)]).encode())
    whole = write("whole.csv", "\n".join(["v,w", *(f'"{text}",x' for text in [*head, *rest])]).encode())
    found = find(start)
    got = read_back(gather, found, whole, block_bytes=block_bytes)
    bad = {int(where.split(",")[0].removeprefix("line ")) - 2 for where, _ in got.bad}
    kept = [text for number, text in enumerate([*head, *rest]) if number not in bad]
    assert len(got.columns["v"]) == len(kept)
    assert all(is_same(text, value) for text, value in zip(kept, got.columns["v"], strict=True))
    missing = {n for n, text in enumerate([*head, *rest]) if text in ("", "NA", "nan")}
    in_head = {n for n in bad if n < len(head)}
    assert in_head <= missing, "what was looked at is only bad if it is missing"
    assert all("columns=" in reason for _, reason in got.bad)


JSON_VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70) | st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2**63, 2**80]),
    st.floats(allow_nan=False),
    st.sampled_from(["", "x", "00501", "\ud800", "1"]),
    st.lists(st.integers(-5, 5) | st.floats(allow_nan=False) | st.sampled_from([2**53 + 1]), max_size=3),
    st.none(),
    st.dictionaries(st.sampled_from(["k"]), st.integers(), max_size=1),
)
JSON_RECORDS = st.lists(
    st.dictionaries(st.sampled_from(["a", "b"]), JSON_VALUES, max_size=2), min_size=1, max_size=4
)


@given(head=JSON_RECORDS, rest=JSON_RECORDS, block_bytes=st.sampled_from([1, 10**6]))
@example(head=[{"a": 0.5}], rest=[{"a": 2**53 + 1}, {"a": 1e300}], block_bytes=10**6)
@example(head=[{"a": 1}], rest=[{"a": 1, "b": 2}], block_bytes=10**6)
@example(head=[{"a": [0.5]}], rest=[{"a": [1, 2**53 + 1]}, {"a": [2**54]}], block_bytes=10**6)
def test_json_values_are_kept_exactly_or_reported(gather, write, head, rest, block_bytes):
    def lines(records: list[dict[str, Any]]) -> bytes:
        return b"".join(json.dumps(record).encode() + b"\n" for record in records)

    try:
        found = find(write("head.jsonl", lines(head)))
    except (SettingsError, ValueError) as error:
        assert "columns=" in str(error)  # any outcome but this one is checked below
        return
    records = [*head, *rest]
    got = read_back(gather, found, write("whole.jsonl", lines(records)), block_bytes=block_bytes)
    bad = {int(where.split(",")[0].removeprefix("line ")) - 1 for where, _ in got.bad}
    kept = [record for number, record in enumerate(records) if number not in bad]
    assert set(got.columns) == set(found.fields)
    for name, values in got.columns.items():
        assert len(values) == len(kept)
        for record, value in zip(kept, values, strict=True):
            _check_json(record, name, value)
    for record in kept:
        assert record.keys() <= found.fields.keys()


def _check_json(record: dict[str, Any], name: str, value: Any) -> None:
    original = record.get(name)
    if original is None:
        assert math.isnan(value)
    elif isinstance(original, str):
        assert value == original.encode()
    elif isinstance(original, list):
        assert [int(x) if math.isfinite(x) and x == int(x) else x for x in value] == original
    else:
        assert type(value) is type(original) or (type(value), type(original)) == (float, int)
        assert value == original  # Python compares an int with a float exactly


def test_all_files_are_looked_at(gather, write):
    first = write("1.csv", b"a,zip\n1,90210\n")
    second = write("2.csv", b"a,zip\n0.5,00501\n")
    found = find(first, second)
    assert {name: field.notation for name, field in found.fields.items()} == {"a": "float64", "zip": "bytes"}
    assert read_back(gather, found, first).columns == {"a": [1.0], "zip": [b"90210"]}
    assert read_back(gather, found, second).columns == {"a": [0.5], "zip": [b"00501"]}


def test_columns_of_some_files_only_are_told(write):
    first, second = write("1.csv", b"a,b\n1,2\n"), write("2.csv", b"a,b,label\n3,4,5\n")
    with pytest.raises(FieldError, match=r"1\.csv: no column 'label', which .*2\.csv has.*columns="):
        find(first, second)
    found = find(first, second, a=None, b="float32")
    assert (found.left_out, found.inferred) == (("label",), ("a",))


def test_files_with_and_without_values(write):
    empty, null = write("0.jsonl", b""), write("1.jsonl", b'{"a": null, "q": []}\n')
    known = write("2.jsonl", b'{"a": 1, "q": [0.5]}\n')
    found = find(empty, null, known)
    assert {name: field.notation for name, field in found.fields.items()} == {"a": "int64", "q": "float64[*]"}
    with pytest.raises(SettingsError, match=r"1\.jsonl: key 'a' holds nothing but null"):
        find(empty, null)
    blank, numbers = write("0.csv", b"a\n\n"), write("1.csv", b"a\n5\n")
    assert find(blank, numbers).fields["a"].notation == "int64"
    assert find(blank).fields["a"].notation == "bytes"


def test_types_are_widened_but_not_changed(tmp_path):
    def save(name: str, **columns: Any) -> Path:
        pq.write_table(pa.table(columns), tmp_path / name)
        return tmp_path / name

    small = save("1.parquet", i=pa.array([1], pa.int8()), f=pa.array([1], pa.float32()))
    large = save("2.parquet", i=pa.array([2**40]), f=pa.array([0.1]))
    found = find(small, large).fields
    assert (found["i"].notation, found["f"].notation) == ("int64", "float64")
    assert infer(small)["i"].notation == "int8"
    unsigned = save("3.parquet", i=pa.array([2**64 - 1], pa.uint64()), f=pa.array([1], pa.float32()))
    with pytest.raises(SettingsError, match=r"3\.parquet: 'i' holds uint64, but int8 in .*columns="):
        find(small, unsigned)
    np.save(tmp_path / "4.npy", np.zeros(3, [("i", "int16"), ("f", "float64")]))
    assert find(small, tmp_path / "4.npy").fields["i"].notation == "int16"


def test_formats_can_be_mixed_if_their_values_fit(write):
    lines = write("1.jsonl", b'{"a": 1, "s": "x"}\n')
    assert find(lines, write("1.csv", b"a,s\n2,y\n")).fields["a"].notation == "int64"
    with pytest.raises(SettingsError, match=r"2\.csv: 'a' holds bytes, but int64 in .*1\.jsonl"):
        find(lines, write("2.csv", b"a,s\n02,y\n"))


def test_the_text_field_is_looked_for_in_all_files(write):
    files = [
        InputFile(str(write(f"{n}.jsonl", b'{"k%d": "x"}\n' % n)), format_of(Path("a.jsonl")), 0)
        for n in (1, 2)
    ]  # type: ignore[arg-type]
    check_text_field(files, "k2")
    with pytest.raises(FieldError, match=r"1\.jsonl: no key 'k3'; the keys are: 'k1', 'k2'.*text_field=NAME"):
        check_text_field(files, "k3")
    check_text_field([InputFile(str(write("0.jsonl", b"")), files[0].format, 0)], "k")


def test_deeply_nested_values_are_told(gather: Callable[..., Any], write: Any) -> None:
    for depth in (600, 900, 100_000):
        deep = b"[" * depth + b"]" * depth
        path = write("d.jsonl", b'{"t": "ok"}\n{"t": ' + deep + b"}\n")
        got = gather(path, text_field="t")
        assert got.columns == {"t": [b"ok"]}
        assert len(got.bad) == 1
        with pytest.raises((SettingsError, ValueError), match="columns="):
            infer(write("e.jsonl", b'{"b": ' + deep + b"}\n"))
    assert len(split_lines(np.zeros(0, np.uint8), 0, None)) == 0  # type: ignore[arg-type]
