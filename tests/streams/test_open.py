"""What `headrace.stream` takes, and what it says to what it does not take."""

from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import HeadraceError, SettingsError, StorageError
from tests.streams import files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.write_lines(tmp_path / "a.txt", 3, "a")
    files.write_lines(tmp_path / "b.txt", 2, "b")
    files.write_jsonl(tmp_path / "c.jsonl", 2, "c")
    return tmp_path


def test_files_globs_directories_and_lists_in_sorted_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = files.lines(3, "a"), files.lines(2, "b")
    c = files.lines(2, "c")
    for inputs, wanted in [
        (folder / "a.txt", a),
        (str(folder / "*.txt"), a + b),
        ([folder / "b.txt", str(folder / "a.txt"), folder / "a.txt"], a + b),
        (folder, a + b + c),
    ]:
        assert [record["text"] for record in headrace.stream(inputs)] == wanted
    monkeypatch.chdir(folder)
    assert [record["text"] for record in headrace.stream("*.jsonl")] == c
    assert len(list(headrace.stream("c.jsonl", format="text"))) == 2
    assert len(list(headrace.stream(".", include=["b.*"]))) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "xml"}, "format='xml': must be one of 'text', 'jsonl', 'csv'"),
        ({"split": None}, "split=None: must be one of"),
        ({"split": "page"}, "split='page': must be one of 'file', 'line', 'separator'"),
        ({"split": "file", "separator": "|"}, "split='file' and separator='|' do not go together"),
        ({"split": "separator"}, "split='separator' and separator='' do not go together"),
        ({"csv_cuts": "guess"}, "csv_cuts='guess': must be one of 'local', 'scan'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=18446744073709551616: must be from 0 to"),
        ({"buffer": 0}, "buffer=0: must be at least 1"),
        ({"block_bytes": 0}, "block_bytes=0"),
        ({"block_bytes": 1.5}, "block_bytes=1.5"),
        ({"max_bad_records": -1}, "max_bad_records=-1"),
        ({"shuffle": "global"}, "shuffle='global': must be True or False"),
        ({"repeat": 3}, "repeat=3: must be True or False"),
        ({"fields": []}, "fields=.*at least one"),
        ({"fields": ["a", "a"]}, "must be different names"),
        ({"types": {"a": "int"}}, "types=.*must be a dict like"),
        ({"rank": 1}, "rank=1 without world_size: give both"),
        ({"rank": 2, "world_size": 2}, "rank=2: must be 0 to 1"),
    ],
)
def test_settings_are_checked_at_once(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("|", r"\|")):
        headrace.stream(folder, **options)


def test_inputs_that_are_not_there(folder: Path) -> None:
    with pytest.raises(StorageError, match=r"missing\.txt'?: no such file or directory"):
        headrace.stream(folder / "missing.txt")
    with pytest.raises(SettingsError, match="no file matches"):
        headrace.stream(folder / "*.parquet")
    with pytest.raises(HeadraceError):
        headrace.stream([])
