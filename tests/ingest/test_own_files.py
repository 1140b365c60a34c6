"""A directory may hold files of its owner: no build, rebuild or killed build touches them, whatever their names."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import DirectoryInUseError, StorageError, UnfinishedBuildError
from tests.ingest import deaths
from tests.properties import examples
from tests.samples import documents, kept_for_readers, tree

NAMES_LIKE_OURS = [
    ".tmp-notes",
    ".tmp-1234-abcd-shard.hdrc",
    "shard-0123456789abcdef.hdrc",
    "index-0123456789abcdef.hdrc",
    "mine.hdrc",
    "provenance-mine.json",
    "tokenizer-mine.json",
    "headrace.json.bak",
    ".lock",
    "notes.txt",
    "new/shard-0123456789abcdef.hdrc",
    "moved/names.json",
]


def put(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def without(directory: Path, files: dict[str, bytes]) -> dict[str, str]:
    """The tree of a directory without its owner's files, which must be as they were."""
    for name, content in files.items():
        assert (directory / name).read_bytes() == content, name
    return {name: digest for name, digest in tree(directory).items() if name not in files}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    put(path, {f"{number:04d}.txt": text.encode() * 10 for number, text in enumerate(documents(24))})
    return path


OWNERS = {name: f"precious: {name}".encode() for name in NAMES_LIKE_OURS}


@pytest.mark.parametrize("count", [2, pytest.param(150, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_killed_builds_leave_what_is_the_owners_and_nothing_of_their_own(
    shuffle: bool, count: int, folder: Path, tmp_path: Path
) -> None:
    """Killed in an empty directory, and in one that holds an older version."""
    settings = {"shuffle": shuffle, "shard_bytes": 4096, "rebuild": shuffle, "workers": 1}
    old, whole = tmp_path / "old", tmp_path / "whole"
    headrace.build(folder, old, **settings)
    (folder / "0003.txt").write_text("changed")
    [finished] = deaths.run("build", folder=folder, deaths=[(whole, 0)], **settings)
    moments = sorted({1 + number * finished["changes"] // count for number in range(count)})
    killed = []
    for moment in moments:
        killed += [(tmp_path / f"empty-{moment}", moment), (tmp_path / f"old-{moment}", moment)]
        shutil.copytree(old, tmp_path / f"old-{moment}")
    for out, _ in killed:
        put(out, OWNERS)
    deaths.run("build", folder=folder, deaths=killed, **settings)
    for out, _ in killed:
        headrace.build(folder, out, **settings)
        assert without(out, OWNERS) == tree(whole)


Step = tuple[str, int]
steps = st.lists(
    st.tuples(st.sampled_from(["build", "change", "rebuild", "drop", "writer"]), st.integers(0, 9))
)


@examples(6)
@given(
    owners=st.dictionaries(st.sampled_from(NAMES_LIKE_OURS), st.binary(max_size=30), max_size=6),
    history=steps,
)
def test_no_history_of_builds_touches_files_of_the_owner(
    owners: dict[str, bytes], history: list[Step], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("history")
    put(base / "in", {f"{number}.txt": b"text %d " % number * 300 for number in range(10)})
    put(base / "out", owners)
    for what, number in [*history, ("rebuild", 0)]:
        _do(what, number, base / "in", base / "out")
    headrace.build(base / "in", base / "fresh", shard_bytes=4096, workers=1)
    assert without(base / "out", owners) == tree(base / "fresh")


def _do(what: str, number: int, folder: Path, out: Path) -> None:
    if what == "change":
        (folder / f"{number}.txt").write_text(f"changed {number} " * 300)
    elif what == "writer":
        with headrace.Writer(out, fields={"x": "int64"}, overwrite=True) as writer:
            writer.write_columns({"x": range(number)})
    else:
        # After a Writer, only a rebuild may replace its dataset.
        headrace.build(folder, out, shard_bytes=4096, workers=1, rebuild=True, drop_previous=what == "drop")


def test_the_tokenizer_that_a_build_is_given_stays(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    out = tmp_path / "out"
    out.mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.save(str(out / "tokenizer-mine.json"))
    for rebuild in (False, True):
        headrace.build(
            folder, out, tokenizer=out / "tokenizer-mine.json", eos=False, workers=1, rebuild=rebuild
        )
        assert (out / "tokenizer-mine.json").exists()


def _build(folder: Path, out: Path) -> None:
    headrace.build(folder, out, workers=1)


def _write(folder: Path, out: Path) -> None:
    with headrace.Writer(out, fields={"x": "int64"}, overwrite=True) as writer:
        writer.write({"x": 1})


@pytest.mark.parametrize("work", [_build, _write])
@pytest.mark.parametrize("name", [".build/state.json", ".build/results/x.json", ".previous.json"])
def test_what_has_a_name_that_is_needed_and_is_the_owners_is_refused(
    work: Callable[[Path, Path], None], name: str, folder: Path, tmp_path: Path
) -> None:
    put(tmp_path / "out", {name: b"{}"})
    before = tree(tmp_path / "texts"), (tmp_path / "out" / name).read_bytes()
    with pytest.raises(StorageError, match="choose another"):
        work(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == [Path(name).name]
    assert (tree(tmp_path / "texts"), (tmp_path / "out" / name).read_bytes()) == before


@pytest.mark.parametrize("work", [_build, _write])
def test_a_lock_that_is_a_link_or_a_pipe_is_refused(
    work: Callable[[Path, Path], None], folder: Path, tmp_path: Path
) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("precious")
    os.symlink(victim, out / ".lock")
    with pytest.raises(StorageError, match=r"\.lock: is a symbolic link, which a lock cannot be; remove it"):
        work(folder, out)
    assert victim.read_text() == "precious"
    (out / ".lock").unlink()
    os.mkfifo(out / ".lock")
    with pytest.raises(StorageError, match=r"\.lock: is not a file"):
        work(folder, out)


def test_a_lock_of_the_owner_is_used_and_left_as_it_is(folder: Path, tmp_path: Path) -> None:
    put(tmp_path / "out", {".lock": b"mine"})
    with (
        headrace.Writer(tmp_path / "out", fields={"x": "int64"}),
        pytest.raises(DirectoryInUseError, match="in use by another process"),
    ):
        _build(folder, tmp_path / "out")
    assert (tmp_path / "out" / ".lock").read_bytes() == b"mine"


def test_a_build_and_a_writer_do_not_discard_each_others_work(folder: Path, tmp_path: Path) -> None:
    written, built = tmp_path / "written", tmp_path / "built"
    writer = headrace.Writer(written, fields={"x": "int64"}, shard_bytes=80)
    writer.write_columns({"x": range(20)})
    writer.write({"x": 20})
    writer.__exit__(RuntimeError, RuntimeError(), None)
    with pytest.raises(UnfinishedBuildError, match="its records would be lost; complete it"):
        _build(folder, written)
    with headrace.Writer(written, fields={"x": "int64"}, shard_bytes=80, resume=True) as writer:
        assert len(writer) == 20
    (folder / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(headrace.errors.BadRecordsError):
        headrace.build(folder, built, shard_bytes=4096, workers=1)
    for resume in (False, True):
        with pytest.raises(UnfinishedBuildError, match="a build was interrupted here; complete it"):
            headrace.Writer(built, fields={"x": "int64"}, resume=resume)
    _write(folder, built)
    assert headrace.open(built)[0]["x"] == 1
    assert not kept_for_readers(built)
    assert set(tree(built)) == {path.name for path in built.iterdir()}
