"""kill -9 at any moment: a valid dataset or a build that continues, and the same bytes in the end."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import headrace
from headrace.errors import BadRecordsError, HeadraceError, UnfinishedBuildError
from tests.ingest import deaths
from tests.samples import documents, tree

SOME_DEATHS = 5
MANY_DEATHS = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(documents(24)):
        (path / f"{number:04d}.txt").write_text(text * 10)
    return path


BuildWhole = Callable[[bool, int], tuple[Path, int]]


@pytest.fixture(scope="module")
def build_whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildWhole:
    """A build that is not killed, and how many changes to the disk it took."""

    @cache
    def build(shuffle: bool, workers: int) -> tuple[Path, int]:
        whole = tmp_path_factory.mktemp("whole")
        settings = {"shuffle": shuffle, "seed": 3, "shard_bytes": 4096, "workers": workers}
        [finished] = deaths.run("build", folder=folder, deaths=[(whole, 0)], **settings)
        return whole, finished["changes"]

    return build


@pytest.fixture(scope="module")
def whole_as_given(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build that is not killed, with the settings that the tests leave as they are."""
    whole = tmp_path_factory.mktemp("as-given") / "whole"
    headrace.build(folder, whole, shard_bytes=4096, workers=1)
    return whole


@pytest.fixture(scope="module")
def killed_of_lines(folder: Path, build_whole: BuildWhole, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the lines of the texts that was killed in the middle: for tests that go on in copies of it."""
    _, changes = build_whole(False, 1)
    out = tmp_path_factory.mktemp("lines") / "out"
    settings = {"split": "line", "shard_bytes": 4096, "workers": 1}
    [answer] = deaths.run("build", folder=folder, deaths=[(out, changes // 2)], **settings)
    assert answer["killed"]
    return out


@pytest.mark.parametrize("count", [SOME_DEATHS, pytest.param(MANY_DEATHS, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_killed_at_any_moment_it_continues_to_the_same_bytes(
    shuffle: bool, count: int, folder: Path, build_whole: BuildWhole, tmp_path: Path
) -> None:
    _kill_and_continue(folder, build_whole, tmp_path, count, shuffle=shuffle, workers=1)


@pytest.mark.parametrize("count", [2, pytest.param(MANY_DEATHS, marks=pytest.mark.soak)])
def test_killed_with_workers_it_leaves_none_and_continues_to_the_same_bytes(
    count: int, folder: Path, build_whole: BuildWhole, tmp_path: Path
) -> None:
    _kill_and_continue(folder, build_whole, tmp_path, count, shuffle=True, workers=2)


def _kill_and_continue(
    folder: Path, build_whole: BuildWhole, tmp_path: Path, count: int, *, shuffle: bool, workers: int
) -> None:
    """Kill so many builds, each at a moment of its own, and their continuations too; let them all finish."""
    settings = {"shuffle": shuffle, "seed": 3, "shard_bytes": 4096}
    whole, changes = build_whole(shuffle, workers)
    moments = sorted({1 + number * changes // count for number in range(count)})
    twice = [(tmp_path / f"cut-{moment}", each) for moment in moments for each in (moment, 1 + moment // 2)]
    answers = deaths.run("build", folder=folder, deaths=twice, workers=workers, **settings)
    assert all(answer["killed"] for answer in answers[::2])
    for answer in answers if workers > 1 else ():
        deaths.wait_until_gone(answer["session"])
    for moment in moments:
        cut = tmp_path / f"cut-{moment}"
        try:
            dataset = headrace.open(cut)
        except HeadraceError as error:
            assert "build" in str(error)
        else:
            # A manifest is there: then the dataset must be whole.
            assert not [verdict for verdict in headrace.verify(cut) if verdict.problem]
            assert len(dataset) == 24
        headrace.build(folder, cut, workers=1, **settings)
        assert tree(cut) == tree(whole)


def test_what_was_finished_before_the_kill_is_not_built_again(
    folder: Path, build_whole: BuildWhole, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    _, changes = build_whole(False, 1)
    [answer] = deaths.run(
        "build", folder=folder, deaths=[(out, changes // 2)], workers=1, seed=3, shard_bytes=4096
    )
    assert answer["killed"]
    finished = len(list((out / ".build" / "results").glob("[!.]*.json")))
    with pytest.raises(UnfinishedBuildError, match="start the same build again"):
        headrace.open(out)
    report = headrace.build(folder, out, shard_bytes=4096, workers=2)
    assert report.reused >= finished >= 3
    assert report.built > 0
    assert report.records == 24


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_results_of_other_settings_never_get_into_a_dataset_whenever_it_is_killed(
    every: bool, folder: Path, build_whole: BuildWhole, killed_of_lines: Path, tmp_path: Path
) -> None:
    """An unfinished build, then one with other settings in its place that is killed: at its beginning, its end, ..."""
    new = {"split": "file", "shard_bytes": 4096}
    _, changes = build_whole(False, 1)
    headrace.build(folder, tmp_path / "whole", workers=1, **new)
    near_the_end = range(changes - 6, changes + 6)
    moments = [1, 2, 4, 7, changes // 2, *near_the_end[:: 1 if every else 3]]
    places = [tmp_path / f"cut-{moment}" for moment in moments]
    for place in places:
        shutil.copytree(killed_of_lines, place)
    killed = list(zip(places, moments, strict=True))
    deaths.run("build", folder=folder, deaths=killed, workers=1, rebuild=True, **new)
    for place in places:
        headrace.build(folder, place, workers=1, rebuild=True, **new)
        assert tree(place) == tree(tmp_path / "whole")


@pytest.mark.parametrize("content", [None, "", "{}", "[]"])
def test_results_without_their_settings_are_built_again(
    folder: Path, killed_of_lines: Path, whole_as_given: Path, tmp_path: Path, content: str | None
) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed_of_lines, out)
    state = out / ".build" / "state.json"
    state.unlink() if content is None else state.write_text(content)
    assert headrace.build(folder, out, shard_bytes=4096, workers=1).reused == 0
    assert tree(out) == tree(whole_as_given)


def test_a_build_that_finished_nothing_leaves_no_settings_behind(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for arguments in ({}, {"rebuild": True}):
        with pytest.raises(HeadraceError, match="no key 'text'"):
            headrace.build(tmp_path / "bad.jsonl", out, tokenizer="bytes", shard_bytes=4096, **arguments)
        headrace.build(folder, out, workers=1)
    assert headrace.open(out).manifest.settings["shard_bytes"] > 4096


@pytest.mark.parametrize("content", ['{"slices": [{"pa', "", "[]", '{"slices": 3}'])
def test_a_damaged_result_of_an_unfinished_build_is_built_again(
    content: str, folder: Path, whole_as_given: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole_as_given, out)
    (out / ".build" / "results").mkdir(parents=True)
    (out / ".build" / ".headrace").touch()
    (out / ".build" / "results" / "0123.json").write_text(content)
    headrace.build(folder, out, shard_bytes=4096, workers=1)
    assert tree(out) == tree(whole_as_given)


@pytest.mark.parametrize(
    ("blow", "code", "complaint"),
    [
        ("kill a worker", 1, "was killed by SIGKILL"),
        ("interrupt", 130, "stopped; finished work is kept, and the same command continues the build"),
    ],
)
def test_a_killed_worker_or_ctrl_c_ends_the_command_and_every_process_and_the_build_continues(
    blow: str, code: int, complaint: str, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["build", str(folder), "--out", str(out), "--shard-size", "4096", "--workers", "2"]
    [answer] = deaths.run("command", words=words, moment=45, blow=blow)
    assert answer["error"] == f"SystemExit: {code}"
    assert complaint in answer["complaint"]
    deaths.wait_until_gone(answer["session"])
    report = headrace.build(folder, out, shard_bytes=4096, workers=1)
    assert report.reused > 0
    assert report.records == 24


def test_a_full_disk_loses_nothing(write_texts: Callable[..., Path], tmp_path: Path) -> None:
    """The limit on file sizes stands in for a full disk: the kernel refuses the write in the same way."""
    folder = write_texts(documents(50))
    out = tmp_path / "out"
    headrace.build(folder, out)
    before = tree(out)
    (folder / "large.txt").write_text("x" * 500_000)
    program = (
        "import resource, signal, sys, headrace\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    headrace.build(sys.argv[1], sys.argv[2], workers=1)\n"
        "except headrace.HeadraceError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, folder, out], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("StorageError")
    assert "free some space" in done.stdout
    assert len(headrace.open(out)) == 50
    assert not list(out.rglob(".tmp-*"))
    assert {name: digest for name, digest in tree(out).items() if not name.startswith(".build")} == before
    assert headrace.build(folder, out).records == 51


def test_a_build_error_in_a_worker_keeps_its_kind(tmp_path: Path) -> None:
    for number in range(5):
        key = "body" if number == 3 else "text"
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({key: "x" * 3000}) + "\n")
    with pytest.raises(BadRecordsError, match="the record has: 'body'"):
        headrace.build(
            str(tmp_path / "*.jsonl"), tmp_path / "out", tokenizer="bytes", workers=2, shard_bytes=4096
        )
