"""Builds of tables: no column is lost without a word, and a build that stops keeps what is finished."""

import json
from pathlib import Path

import pytest

import headrace
from headrace.errors import BadRecordsError, FieldError, SettingsChangedError


def write_late(path: Path, *, late: bool) -> Path:
    """JSON lines of more than a megabyte, the last of which may have one more key."""
    lines = [json.dumps({"a": number, "pad": "x" * 30}) for number in range(30_000)]
    if late:
        lines.append(json.dumps({"a": 1, "pad": "y", "label": 5}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_key_that_comes_late_stops_the_build(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"a": 0, "pad": ""}\n' * 1000)
    write_late(folder / "late.jsonl", late=True)
    keeps = r"columns=\{'a': None, 'pad': None, 'label': 'float64'\} keeps it"
    place = rf"late\.jsonl, line 30,001, byte 1608890: a key 'label'.*{keeps}"
    for _ in range(2):
        with pytest.raises(BadRecordsError, match=place):
            headrace.build(folder, out, workers=1, shard_bytes=10_000)
    finished = len(list((out / ".build" / "results").iterdir()))
    assert finished > 20
    write_late(folder / "late.jsonl", late=False)
    report = headrace.build(folder, out, workers=1, shard_bytes=10_000)
    assert report.reused >= finished
    assert report.records == 31_000


def test_a_late_key_can_be_chosen_or_left_out(tmp_path: Path) -> None:
    path = write_late(tmp_path / "late.jsonl", late=True)
    chosen = headrace.build(path, tmp_path / "o1", columns=["a", "pad"], workers=1)
    assert (chosen.records, chosen.left_out) == (30_001, ())
    with_label = headrace.build(path, tmp_path / "o2", columns={"a": None, "label": "float64"}, workers=1)
    assert with_label.left_out == ("pad",)
    assert headrace.open(tmp_path / "o2")[30_000]["label"] == 5.0
    left_out = headrace.build(path, tmp_path / "o3", max_bad_records=1, workers=1)
    assert (left_out.records, left_out.bad_count) == (30_000, 1)


def test_columns_of_a_later_file_are_not_lost(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("a,b,label\n3,4,5\n")
    with pytest.raises(FieldError, match=r"1\.csv: no column 'label', which .*2\.csv has"):
        headrace.build([tmp_path / "1.csv", tmp_path / "2.csv"], tmp_path / "out", workers=1)
    headrace.build(tmp_path / "1.csv", tmp_path / "out", workers=1)
    (tmp_path / "3.csv").write_text("a,b\n0.5,2\n")
    with pytest.raises(SettingsChangedError, match=r"column 'a' was int64, is now float64"):
        headrace.build([tmp_path / "1.csv", tmp_path / "3.csv"], tmp_path / "out", workers=1)


def test_texts_that_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    (tmp_path / "3.csv").write_text("id,zip,n\n12345678901234567890,00501,1\n12345678901234567891,02134,2\n")
    headrace.build(tmp_path / "3.csv", tmp_path / "out", workers=1)
    assert [dict(record) for record in headrace.open(tmp_path / "out")] == [
        {"id": b"12345678901234567890", "zip": b"00501", "n": 1},
        {"id": b"12345678901234567891", "zip": b"02134", "n": 2},
    ]


def test_a_value_that_comes_late_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("zip,pad\n" + f"501,{'x' * 50}\n" * 30_000 + "00501,\n")
    with pytest.raises(
        BadRecordsError,
        match=r"a\.csv, line 30,002, byte \d+: 'zip' holds '00501'.*columns=\{'zip': 'bytes', 'pad': None\}",
    ):
        headrace.build(tmp_path / "a.csv", tmp_path / "out", workers=1)
    headrace.build(tmp_path / "a.csv", tmp_path / "out", columns={"zip": "bytes"}, workers=1, rebuild=True)
    assert headrace.open(tmp_path / "out")[30_000]["zip"] == b"00501"
    headrace.build(tmp_path / "a.csv", tmp_path / "number", columns={"zip": "int64"}, workers=1)
    assert headrace.open(tmp_path / "number")[30_000]["zip"] == 501  # as it was asked for
