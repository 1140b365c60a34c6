"""Readers and builds at once: a reader keeps its version over a rebuild, and over two it is told what happened."""

import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import DatasetNotFoundError, RebuiltError
from headrace.store.local import LocalStore
from headrace.store.memory import MemoryStore
from headrace.store.store import Store
from tests.samples import decoded, kept_for_readers, named_in, tree

INPUTS = 6


class Rebuilding:
    """A dataset of six shards, one for each input, and a way to build its next version."""

    def __init__(self, folder: Path, out: Path | Store) -> None:
        self.folder, self.out = folder, out
        self._versions = itertools.count()
        folder.mkdir()
        self.build_next()

    def build_next(self, changed: range = range(INPUTS)) -> list[str]:
        version = next(self._versions)
        for number in changed:
            (self.folder / f"{number}.txt").write_text(f"{version}: text {number} " * (400 + version))
        self.build_again()
        return self.texts()

    def build_again(self, **settings: Any) -> None:
        headrace.build(self.folder, self.out, shard_bytes=4096, workers=1, **settings)

    def texts(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.iterdir())]


@pytest.fixture(params=["local", "memory"])
def rebuilding(request: pytest.FixtureRequest, tmp_path: Path) -> Rebuilding:
    out = tmp_path / "out" if request.param == "local" else MemoryStore()
    return Rebuilding(tmp_path / "in", out)


def test_a_reader_that_has_read_nothing_yet_keeps_its_version(rebuilding: Rebuilding) -> None:
    before = rebuilding.texts()
    reader, begun = headrace.open(rebuilding.out), headrace.open(rebuilding.out)
    begun[2]
    after = rebuilding.build_next()
    rebuilding.build_again()  # with nothing to do
    assert decoded(begun) == decoded(reader) == before
    assert reader.length_histogram()[1].sum() == INPUTS
    assert decoded(headrace.open(rebuilding.out)) == after


def test_a_reader_in_another_process_gets_the_version_that_was_opened(tmp_path: Path) -> None:
    rebuilding = Rebuilding(tmp_path / "in", tmp_path / "out")
    before = rebuilding.texts()
    (tmp_path / "pickle").write_bytes(pickle.dumps(headrace.open(tmp_path / "out")))
    rebuilding.build_next(range(3))
    source = (
        "import pickle, sys; from tests.samples import decoded; "
        "print(decoded(pickle.load(open(sys.argv[1], 'rb'))))"
    )
    command = [sys.executable, "-W", "ignore", "-c", source, tmp_path / "pickle"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert done.stdout == f"{before}\n"


def test_after_two_rebuilds_a_reader_is_told_so(rebuilding: Rebuilding) -> None:
    before = rebuilding.texts()
    reader, everything = headrace.open(rebuilding.out), headrace.open(rebuilding.out, in_memory=True)
    reader[0]
    raw = pickle.dumps(reader)
    rebuilding.build_next()
    after = rebuilding.build_next()
    uses = [lambda: reader[5], reader.length_histogram]
    if not isinstance(rebuilding.out, MemoryStore):  # whose pickle has copies of its files
        uses.append(lambda: pickle.loads(raw))
    for use in uses:
        with pytest.raises(
            RebuiltError, match="the dataset was rebuilt since it was opened.*; open it again"
        ):
            use()
    assert decoded(everything) == before
    assert decoded(headrace.open(rebuilding.out)) == after


def test_while_a_version_is_dropped_its_readers_read_it_or_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilding, out = Rebuilding(tmp_path / "in", tmp_path / "out"), tmp_path / "out"
    before = rebuilding.texts()
    readers = [headrace.open(out) for _ in range(40)]
    rebuilding.build_next()
    remove, outcomes = LocalStore.remove, []

    def remove_and_look(store: LocalStore, file: str) -> None:
        remove(store, file)
        try:
            assert decoded(readers.pop()) == before
            outcomes.append("read")
        except RebuiltError:
            outcomes.append("told")

    monkeypatch.setattr(LocalStore, "remove", remove_and_look)
    rebuilding.build_next()
    assert outcomes.count("told") >= INPUTS


@pytest.mark.parametrize("removals", range(5))
def test_a_build_that_dies_while_it_drops_a_version_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    rebuilding, out = Rebuilding(tmp_path / "in", tmp_path / "out"), tmp_path / "out"
    rebuilding.build_next()
    remove, left = LocalStore.remove, removals

    def remove_some(store: LocalStore, file: str) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        remove(store, file)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "remove", remove_some)
        with pytest.raises(KeyboardInterrupt):
            rebuilding.build_next()
    rebuilding.build_again(drop_previous=True)
    assert decoded(headrace.open(out)) == rebuilding.texts()
    assert {path.name for path in out.iterdir()} == named_in(out / "headrace.json") | {"headrace.json"}


def test_what_is_missing_from_a_version_that_is_kept_is_missing(tmp_path: Path) -> None:
    rebuilding = Rebuilding(tmp_path / "in", tmp_path / "out")
    reader = headrace.open(tmp_path / "out")
    rebuilding.build_next(range(1, INPUTS))
    shared = reader.manifest.shards[0].stored.file
    (tmp_path / "out" / shared).unlink()
    with pytest.raises(DatasetNotFoundError, match="missing, although the manifest names it"):
        reader[0]


class RebuiltWhileOpened(LocalStore):
    """A directory in which two builds end between reading the manifest and looking at another file."""

    rebuilding: Rebuilding | None = None

    def head(self, file: str, count: int) -> tuple[bytes, int]:
        rebuilding, self.rebuilding = self.rebuilding, None
        if rebuilding:
            rebuilding.build_next()
            rebuilding.build_next()
        return super().head(file, count)


@pytest.mark.parametrize("in_memory", [False, True])
def test_opening_during_two_rebuilds_opens_the_newest(in_memory: bool, tmp_path: Path) -> None:
    rebuilding = Rebuilding(tmp_path / "in", tmp_path / "out")
    store = RebuiltWhileOpened(tmp_path / "out")
    store.rebuilding = rebuilding
    assert decoded(headrace.open(store, in_memory=in_memory)) == rebuilding.texts()


def test_only_one_version_is_kept_and_it_can_be_dropped(tmp_path: Path) -> None:
    rebuilding, out = Rebuilding(tmp_path / "in", tmp_path / "out"), tmp_path / "out"
    assert not kept_for_readers(out)
    rebuilding.build_next(range(2))
    first = kept_for_readers(out)
    assert len(first) == 1 + 2 + 3  # the manifest, two shards, the index, the units and the provenance
    rebuilding.build_again()
    assert kept_for_readers(out) == first
    rebuilding.build_next(range(1))
    second = kept_for_readers(out)
    assert len(second) == 1 + 1 + 3
    assert not (first & second) - {".previous.json"}
    assert not [name for name in first - second if (out / name).exists()]
    rebuilding.build_again(drop_previous=True)
    assert not kept_for_readers(out)
    assert set(tree(out)) == {path.name for path in out.iterdir()}


def test_a_version_that_comes_back_is_whole(rebuilding: Rebuilding) -> None:
    """Inputs that are removed and added again give files of the version that is being dropped."""
    for _ in range(2):
        text = (rebuilding.folder / "5.txt").read_text()
        (rebuilding.folder / "5.txt").unlink()
        rebuilding.build_again()
        assert decoded(headrace.open(rebuilding.out)) == rebuilding.texts()
        (rebuilding.folder / "5.txt").write_text(text)
        rebuilding.build_again()
        assert decoded(headrace.open(rebuilding.out)) == rebuilding.texts()
        assert not [verdict for verdict in headrace.verify(rebuilding.out) if verdict.problem]


READER = """
import sys
import headrace
from headrace.errors import RebuiltError
from tests.samples import decoded
opened = told = 0
while opened < 60:
    dataset = headrace.open(sys.argv[1])
    opened += 1
    try:
        versions = {text.split(":")[0] for text in decoded(dataset)}
    except RebuiltError:
        told += 1
        continue
    assert len(versions) == 1, versions
print(opened, told)
"""


def test_reading_while_builds_go_on_never_finds_damage(tmp_path: Path) -> None:
    rebuilding = Rebuilding(tmp_path / "in", tmp_path / "out")
    reader = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", READER, tmp_path / "out"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while reader.poll() is None:
        rebuilding.build_next()
    out, problems = reader.communicate()
    assert out.startswith("60 "), problems
