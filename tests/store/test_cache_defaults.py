"""Which cache is used, how large it may become, and disks that are full or cannot be written."""

import logging
import shutil
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import pytest

from headrace.errors import SettingsError
from headrace.store.cache import admission, defaults, open_cache
from headrace.store.cache import cache as cache_module
from headrace.store.cache.defaults import default_limit, find_directory, find_limit
from tests.store.cache_samples import GROUPS, UNIT_ON_DISK, held_units, put_unit

GB = 2**30
Usage = namedtuple("Usage", "total used free")
Disk = namedtuple("Disk", "f_bavail f_frsize")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(cache_module, "_warned", set())
    monkeypatch.setattr(defaults, "_warned_of", set())
    for name in ("HEADRACE_CACHE", "HEADRACE_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        (None, {"XDG_CACHE_HOME": "/x"}, "/x/headrace"),
        (None, {"XDG_CACHE_HOME": "relative"}, "~/.cache/headrace"),
        (None, {}, "~/.cache/headrace"),
        (None, {"HEADRACE_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ("/given", {"HEADRACE_CACHE": "/c"}, "/given"),
        ("~/given", {}, "~/given"),
        (None, {"HEADRACE_CACHE": "off"}, None),
        (None, {"HEADRACE_CACHE": ""}, None),
        ("off", {"HEADRACE_CACHE": "/c"}, None),
    ],
)
def test_the_directory_is_given_or_of_the_environment_or_the_user_s(given, environment, found):
    assert find_directory(given, environment) == (None if found is None else Path(found).expanduser())


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        (None, {}, None),
        (None, {"HEADRACE_CACHE_BYTES": "200GB"}, 200 * GB),
        (None, {"HEADRACE_CACHE_BYTES": ""}, None),
        (1000, {"HEADRACE_CACHE_BYTES": "200GB"}, 1000),
        ("2 TiB", {}, 2048 * GB),
        (0, {}, 0),
    ],
)
def test_the_limit_is_given_or_of_the_environment(given, environment, found):
    assert find_limit(given, environment) == found


def test_a_limit_that_is_no_size_is_an_error(monkeypatch):
    with pytest.raises(SettingsError, match="cache_bytes=-1: must be at least 0"):
        find_limit(-1)
    with pytest.raises(SettingsError, match="HEADRACE_CACHE_BYTES: size 'much': must be a number"):
        find_limit(None, {"HEADRACE_CACHE_BYTES": "much"})


@pytest.mark.parametrize(
    ("total", "free", "held", "limit", "keep_free"),
    [
        (1000, 900, 0, 250, 50),
        (1000, 100, 0, 50, 50),
        (1000, 100, 200, 150, 50),
        (1000, 60, 0, 10, 50),
        (1000, 20, 0, 0, 50),
        (20, 20, 0, 5, 5),
        (4, 4, 0, 0, 5),
    ],
)
def test_the_default_limit_leaves_the_disk_to_others(
    tmp_path, monkeypatch, total, free, held, limit, keep_free
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total * GB, (total - free) * GB, free * GB))
    (tmp_path / "size").write_text(f"{held * GB} {held * GB} boot\n")
    found = default_limit(tmp_path)
    assert found == (limit * GB, keep_free * GB)


def test_by_default_the_last_of_the_disk_stays_free(tmp_path, monkeypatch, caplog):
    free = 100 * GB
    monkeypatch.setattr(admission.os, "statvfs", lambda _: Disk(free, 1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(200 * GB, 100 * GB, 100 * GB))
    cache = open_cache(tmp_path)
    assert (cache.limit_bytes, cache.keep_free_bytes) == (50 * GB, 10 * GB)
    assert put_unit(cache, GROUPS[0], 0)
    # Somebody else fills the disk.
    free = 10 * GB + UNIT_ON_DISK - 1
    with caplog.at_level(logging.WARNING):
        assert not any(put_unit(cache, GROUPS[0], number) for number in range(1, 4))
    assert len(caplog.records) == 1
    assert "the disk is nearly full" in caplog.text
    free += 1
    assert put_unit(cache, GROUPS[0], 1)
    assert held_units(cache, GROUPS[0]) == [0, 1]


def test_the_cache_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "c"))
    monkeypatch.setenv("HEADRACE_CACHE_BYTES", "1MB")
    assert repr(open_cache()) == f"Cache({str(tmp_path / 'c')!r}, {2**20})"
    monkeypatch.setenv("HEADRACE_CACHE_BYTES", "0")
    assert open_cache() is None
    monkeypatch.setenv("HEADRACE_CACHE", "off")
    assert open_cache() is None


def test_a_place_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert open_cache(tmp_path / "file" / "cache") is None
        assert open_cache(tmp_path / "file" / "cache", 1000) is None
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
    assert "going on without a cache" in caplog.text


def test_a_directory_of_somebody_else_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SettingsError, match="is not a cache of Headrace"):
        open_cache(tmp_path)


PUT_MANY = """
import logging, sys
logging.basicConfig(format="%(message)s")
from pathlib import Path
from headrace.store.cache import open_cache
from tests.store.cache_samples import GROUPS, disk_bytes, held_units, put_unit
cache = open_cache(sys.argv[1], 10**9)
admitted = [number for number in range(100) if put_unit(cache, GROUPS[0], number, 200_000)]
temporary = [path.name for path in cache.directory.data.rglob(".tmp-*")]
held = [number for number in range(100) if cache.get(GROUPS[0], f"{number * 200_000}-200000", 200_000) is not None]
print(len(admitted), admitted == held, temporary)
"""


def put_many(directory, environment, prepare=""):
    code = textwrap.dedent(prepare) + PUT_MANY
    path = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": path},
    )


def test_files_that_may_not_be_so_large_are_one_warning(tmp_path, child_environment):
    """As with a quota: the kernel refuses in the middle of a write."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    done = put_many(tmp_path / "cache", child_environment, limit)
    assert (done.returncode, done.stdout) == (0, "0 True []\n"), done.stderr
    assert (
        done.stderr == f"{tmp_path / 'cache'}: cannot be written: File too large; going on without caching\n"
    )


def in_namespace(words, **options):
    """Run a command where it may mount what nobody else sees."""
    return subprocess.run(["unshare", "--mount", "--map-root-user", *words], **options)


@pytest.mark.skipif(
    shutil.which("unshare") is None or in_namespace(["true"], capture_output=True).returncode != 0,
    reason="needs the right to mount",
)
@pytest.mark.parametrize(
    ("mount", "after", "admitted", "words"),
    [
        ("size=2m", "true", range(9, 11), "No space left on device"),
        ("size=2m", "mount -o remount,ro", None, "going on without a cache"),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_is_full_or_read_only_is_one_warning(
    tmp_path, child_environment, mount, after, admitted, words
):
    place = tmp_path / "disk"
    place.mkdir()
    (tmp_path / "put_many.py").write_text(PUT_MANY)
    run = f"mount -t tmpfs -o {mount} none {place} && {after} {place} && exec {sys.executable} {tmp_path}/put_many.py"
    environment = {**child_environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = in_namespace(["sh", "-c", f"{run} {place}"], capture_output=True, text=True, env=environment)
    assert words in done.stderr
    if admitted is None:
        assert done.stdout == ""
        return
    count, rest = done.stdout.split(" ", 1)
    assert int(count) in admitted
    assert (done.returncode, rest, done.stderr.count("\n")) == (0, "True []\n", 1), done.stderr
