"""`headrace clean` as users see it: what nobody needs goes, and nothing else."""

import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import obstore
import pytest

import headrace
from headrace.store.address import open_store
from headrace.store.remote import RemoteStore
from headrace.store.store import Store, write_file
from headrace.store.uploads import unfinished_uploads
from tests.cli.commands import run_here
from tests.fault_proxy import Hold
from tests.samples import tree

DEADLINE_SECONDS = 90
FIELDS = {"x": "int64"}


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path) -> str:
    return str(tmp_path / "data") if request.param == "disk" else request.getfixturevalue("s3_place")


def write_records(place: str, count: int, **options) -> headrace.Writer:
    writer = headrace.Writer(place, fields=FIELDS, shard_bytes=800, **options)
    for first in range(0, count, 100):
        writer.write_columns({"x": np.arange(first, first + 100)})
    return writer


def abandon(writer: headrace.Writer) -> None:
    writer.write({"x": -1})  # what is full by now becomes a shard
    writer.__exit__(ZeroDivisionError, ZeroDivisionError(), None)


def everything(store: Store) -> set[str]:
    return set(store.everything())


def test_nothing_to_remove(place):
    write_records(place, 100).close()
    before = everything(open_store(place))
    for options in ((), ("--yes",)):
        done = run_here("clean", place, *options)
        assert (done.returncode, done.stderr) == (0, "")
        kept, verdict = done.stdout.splitlines()
        assert kept.startswith("kept: the dataset: ")
        assert verdict == f"{place}: there is nothing to remove"
    assert everything(open_store(place)) == before


def test_leftovers_go_and_nothing_else(place):
    """A dataset, a writer that was interrupted, and files of others."""
    store = open_store(place)
    write_records(place, 200).close()
    write_file(store, "notes.txt", [b"mine"])
    write_file(store, "shard-0123456789abcdef.hdrc", [b"mine as well"])
    write_file(_created(store.folder("inner")), "deep.txt", [b"theirs"])
    before = everything(store)
    reader = headrace.open(place)
    abandon(write_records(place, 300, overwrite=True))
    with_leftovers = everything(store)
    done = run_here("clean", place, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    assert not listed["is_removed"]
    assert everything(store) == with_leftovers
    gone = with_leftovers - before
    assert listed["files"] == len(gone)
    assert listed["bytes"] == sum(store.everything()[file] for file in gone)
    folder, finished = listed["leftovers"]
    assert folder["what"].startswith("an unfinished headrace.Writer")
    # Only one: the first two shards are the same as the dataset's.
    assert (finished["what"], finished["files"]) == ("files that it had finished already", 1)
    assert [(each["what"], each["files"]) for each in listed["kept"]] == [
        ("the dataset", len(reader.manifest.files)),
        ("notes.txt, shard-0123456789abcdef.hdrc", 2),
    ]
    done = run_here("clean", place, "--yes")
    assert done.returncode == 0
    assert f"{place}: removed {len(gone)} files, " in done.stdout
    assert everything(store) == before
    assert [record["x"] for record in headrace.open(place)] == list(range(200))
    assert reader[199]["x"] == 199


def _created(store: Store) -> Store:
    store.create()
    return store


def test_the_version_before_is_kept(place):
    write_records(place, 100).close()
    reader = headrace.open(place)
    write_records(place, 200, overwrite=True).close()
    done = run_here("clean", place, "--yes")
    assert "kept: the version before: " in done.stdout
    assert "its readers may have it open" in done.stdout
    assert reader[99]["x"] == 99


def test_never_under_a_writer(place):
    writer = write_records(place, 300)
    for options in ((), ("--yes",)):
        done = run_here("clean", place, *options)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{place}: in use by headrace.Writer, process" in done.stderr
    writer.close()
    assert len(headrace.open(place)) == 300


def test_a_foreign_folder_and_a_damaged_manifest(tmp_path):
    data = tmp_path / "data"
    write_records(str(data), 100).close()
    (data / ".build").mkdir()
    (data / ".build" / "mine.txt").write_text("mine")
    before = tree(data)
    done = run_here("clean", data, "--yes")
    assert "kept: the folder .build: 1 file; it is not a folder of Headrace" in done.stdout
    assert tree(data) == before
    (data / "headrace.json").write_text("damaged")
    done = run_here("clean", data, "--yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert "not a Headrace manifest" in done.stderr
    assert "no such directory" in run_here("clean", tmp_path / "nothing").stderr


def test_a_place_where_nothing_is(s3_place):
    done = run_here("clean", s3_place)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"headrace: {s3_place}: there is nothing there; give the address of a dataset\n"
    assert everything(open_store(s3_place)) == set()


def test_one_file_is_it_and_two_are_them(place):
    write_records(place, 100).close()
    write_file(open_store(place), "mine.txt", [b"mine"])
    done = run_here("clean", place)
    why = "no dataset names it, and no writer has noted it here"
    assert f"kept: mine.txt: 1 file; {why}" in done.stdout
    write_file(open_store(place), "yours.txt", [b"yours"])
    assert "2 files; no dataset names them" in run_here("clean", place).stdout


def begin_upload(place: str, key: str) -> None:
    """An upload in parts that is never finished, as a killed process leaves it."""
    library = RemoteStore(place).client._library_write_store()
    writer = obstore.open_writer(library, key, buffer_size=5 << 20, max_concurrency=1)
    # One part at a time: the first has arrived when the third is taken.
    for _ in range(3):
        writer.write(b"x" * (5 << 20))


def test_unfinished_uploads(s3_place):
    prefix = RemoteStore(s3_place).address.prefix
    ours = [f"{prefix}/shard-0123456789abcdef.hdrc", f"{prefix}/.build/new/index-0123456789abcdef.hdrc"]
    others = [f"{prefix}/film.mp4", f"{prefix}/inner/shard-0123456789abcdef.hdrc"]
    for key in (*ours, *others):
        begin_upload(s3_place, key)
    store = RemoteStore(s3_place)
    assert sorted(upload.key for upload in unfinished_uploads(store)) == sorted((*ours, *others))
    listed = json.loads(run_here("clean", s3_place, "--json").stdout)
    assert [each["what"] for each in listed["leftovers"]] == ["unfinished uploads"]
    assert listed["files"] == 2
    assert listed["bytes"] > 0
    assert len(unfinished_uploads(store)) == 4
    done = run_here("clean", s3_place, "--yes")
    assert "film.mp4" in done.stdout
    assert sorted(upload.key for upload in unfinished_uploads(store)) == sorted(others)


def test_what_a_killed_copy_leaves(tmp_path, s3_place, fault_proxy):
    data = tmp_path / "data"
    write_records(str(data), 500).close()
    release = threading.Event()
    fault_proxy.add(Hold(release), method="PUT", path="index-")
    command = [sys.executable, "-m", "headrace", "copy", str(data), s3_place]
    copying = subprocess.Popen(command)
    store = open_store(s3_place)
    _wait_until(lambda: len(store.files()) == 6, copying)
    assert "in use by headrace copy, process" in run_here("clean", s3_place, "--yes").stderr
    copying.send_signal(signal.SIGKILL)
    copying.wait()
    fault_proxy.clear()
    done = run_here("clean", s3_place)
    assert (
        f"left behind: an unfinished copy, which the same `headrace copy` would continue (from {data}): "
        in (done.stdout)
    )
    assert "left behind: files that it had finished already: 6 files" in done.stdout
    assert run_here("clean", s3_place, "--yes").returncode == 0
    assert everything(store) == set()
    release.set()


def _wait_until(condition, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
