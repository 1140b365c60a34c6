"""Builds in parts: in any order, twice, side by side, killed; the bytes are those of a build in one go."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.dataset.clean import clean
from headrace.errors import (
    BuildError,
    DirectoryInUseError,
    SettingsChangedError,
    SettingsError,
    UnfinishedBuildError,
)
from headrace.ingest import run
from headrace.ingest.site import read_each
from headrace.store.address import open_store
from headrace.store.remote import RemoteStore
from headrace.store.store import write_file
from tests.samples import documents, tree

DEADLINE_SECONDS = 60
SETTINGS: dict[str, Any] = {"tokenizer": "bytes", "shard_bytes": 4096, "workers": 1}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(documents(24)):
        (folder / f"{number:04d}.txt").write_text(text * 10)
    return folder


@pytest.fixture(scope="module")
def wholes(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The same builds in one go, shuffled and not."""
    folder = tmp_path_factory.mktemp("whole")
    found = {}
    for shuffle in (False, True):
        found[shuffle] = folder / str(shuffle)
        headrace.build(texts, found[shuffle], shuffle=shuffle, **SETTINGS)
    return found


def build(texts: Path, out: Any, **options: Any) -> Any:
    return headrace.build(texts, out, **{**SETTINGS, **options})


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_parts_in_any_order_and_twice_give_the_same_bytes(
    texts: Path, wholes: dict[bool, Path], tmp_path: Path, shuffle: bool, count: int
) -> None:
    out, draw = tmp_path / "data", random.Random(count)
    order = [*range(count), *draw.sample(range(count), min(count, 2))]
    draw.shuffle(order)
    for number in order:
        report = build(texts, out, shuffle=shuffle, part=f"{number}/{count}")
        assert report.part == f"{number}/{count}"
        with pytest.raises(UnfinishedBuildError):
            headrace.open(out)
    report = build(texts, out, shuffle=shuffle, finish=True)
    assert (report.built, report.part) == (0, None)
    assert tree(out) == tree(wholes[shuffle])
    # It is a dataset like any other: there is nothing to finish, and nothing to build.
    assert build(texts, out, shuffle=shuffle, finish=True).built == 0
    assert build(texts, out, shuffle=shuffle).built == 0


def test_parts_may_have_been_cut_in_several_ways(
    texts: Path, wholes: dict[bool, Path], tmp_path: Path
) -> None:
    for part in ("0/2", "1/4", "3/4"):
        build(texts, tmp_path / "data", part=part)
    build(texts, tmp_path / "data", finish=True)
    assert tree(tmp_path / "data") == tree(wholes[False])


PART = """
import json, sys
import headrace
settings = json.loads(sys.argv[1])
headrace.build(settings.pop("texts"), settings.pop("out"), **settings)
"""


def start_part(texts: Path, out: Any, part: str, **options: Any) -> "subprocess.Popen[bytes]":
    settings = {**SETTINGS, "texts": str(texts), "out": str(out), "part": part, **options}
    return subprocess.Popen([sys.executable, "-c", PART, json.dumps(settings)], stderr=subprocess.PIPE)


@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_side_by_side(texts: Path, wholes: dict[bool, Path], tmp_path: Path, shuffle: bool) -> None:
    """Also the same part twice at the same time, from the very beginning on."""
    out = tmp_path / "data"
    running = [start_part(texts, out, f"{number % 3}/3", shuffle=shuffle) for number in range(5)]
    for each in running:
        _, said = each.communicate(timeout=300)
        assert each.returncode == 0, said.decode()
    build(texts, out, shuffle=shuffle, finish=True)
    assert tree(out) == tree(wholes[shuffle])


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_parts_that_are_killed_are_run_again(
    texts: Path, wholes: dict[bool, Path], tmp_path: Path, kills: int
) -> None:
    out, draw = tmp_path / "data", random.Random(kills)
    for kill in range(kills):
        each = start_part(texts, out, f"{kill % 2}/2")
        # Whenever it comes, before the first line or after the last: the outcome is the same.
        try:
            each.wait(draw.uniform(0.1, 1.2))
        except subprocess.TimeoutExpired:
            each.send_signal(signal.SIGKILL)
        each.communicate()
    for number in range(2):
        build(texts, out, part=f"{number}/2")
    build(texts, out, finish=True)
    assert tree(out) == tree(wholes[False])


def test_what_is_missing_is_named(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    with pytest.raises(BuildError, match="no part of a build was built here"):
        build(texts, out, finish=True)
    build(texts, out, part="1/3")
    with pytest.raises(BuildError, match=r"tasks are not done.*run parts 0, 2 of 3, and then finish"):
        build(texts, out, finish=True)
    build(texts, out, part="0/3")
    with pytest.raises(BuildError, match=r"run part 2 of 3, and then finish"):
        build(texts, out, finish=True)


def test_parts_of_several_divisions_are_named(texts: Path, tmp_path: Path) -> None:
    build(texts, tmp_path / "data", part="0/3")
    build(texts, tmp_path / "data", part="1/4")
    with pytest.raises(
        BuildError, match="divided into 3 and 4 parts; run all parts of one number, and then finish"
    ):
        build(texts, tmp_path / "data", finish=True)


def test_inputs_that_are_gone_when_it_is_finished_are_noticed(texts: Path, tmp_path: Path) -> None:
    """A disk that is not mounted, or a pattern that finds less, would lose records."""
    shutil.copytree(texts, tmp_path / "texts")
    for number in range(2):
        build(tmp_path / "texts", tmp_path / "data", part=f"{number}/2")
    gone = sorted((tmp_path / "texts").iterdir())[-1]
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(
        BuildError, match=rf"from 1 inputs that are not among those given now: .*{gone.name}; give"
    ):
        build(tmp_path / "texts", tmp_path / "data", finish=True)
    gone.write_bytes(content)
    assert build(tmp_path / "texts", tmp_path / "data", finish=True).inputs == len(list(texts.iterdir()))


def test_parts_can_be_removed_and_begun_again_with_other_settings(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    build(texts, out, part="0/2")
    with pytest.raises(SettingsChangedError, match="or remove the parts with `headrace clean`"):
        build(texts, out, part="0/2", eos=False, rebuild=True)
    assert clean(out, remove=True).leftovers[0].what.startswith("parts of an unfinished build")
    for number in range(2):
        build(texts, out, part=f"{number}/2", eos=False)
    build(texts, out, finish=True, eos=False)
    headrace.build(texts, tmp_path / "whole", **SETTINGS, eos=False)
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize("rebuild", [False, True])
def test_the_end_of_a_build_never_discards_what_parts_have_done(
    texts: Path, wholes: dict[bool, Path], tmp_path: Path, rebuild: bool
) -> None:
    out = tmp_path / "data"
    for number in range(2):
        build(texts, out, part=f"{number}/2", rebuild=rebuild)
    for wrong in ({"shuffle": True}, {"shard_bytes": 4097}, {"eos": False}):
        for also_rebuild in (False, True):
            with pytest.raises(
                SettingsChangedError, match="Use the same settings for all parts and at the end"
            ):
                build(texts, out, finish=True, **{**wrong, "rebuild": also_rebuild})
    if not rebuild:
        with pytest.raises(UnfinishedBuildError, match="finish=True and without rebuild=True"):
            build(texts, out, finish=True, rebuild=True)
    build(texts, out, finish=True, rebuild=rebuild)
    assert tree(out) == tree(wholes[False])


def test_parts_go_on_with_an_interrupted_build(texts: Path, wholes: dict[bool, Path], tmp_path: Path) -> None:
    out = tmp_path / "data"

    def progress(now: Any) -> None:
        if now.stage == "reading" and now.finished_tasks == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(texts, out, progress=progress)
    reports = [build(texts, out, part=f"{number}/3") for number in range(3)]
    assert sum(report.reused for report in reports) >= 2
    build(texts, out, finish=True)
    assert tree(out) == tree(wholes[False])


def test_a_part_that_is_run_once_more_at_the_end_is_no_obstacle(
    texts: Path, wholes: dict[bool, Path], tmp_path: Path
) -> None:
    build(texts, tmp_path / "data")
    build(texts, tmp_path / "data", part="0/3")
    assert build(texts, tmp_path / "data").built == 0
    assert tree(tmp_path / "data") == tree(wholes[False])


def test_bad_records_are_counted_in_each_part_and_at_the_end(tmp_path: Path) -> None:
    lines = ['{"text": "good"}\n' * 300, '{"text": 3}\n', '{"text": "good"}\n' * 300, '{"text": 4}\n']
    for number, content in enumerate(lines):
        (tmp_path / f"{number}.jsonl").write_text(content)
    inputs, out = [tmp_path / f"{number}.jsonl" for number in range(4)], tmp_path / "data"
    options: dict[str, Any] = {"tokenizer": "bytes", "shard_bytes": 4096, "workers": 1}
    with pytest.raises(BuildError, match="1 record could not be read"):
        headrace.build(inputs, out, part="0/1", max_bad_records=0, **options)
    parts = [
        headrace.build(inputs, out, part=f"{number}/2", max_bad_records=2, **options) for number in range(2)
    ]
    assert sum(report.bad_count for report in parts) == 2
    with pytest.raises(BuildError, match="2 records could not be read, and max_bad_records is 1"):
        headrace.build(inputs, out, finish=True, max_bad_records=1, **options)
    assert headrace.build(inputs, out, finish=True, max_bad_records=2, **options).bad_count == 2


def test_parts_of_a_shuffled_dataset_say_at_once_that_it_cannot_be_extended(
    texts: Path, tmp_path: Path
) -> None:
    shutil.copytree(texts, tmp_path / "texts")
    build(tmp_path / "texts", tmp_path / "data", shuffle=True)
    for number in range(2):
        assert build(tmp_path / "texts", tmp_path / "data", shuffle=True, part=f"{number}/2").built == 0
    build(tmp_path / "texts", tmp_path / "data", shuffle=True, finish=True)
    first = min((tmp_path / "texts").iterdir())
    first.write_text("another text")
    with pytest.raises(
        BuildError, match="a shuffled dataset can only be shuffled as a whole; use rebuild=True"
    ):
        build(tmp_path / "texts", tmp_path / "data", shuffle=True, part="0/1")


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_nothing_is_removed_while_a_part_is_at_work(
    texts: Path, tmp_path: Path, s3_place: str, place: str
) -> None:
    out = str(tmp_path / "data") if place == "disk" else s3_place
    tried: list[str] = []

    def progress(now: Any) -> None:
        if now.stage == "reading" and not tried:
            for attempt in (
                lambda: clean(out, remove=True),
                lambda: build(texts, out, rebuild=True),
            ):
                with pytest.raises(
                    DirectoryInUseError, match=r"in use by part 0/1 of headrace build.*; wait for it"
                ):
                    attempt()
                tried.append("refused")

    build(texts, out, part="0/1", progress=progress)
    assert len(tried) == 2
    build(texts, out, finish=True)
    clean(out)


def test_more_parts_than_tasks_are_pointed_out(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(texts, tmp_path / "data", part="3/500")
    assert re.search(r"there are only \d+ tasks for 500 parts", caplog.text)


def test_an_input_that_changes_between_parts_and_finish_is_noticed(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for path in texts.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    out = tmp_path / "data"
    for number in range(2):
        build(folder, out, part=f"{number}/2")
    longest = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    longest.write_text(longest.read_text()[::-1])
    with pytest.raises(BuildError, match="1 of .* tasks are not done, or their inputs have changed"):
        build(folder, out, finish=True)
    for number in range(2):
        build(folder, out, part=f"{number}/2")
    build(folder, out, finish=True)
    headrace.build(folder, tmp_path / "whole", **SETTINGS)
    assert tree(out) == tree(tmp_path / "whole")


def test_other_settings_and_other_builds_are_refused(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    build(texts, out, part="0/2")
    with pytest.raises(SettingsChangedError, match="parts of a build are here"):
        build(texts, out, part="1/2", split="line")
    with pytest.raises(SettingsChangedError):
        build(texts, out, finish=True, split="line")
    with pytest.raises(UnfinishedBuildError, match="complete it with finish=True"):
        build(texts, out)
    with pytest.raises(UnfinishedBuildError, match="without rebuild=True are here"):
        build(texts, out, part="1/2", rebuild=True)
    with pytest.raises(SettingsError, match="exclude each other"):
        build(texts, out, part="1/2", finish=True)
    with pytest.raises(SettingsError, match="standard input"):
        headrace.build("-", out, part="0/2")


def test_a_dataset_is_extended_and_rebuilt_in_parts(
    texts: Path, wholes: dict[bool, Path], tmp_path: Path
) -> None:
    folder, out = tmp_path / "texts", tmp_path / "data"
    folder.mkdir()
    paths = sorted(texts.iterdir())
    for path in paths[:12]:
        (folder / path.name).write_bytes(path.read_bytes())
    headrace.build(folder, out, **SETTINGS)
    for path in paths[12:]:
        (folder / path.name).write_bytes(path.read_bytes())
    reports = [build(folder, out, part=f"{number}/2") for number in range(2)]
    assert len(headrace.open(out)) == 12
    assert sum(report.reused for report in reports) > 0
    assert build(folder, out, finish=True).records == 24
    # With the rest of the version before removed, nothing tells how it came about.
    again = build(folder, out, drop_previous=True, rebuild=True)
    for number in range(2):
        assert build(folder, out, part=f"{number}/2", rebuild=True).reused == 0
    assert build(folder, out, finish=True).records == again.records


def test_a_late_part_says_that_the_build_is_finished(texts: Path, tmp_path: Path, monkeypatch) -> None:
    """A part that was started twice may be at work when the dataset is complete."""
    out = tmp_path / "data"
    for number in range(2):
        build(texts, out, part=f"{number}/2")

    def finish_meanwhile(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        build(texts, out, finish=True)
        return opened(*arguments, **options)

    opened = run._open_engine
    monkeypatch.setattr(run, "_open_engine", finish_meanwhile)
    with pytest.raises(BuildError, match="was finished or discarded in the meantime"):
        build(texts, out, part="0/2")
    assert not (out / ".build").exists()
    assert len(headrace.open(out)) == 24
    assert headrace.verify(out)


def test_parts_in_a_bucket(texts: Path, wholes: dict[bool, Path], s3_place: str, tmp_path: Path) -> None:
    for shuffle in (False, True):
        place = f"{s3_place}/{shuffle}"
        running = [start_part(texts, place, f"{number % 2}/2", shuffle=shuffle) for number in range(3)]
        for each in running:
            _, said = each.communicate(timeout=300)
            assert each.returncode == 0, said.decode()
        build(texts, place, shuffle=shuffle, finish=True)
        headrace.copy(place, tmp_path / str(shuffle))
        assert tree(tmp_path / str(shuffle)) == tree(wholes[shuffle])
        left = [name for name in os.listdir("/tmp") if name.startswith("headrace-stage-")]
        assert not left


def test_results_in_a_bucket_are_read_many_at_a_time(s3_place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large build has a result for each of its tasks, and every answer of a store is long on its way."""
    store = open_store(s3_place)
    for number in range(12):
        write_file(store, f"{number:02d}.json", [str(number).encode()])
    together = threading.Barrier(6)
    read = RemoteStore.read

    def wait_for_others(self: RemoteStore, file: str) -> bytes:
        together.wait(DEADLINE_SECONDS)
        if file == "07.json":
            raise FileNotFoundError(file)
        return read(self, file)

    monkeypatch.setattr(RemoteStore, "read", wait_for_others)
    wanted = [(f"{number:02d}.json", str(number).encode()) for number in range(12) if number != 7]
    assert list(read_each(store)) == wanted
