"""`headrace cache` as users see it."""

import json
import os

import pytest

from headrace.store.cache import Cache
from tests.cli.commands import run_command, run_here
from tests.store.cache_samples import (
    GROUPS,
    UNIT_ON_DISK,
    change_file,
    files_below,
    held_units,
    put_unit,
    unit_key,
)

OLD, USED = "0" * 32, "1" * 32


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Three units of a dataset that nobody uses, and two of one that is in use."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADRACE_CACHE_BYTES", "1MB")
    before = Cache(tmp_path / "cache", 2**20)
    before.for_dataset(OLD, [GROUPS[0]], "s3://bucket/old")
    for number in range(3):
        put_unit(before, GROUPS[0], number)
    os.utime(before.directory.datasets / OLD, (1_000_040_000, 1_000_040_000))
    del before
    now = Cache(tmp_path / "cache", 2**20)
    now.for_dataset(USED, [GROUPS[1]], "s3://bucket/used")
    for number in range(2):
        put_unit(now, GROUPS[1], number)
    return now


def test_ls_shows_datasets_and_totals(cache):
    done = run_here("cache", "ls")
    assert (done.returncode, done.stderr) == (0, "")
    header, used, old, total = done.stdout.splitlines()
    assert header.split() == ["dataset", "bytes", "files", "last", "use", "address"]
    assert used.split() == [USED, "2.1", "KiB", "2", "in", "use", "s3://bucket/used"]
    assert old.startswith(f"{OLD}  3.1 KiB  3      2001-09-")
    assert old.endswith("s3://bucket/old")
    assert total == f"{cache.directory.path}: 5.2 KiB of 1.0 MiB in 5 files"


def test_ls_as_json(cache):
    put_unit(cache, GROUPS[2], 0)
    document = json.loads(run_here("cache", "ls", "--json").stdout)
    totals = {name: document[name] for name in ("bytes", "files", "limit_bytes")}
    assert totals == {"bytes": 6 * UNIT_ON_DISK, "files": 6, "limit_bytes": 2**20}
    used, old, ownerless = document["datasets"]
    assert (used["dataset_id"], used["in_use"], used["bytes"]) == (USED, True, 2 * UNIT_ON_DISK)
    assert (old["address"], old["in_use"], old["last_used_unix_seconds"]) == (
        "s3://bucket/old",
        False,
        1_000_040_000,
    )
    assert (ownerless["dataset_id"], ownerless["files"]) == ("", 1)


def test_clear_removes_what_is_not_in_use_and_nothing_else(cache):
    foreign = cache.directory.data / GROUPS[0] / "notes.txt"
    foreign.write_text("mine")
    put_unit(cache, GROUPS[2], 0)
    done = run_here("cache", "clear", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (f"{cache.directory.path}: 4.2 KiB freed; kept 1 dataset in use: {USED}\n")
    assert held_units(cache, GROUPS[1]) == [0, 1]
    assert set(files_below(cache.directory.data)) == {
        f"{GROUPS[0]}/notes.txt",
        *(f"{GROUPS[1]}/{unit_key(number)}" for number in range(2)),
    }
    # What was freed can be used again.
    small = Cache(cache.directory.path, 3 * UNIT_ON_DISK)
    assert [put_unit(small, GROUPS[1], number) for number in (5, 6)] == [True, False]


def test_clear_one_dataset(cache):
    done = run_here("cache", "clear", OLD, "--yes", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "cache": str(cache.directory.path),
        "freed_bytes": 3 * UNIT_ON_DISK,
        "kept": [],
    }
    done = run_here("cache", "clear", USED, "--yes")
    assert done.returncode == 1
    assert f"kept 1 dataset in use: {USED}" in done.stdout
    done = run_here("cache", "clear", OLD, "--yes")
    assert done.returncode == 1
    assert "is not in the cache" in done.stderr


@pytest.mark.parametrize("named", ["0", OLD[:7], "s3://bucket/old", "s3://bucket/old/"])
def test_clear_a_dataset_by_the_beginning_of_its_id_or_its_address(cache, named):
    done = run_here("cache", "clear", named, "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert held_units(cache, GROUPS[0]) == []
    assert held_units(cache, GROUPS[1]) == [0, 1]


def test_a_beginning_that_several_datasets_have(cache):
    other = OLD[:-1] + "7"
    Cache(cache.directory.path, 2**20).for_dataset(other, [GROUPS[2]], "s3://bucket/other")
    done = run_here("cache", "clear", "00", "--yes")
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: 00: is the beginning of ")
    assert other in done.stderr
    assert held_units(cache, GROUPS[0]) == [0, 1, 2]
    assert "is not in the cache" in run_here("cache", "clear", "s3://bucket/nothing", "--yes").stderr


def test_clear_as_json_asks_nothing(cache):
    done = run_here("cache", "clear", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "headrace: --json: nothing can be asked then; give --yes too\n"
    assert held_units(cache, GROUPS[0]) == [0, 1, 2]


def test_clear_asks_first(cache):
    done = run_command("cache", "clear", input="n\n")
    assert done.returncode == 1
    assert "Remove everything that is not in use" in done.stderr
    assert held_units(cache, GROUPS[0]) == [0, 1, 2]


def test_verify_removes_what_is_damaged(cache):
    done = run_here("cache", "verify")
    assert (done.returncode, done.stdout) == (
        0,
        f"{cache.directory.path}: intact, 5 files, 5.2 KiB. There is nothing to do.\n",
    )
    damaged = cache.directory.data / GROUPS[0] / unit_key(1)
    change_file(damaged, lambda content: content.__setitem__(-1, content[-1] ^ 1))
    done = run_here("cache", "verify")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == f"damaged, removed  {GROUPS[0]}/{unit_key(1)}: its checksum does not match"
    assert "1 of 5 files" in lines[1]
    assert not damaged.exists()
    document = json.loads(run_here("cache", "verify", "--json").stdout)
    assert (document["files"], document["removed"]) == (4, [])


def test_a_cache_that_does_not_exist_is_not_made(tmp_path):
    place = tmp_path / "none"
    for words in (["ls"], ["verify"], ["clear", "--yes"]):
        assert run_here("cache", *words, "--cache", place).returncode == 0
    assert "there is no cache yet" in run_here("cache", "ls", "--cache", place).stdout
    assert not place.exists()


def test_a_directory_that_is_no_cache_is_refused(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    for words in (["ls"], ["verify"], ["clear", "--yes"]):
        done = run_here("cache", *words, "--cache", tmp_path)
        assert done.returncode == 1
        assert "is not a cache of Headrace" in done.stderr
    assert files_below(tmp_path) == {"notes.txt": b"mine"}
    monkeypatch.setenv("HEADRACE_CACHE", "off")
    assert "the cache is off" in run_here("cache", "ls").stderr
