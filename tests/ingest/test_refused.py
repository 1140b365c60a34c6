"""What a build refuses before it writes anything, and that the remedies it names work."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace
from headrace.errors import BadRecordsError, BuildError, FieldError, FormatError, SettingsError
from tests.samples import tree


def _write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


@pytest.mark.parametrize("name", ["", "speed km/h", "a\tb", "x" * 256, "\x7f"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_column_whose_name_no_field_can_have(tmp_path: Path, kind: str, name: str) -> None:
    path, out = tmp_path / f"t.{kind}", tmp_path / "out"
    if kind == "csv":
        path.write_text(f'"{name}",id\n0,30\n1,40\n')
    elif kind == "jsonl":
        path.write_text(json.dumps({name: 0, "id": 30}) + "\n")
    else:
        pq.write_table(pa.table({name: [0], "id": [30]}), path)
    headrace.build(_write(tmp_path / "good.csv", "id\n1\n"), out)
    before = tree(out)
    for options in ({}, {"columns": [name, "id"]}, {"rebuild": True}):
        with pytest.raises(
            FieldError, match=rf"t\.{kind}: .*rename the column in the file, or .*columns="
        ) as caught:
            headrace.build(path, out, **options)  # type: ignore[arg-type]
        assert repr(name[:255])[1:-1] in str(caught.value) or not name
    assert tree(out) == before
    headrace.build(path, tmp_path / "chosen", columns=["id"])
    assert headrace.open(tmp_path / "chosen")[0]["id"] == 30


def _columns_in(message: str) -> Any:
    """The columns that a message recommends."""
    found = re.search(r"columns=(\{.*?\})", message)
    assert found, message
    return eval(found[1])  # it is what a user would paste


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("late.jsonl", '{"id": 1, "v": 2}\n' * 70_000 + '{"id": 1, "v": 2, "late": 5}\n', {"late": 5.0}),
        ("empty.csv", "id,n\n1,2\n2,\n3,4\n4,5\n", {"n": 5.0}),
        ("na.csv", "id,n\n1,2\n2,NA\n3,4\n4,5\n", {"n": 5.0}),
        ("null.jsonl", '{"id": 1, "n": 2}\n{"id": 1, "n": null}\n{"id": 1, "n": 3}\n', {"n": 3.0}),
        ("large.jsonl", '{"id": 1, "n": 18446744073709551615}\n', {"n": 2**64 - 1}),
        ("float.jsonl", '{"id": 1, "n": 2}\n' * 70_000 + '{"id": 1, "n": 0.5}\n', {"n": 0.5}),
        ("late.csv", "id,n\n" + "1,2\n" * 300_000 + "1,x\n", {"n": b"x"}),
    ],
)
def test_the_columns_that_an_error_recommends_keep_every_value(
    tmp_path: Path, name: str, content: str, value: dict[str, Any]
) -> None:
    path = _write(tmp_path / name, content)
    with pytest.raises(BadRecordsError) as caught:
        headrace.build(path, tmp_path / "out", workers=1)
    headrace.build(path, tmp_path / "out", workers=1, rebuild=True, columns=_columns_in(str(caught.value)))
    dataset = headrace.open(tmp_path / "out")
    assert "id" in dataset.fields
    assert {key: dataset[-1][key] for key in value} == value


def test_a_column_that_comes_late_needs_a_type(tmp_path: Path) -> None:
    path = _write(tmp_path / "late.jsonl", '{"id": 1}\n' * 150_000 + '{"id": 1, "late": "x"}\n')
    with pytest.raises(BadRecordsError, match="a key 'late'.*give every record this key, or leave it out"):
        headrace.build(path, tmp_path / "out", workers=1)
    with pytest.raises(FieldError, match="no column 'late'.*If it comes later in a file, give its type"):
        headrace.build(path, tmp_path / "out", workers=1, columns=["id", "late"])


def test_integers_that_no_type_holds(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", f'{{"n": {2**64}}}\n')
    with pytest.raises(BadRecordsError, match="write it as a string in the file to keep every digit"):
        headrace.build(path, tmp_path / "out")


def test_a_cell_that_counts_as_missing_is_quoted(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", "n,s\n1,NA\nNA,x\n")
    with pytest.raises(BadRecordsError, match="line 3, byte 9: 'n' holds 'NA', which counts as missing"):
        headrace.build(path, tmp_path / "out")
    headrace.build(path, tmp_path / "out", columns={"n": "float64", "s": None})
    assert headrace.open(tmp_path / "out")[0]["s"] == b"NA"


@pytest.mark.parametrize("text_field", [None, "a"])
def test_the_last_of_equal_keys_counts(tmp_path: Path, text_field: str | None) -> None:
    path = _write(tmp_path / "a.jsonl", '{"a": "x", "a": "y"}\n{"a": "z"}\n')
    headrace.build(path, tmp_path / "out", text_field=text_field, eos=None if text_field is None else False)
    values = [bytes(next(iter(record.values()))) for record in headrace.open(tmp_path / "out")]
    assert [value.replace(b"\0", b"") for value in values] == [b"y", b"z"]
    assert [record["a"] for record in headrace.stream(path)] == ["y", "z"]


ARRAYS = [
    '[{"text": "a"}, {"text": "b"}]',
    '[\n  {"text": "a"},\n  {"text": "b"}\n]\n',
    "[" + '{"text": "a"},\n' * 9000,
]
OBJECTS = ['{\n  "text": "a"\n}\n', '{\n  "text": "a"\n}\n{\n  "text": "b"\n}\n']


@pytest.mark.parametrize("content", [*ARRAYS, *OBJECTS])
@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_json_that_is_not_json_lines(tmp_path: Path, content: str, tokenizer: str | None) -> None:
    path = _write(tmp_path / "data.json", content)
    with pytest.raises((FormatError, BadRecordsError), match=r"data\.json.*write one object on each line"):
        headrace.build(path, tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(BadRecordsError, match=r"data\.json, line 1.*array.*write one object on each line"):
        list(headrace.stream(path))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (5, "'body' holds no text"),
        ([{"role": "user"}], "'body' holds no text"),
        ({"a": "b"}, "'body' holds no text"),
    ],
)
def test_a_key_without_text_is_refused_as_text_field(tmp_path: Path, value: Any, complaint: str) -> None:
    path = _write(tmp_path / "a.jsonl", json.dumps({"body": value, "title": "x"}) + "\n")
    with pytest.raises(FieldError, match=rf"{complaint}; the keys are: 'body', 'title'.*text_field=NAME$"):
        headrace.build(path, tmp_path / "out", text_field="body", max_bad_records=5)


def test_only_bad_records_are_told_with_their_reason(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", "broken\nas well\n")
    with pytest.raises(
        BuildError, match=r"All 2 records were bad and were left out\. The first: .*line 1.*not JSON"
    ):
        headrace.build(path, tmp_path / "out", tokenizer="bytes", max_bad_records=10)


def test_settings_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    table, text = _write(tmp_path / "a.csv", "a,b\n1,2\n"), _write(tmp_path / "a.txt", "x")
    for given, options, complaint in (
        (table, {"split": "line"}, "split='line': applies only to text"),
        (table, {"eos": False}, "eos=False: is about tokens"),
        (text, {"include": ["*.py"]}, "there is no directory among the inputs"),
        (tmp_path, {"include": "*.py"}, "must be a list of patterns"),
    ):
        with pytest.raises(SettingsError, match=complaint):
            headrace.build(given, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_header_with_another_delimiter_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _write(tmp_path / "a.csv", "id;name\n1;x\n")
    headrace.build(path, tmp_path / "out")
    assert "a.csv: the whole header is one column, 'id;name'; if ';' separates its columns" in caplog.text
    for options in ({"columns": {"id": "int64"}}, {"text_field": "name"}):
        with pytest.raises(FieldError, match="no column '.*'; the whole header is one column, 'id;name'"):
            headrace.build(path, tmp_path / "other", **options)  # type: ignore[arg-type]
