"""Which settings of two builds are the same, and how a difference is put into words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import SettingsChangedError
from headrace.format.manifest import Manifest, read_manifest
from headrace.ingest.differences import differences


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({"split": "file"}, {"split": "line"}, 'split was "file", is now "line"'),
        (
            {"columns": None},
            {"columns": {"a": None}},
            "the chosen columns were all that there are, and are now a",
        ),
        ({"columns": {"a": "int8"}}, {"columns": None}, "the chosen columns were a=int8, and are now all"),
        (
            {"fields": {"a": "int64", "b": "bytes"}},
            {"fields": {"a": "float32"}},
            "column 'a' was int64, is now float32",
        ),
        ({"fields": {"a": "int64"}}, {"fields": {}}, "column 'a' is no longer kept"),
        ({"fields": {}}, {"fields": {"a": "int64"}}, "column 'a' is new"),
        ({"tokenizer": None}, {"tokenizer": {"kind": "bytes"}}, "no tokenizer, and now there is one (bytes)"),
        ({"tokenizer": {"kind": "bytes"}}, {"tokenizer": None}, "a tokenizer (bytes), and now there is none"),
        (
            {"tokenizer": {"fingerprint": "a"}},
            {"tokenizer": {"fingerprint": "b"}},
            'fingerprint was "a", is now "b"',
        ),
        ({"shuffle_seed": None}, {"shuffle_seed": 3}, "the seed of shuffle= was not given, is now 3"),
        ({"ingest_version": 2}, {"ingest_version": 3}, "another version of Headrace"),
        ({"text_field": None}, {"text_field": "body"}, 'text_field was "text", is now "body"'),
    ],
)
def test_every_difference_is_put_into_words(old: dict[str, Any], new: dict[str, Any], told: str) -> None:
    assert told in "; ".join(differences(old, new))


def test_what_makes_no_difference() -> None:
    assert differences({"text_field": None}, {"text_field": "text"}) == []
    assert differences({"columns": {"a": None, "b": None}}, {"columns": {"b": None, "a": None}}) == []


def test_the_columns_that_were_there_anyway_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "v": 2}\n')
    for first, second in ((None, ["id", "v"]), (["id", "v"], None)):
        out = tmp_path / f"out-{first is None}"
        headrace.build(tmp_path / "a.jsonl", out, columns=first)
        with pytest.raises(SettingsChangedError, match=r"the chosen columns were .*id,v.*Use rebuild=True"):
            headrace.build(tmp_path / "a.jsonl", out, columns=second)


@pytest.mark.parametrize("stored", [None, "text"])
def test_the_default_text_field_may_be_named_or_not(
    stored: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    headrace.build(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="bytes")

    def read_older(store: Any) -> Manifest:
        """As if an earlier version had stored the setting as it was given."""
        manifest = read_manifest(store)
        assert manifest.settings is not None
        return replace(manifest, settings={**manifest.settings, "text_field": stored})

    monkeypatch.setattr("headrace.ingest.site.read_manifest", read_older)
    for given in ("text", None):
        report = headrace.build(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="bytes", text_field=given)
        assert (report.built, report.reused) == (0, 1)
    with pytest.raises(SettingsChangedError, match='text_field was "text", is now "body"'):
        headrace.build(_body(tmp_path), tmp_path / "out", tokenizer="bytes", text_field="body")


def _body(folder: Path) -> Path:
    (folder / "b.jsonl").write_text('{"body": "one"}\n')
    return folder / "b.jsonl"
