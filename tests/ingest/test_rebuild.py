"""Building again does only what changed, and gives what a build from nothing would give."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import BadRecordsError, CorruptError, FieldError, SettingsChangedError, SettingsError
from tests.properties import examples
from tests.samples import decoded, documents, tree

# In this process: what is built again does not depend on who builds it.
build = partial(headrace.build, shard_bytes=4096, workers=1)


def _rebuilt_from_nothing(folder: Path, out: Path) -> dict[str, str]:
    build(folder, out)
    return tree(out)


def test_an_unchanged_input_builds_nothing(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = write_texts(documents(100)), tmp_path / "out"
    first = build(folder, out)
    before = tree(out)
    again = build(folder, out, workers=2)
    assert (again.built, again.reused, again.added, again.changed) == (0, first.built, 0, 0)
    assert tree(out) == before


def test_added_changed_and_removed_inputs_touch_only_their_own_shards(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = write_texts(documents(150)), tmp_path / "out"
    build(folder, out)
    (folder / "0075b.txt").write_text("added")
    added = build(folder, out)
    assert added.added == 1
    assert added.reused > added.built
    assert tree(out) == _rebuilt_from_nothing(folder, tmp_path / "fresh-1")
    (folder / "0100.txt").write_text("changed")
    changed = build(folder, out)
    assert (changed.changed, changed.built) == (1, 1)
    assert tree(out) == _rebuilt_from_nothing(folder, tmp_path / "fresh-2")
    (folder / "0010.txt").unlink()
    removed = build(folder, out)
    assert removed.removed == 1
    assert removed.reused > removed.built
    assert tree(out) == _rebuilt_from_nothing(folder, tmp_path / "fresh-3")


@pytest.mark.parametrize("rebuild", [False, True])
def test_inputs_that_are_gone_are_named(
    rebuild: bool, write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = write_texts(["one", "two", "three", "four"]), tmp_path / "out"
    build(folder, out)
    for name in ("0001.txt", "0003.txt"):
        (folder / name).unlink()
    report = build(folder, out, rebuild=rebuild)
    assert (report.records, report.removed) == (2, 2)
    assert report.removed_inputs == ["texts/0001.txt", "texts/0003.txt"]
    assert build(folder, out).removed == 0


def test_a_change_that_keeps_the_size_and_the_time_is_noticed(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_texts(["first", "second"])
    headrace.build(folder, tmp_path / "out")
    stat = (folder / "0000.txt").stat()
    (folder / "0000.txt").write_text("FIRST")
    os.utime(folder / "0000.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    report = headrace.build(folder, tmp_path / "out")
    assert report.changed == 1
    assert decoded(headrace.open(tmp_path / "out")) == ["FIRST", "second"]


def test_a_large_file_that_grows_builds_its_new_end(tmp_path: Path) -> None:
    lines = [f"{number} {text}" for number, text in enumerate(documents(400))]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines[:300]) + "\n")
    headrace.build(path, tmp_path / "out", split="line", shard_bytes=4096, workers=1)
    path.write_text("\n".join(lines) + "\n")
    report = headrace.build(path, tmp_path / "out", split="line", shard_bytes=4096, workers=1)
    assert report.reused > 3
    assert decoded(headrace.open(tmp_path / "out")) == lines


def test_other_settings_are_named_and_need_rebuild(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = write_texts(["one two"]), tmp_path / "out"
    headrace.build(folder, out)
    before = tree(out)
    with pytest.raises(SettingsChangedError, match=r'split was "file", is now "line".*rebuild=True'):
        headrace.build(folder, out, split="line")
    with pytest.raises(SettingsChangedError, match=r"the token of eos= was 256, is now not given"):
        headrace.build(folder, out, eos=False)
    assert tree(out) == before
    report = headrace.build(folder, out, eos=False, rebuild=True)
    assert report.built == 1
    assert headrace.open(out)[0]["tokens"].tolist() == list(b"one two")


def test_a_build_that_finished_nothing_binds_nobody_to_its_settings(tmp_path: Path) -> None:
    lines, out = tmp_path / "lines.jsonl", tmp_path / "out"
    lines.write_text('{"body": "one"}\n{"body": "two"}\n')
    with pytest.raises(FieldError, match="the keys are: 'body'.*text_field=NAME"):
        headrace.build(lines, out, tokenizer="bytes", eos=False)
    headrace.build(lines, out, tokenizer="bytes", eos=False, text_field="body")
    assert [record["tokens"].tolist() for record in headrace.open(out)] == [list(b"one"), list(b"two")]


def test_a_build_that_finished_something_does(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = write_texts(["one " * 2000, "two " * 2000]), tmp_path / "out"
    (folder / "zzz.txt").write_bytes(b"\xff\xfe not text \xff")
    with pytest.raises(BadRecordsError):
        headrace.build(folder, out, shard_bytes=4096, workers=1)
    with pytest.raises(SettingsChangedError, match="an unfinished build is here"):
        headrace.build(folder, out, shard_bytes=4096, workers=1, split="line")


def test_the_cut_of_a_growing_input_stays_as_it_was(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = write_texts(documents(20)), tmp_path / "out"
    headrace.build(folder, out)
    first = headrace.open(out).manifest
    (folder / "huge.txt").write_text("x" * 10_000_000)
    report = headrace.build(folder, out)
    second = headrace.open(out).manifest
    assert first is not None
    assert second is not None
    assert first.settings == second.settings
    assert report.added == 1


def test_a_damaged_or_missing_shard_is_built_again(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = write_texts(documents(150)), tmp_path / "out"
    build(folder, out)
    before = tree(out)
    shards = sorted(out.glob("shard-*"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    report = build(folder, out)
    assert report.built == 2
    assert tree(out) == before


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"[]",
        b"{}x",
        b'{"inputs": [{"path": "a"}], "tasks": []}',
        b'{"inputs": [3], "tasks": []}',
        b'{"inputs": [], "tasks": [{}]}',
        b'{"inputs": 5, "tasks": 6}',
        b"[" * 100_000,
        None,
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_damaged_provenance_is_named_and_rebuilt(
    damaged: bytes | None, shuffle: bool, write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = write_texts(documents(20)), tmp_path / "out"
    build(folder, out, shuffle=shuffle)
    [provenance] = out.glob("provenance-*")
    provenance.unlink()
    if damaged is not None:
        provenance.write_bytes(damaged)
    with pytest.raises(CorruptError, match="the provenance is damaged .*; use rebuild=True"):
        build(folder, out, shuffle=shuffle)
    assert build(folder, out, shuffle=shuffle, rebuild=True).records == 20


def test_an_input_without_records_is_not_read_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 500)
    (tmp_path / "b.jsonl").write_text("\n" * 5000)
    for built in (True, False):
        report = build(str(tmp_path / "*.jsonl"), tmp_path / "out", tokenizer="bytes")
        assert bool(report.built) == built


def test_a_dataset_of_another_origin_is_not_overwritten(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    with headrace.Writer(tmp_path / "out", fields={"x": "int64"}) as writer:
        writer.write({"x": 1})
    with pytest.raises(SettingsError, match="not made by a build"):
        headrace.build(write_texts(["x"]), tmp_path / "out")
    assert headrace.open(tmp_path / "out")[0]["x"] == 1


@examples(12)
@given(data=st.data())
def test_any_history_of_changes_ends_as_a_build_from_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("history")
    folder, out = base / "in", base / "out"
    folder.mkdir()
    names = [f"{number}.txt" for number in range(12)]
    (folder / "always.txt").write_text("always")
    for step in range(3):
        for name in data.draw(st.lists(st.sampled_from(names), max_size=6)):
            if (folder / name).exists() and data.draw(st.booleans()):
                (folder / name).unlink()
            else:
                (folder / name).write_text(data.draw(st.text(max_size=20)) * 200)
        build(folder, out)
        assert tree(out) == _rebuilt_from_nothing(folder, base / f"fresh-{step}")


def test_a_tokenizer_of_another_file_name_is_the_same_tokenizer(
    write_texts: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for name in ("one.json", "two.json"):
        words.save(str(tmp_path / name))
    folder = write_texts(["a"])
    headrace.build(folder, tmp_path / "out", tokenizer=tmp_path / "one.json", eos=False)
    assert headrace.build(folder, tmp_path / "out", tokenizer=tmp_path / "two.json", eos=False).built == 0
