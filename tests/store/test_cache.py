"""The cache as one process uses it: what is put is got, whole, or it is not there."""

import logging
import os
import pickle
import threading

import numpy as np
import pytest

from headrace.errors import SettingsError, StorageError
from headrace.store.cache import Cache, files
from headrace.store.cache import cache as cache_module
from headrace.store.cache.directory import HEADER_BYTES
from tests.store.cache_samples import (
    GROUPS,
    UNIT_BYTES,
    UNIT_ON_DISK,
    change_file,
    disk_bytes,
    files_below,
    has_unit,
    held_units,
    put_unit,
    unit_content,
    unit_key,
)

GROUP = GROUPS[0]
KEY = unit_key(0)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", 100 * UNIT_ON_DISK)


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(cache_module, "_warned", set())


@pytest.fixture
def reboot(monkeypatch):
    """As if the machine had been started again: files of before must be checked."""

    def boot():
        new = os.urandom(16)
        monkeypatch.setattr(files, "boot_id", lambda: new)

    return boot


def test_what_is_put_is_got_by_every_process_and_cannot_be_written(cache):
    assert not has_unit(cache, GROUP, 0)
    assert put_unit(cache, GROUP, 0)
    elsewhere = Cache(cache.directory.path, 1)
    assert has_unit(elsewhere, GROUP, 0)
    mapped = elsewhere.get(GROUP, KEY, UNIT_BYTES)
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
    with pytest.raises(ValueError):
        mapped.flags.writeable = True


@pytest.mark.parametrize("count", [0, 1, 4096 - HEADER_BYTES, 70_000])
def test_any_size_fits(cache, count):
    assert put_unit(cache, GROUP, 3, count)
    assert has_unit(cache, GROUP, 3, count)


def test_any_buffer_can_be_put(cache):
    numbers = np.arange(100, dtype=np.int32)
    assert cache.put(GROUP, "0-400", memoryview(numbers)).tobytes() == numbers.tobytes()


def test_putting_twice_writes_once(cache):
    put_unit(cache, GROUP, 0)
    written = cache.directory.data / GROUP / KEY
    before = written.stat()
    assert put_unit(cache, GROUP, 0)
    assert os.path.samestat(written.stat(), before)
    assert disk_bytes(cache) == UNIT_ON_DISK


def test_a_reader_keeps_its_map_when_the_file_is_gone(cache):
    put_unit(cache, GROUP, 0)
    mapped = cache.get(GROUP, KEY, UNIT_BYTES)
    (cache.directory.data / GROUP / KEY).unlink()
    assert not has_unit(cache, GROUP, 0)
    assert mapped.tobytes() == unit_content(GROUP, 0)


@pytest.mark.parametrize(
    ("group", "key", "count"),
    [
        ("../../" + GROUP, KEY, UNIT_BYTES),
        (GROUP[:-1], KEY, UNIT_BYTES),
        (GROUP, "../x", UNIT_BYTES),
        (GROUP, "0", 0),
        (GROUP, KEY, UNIT_BYTES - 1),
    ],
)
def test_names_that_are_no_names_are_refused(cache, group, key, count):
    with pytest.raises(SettingsError, match="must be"):
        cache.get(group, key, count)
    with pytest.raises(SettingsError, match="must be"):
        cache.put(group, key, bytes(count))


def test_once_full_nothing_is_admitted_and_what_is_there_stays(tmp_path):
    cache = Cache(tmp_path / "cache", 5 * UNIT_ON_DISK)
    assert [put_unit(cache, GROUP, number) for number in range(8)] == [True] * 5 + [False] * 3
    assert held_units(cache, GROUP) == [0, 1, 2, 3, 4]
    assert disk_bytes(cache) == 5 * UNIT_ON_DISK
    assert not put_unit(cache, GROUP, 9, 10 * UNIT_ON_DISK)
    (cache.directory.data / GROUP / KEY).unlink()
    # Another process counts what is there.
    assert put_unit(Cache(tmp_path / "cache", 5 * UNIT_ON_DISK), GROUP, 7)


@pytest.mark.parametrize("number", ["", "nonsense", "0 0 another-boot", "999999 999999 another-boot"])
def test_a_size_that_cannot_be_believed_is_counted(tmp_path, number):
    cache = Cache(tmp_path / "cache", 5 * UNIT_ON_DISK)
    for unit in range(4):
        put_unit(cache, GROUP, unit)
    cache.directory.size.write_text(number)
    again = Cache(tmp_path / "cache", 5 * UNIT_ON_DISK)
    assert [put_unit(again, GROUP, unit) for unit in (4, 5)] == [True, False]


def test_a_file_of_another_size_is_removed(cache):
    put_unit(cache, GROUP, 0)
    path = cache.directory.data / GROUP / KEY
    path.write_bytes(path.read_bytes()[:-1])
    assert not has_unit(cache, GROUP, 0)
    assert not path.exists()
    assert put_unit(cache, GROUP, 0)


DAMAGES = {
    "zeros": lambda content: content.__setitem__(slice(None), bytes(len(content))),
    "zeros after the header": lambda content: content.__setitem__(
        slice(HEADER_BYTES, None), bytes(UNIT_BYTES)
    ),
    "garbage": lambda content: content.__setitem__(slice(None), os.urandom(len(content))),
    "one bit": lambda content: content.__setitem__(-1, content[-1] ^ 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_after_a_reboot_files_are_checked_before_they_are_used(cache, reboot, damage):
    for number in range(3):
        put_unit(cache, GROUP, number)
    change_file(cache.directory.data / GROUP / unit_key(1), damage)
    reboot()
    assert held_units(cache, GROUP) == [0, 2]
    assert not (cache.directory.data / GROUP / unit_key(1)).exists()
    assert put_unit(cache, GROUP, 1)


def test_a_file_is_checked_once_after_a_reboot(cache, reboot, monkeypatch):
    put_unit(cache, GROUP, 0)
    reboot()
    assert has_unit(cache, GROUP, 0)
    checked = []
    monkeypatch.setattr(files, "_checksum", lambda *_: checked.append(1))
    assert has_unit(Cache(cache.directory.path, 1), GROUP, 0)
    assert checked == []


def test_a_file_under_the_wrong_name_is_found_out_after_a_reboot(cache, reboot):
    put_unit(cache, GROUP, 0)
    (cache.directory.data / GROUP / KEY).rename(cache.directory.data / GROUP / unit_key(1))
    reboot()
    assert not has_unit(cache, GROUP, 1)


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SettingsError, match=r"holds files and is not a cache.*'notes.txt'.*empty directory"):
        Cache(tmp_path, 1000)
    assert files_below(tmp_path) == {"notes.txt": b"mine"}


def test_links_inside_the_cache_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    cache = Cache(tmp_path / "cache", 10**6)
    (cache.directory.data / GROUP).symlink_to(tmp_path / "elsewhere")
    assert not put_unit(cache, GROUP, 0)
    assert files_below(tmp_path / "elsewhere") == {}
    cache.directory.locks.rename(tmp_path / "locks")
    cache.directory.locks.symlink_to(tmp_path / "locks")
    with pytest.raises(SettingsError, match="symbolic link"):
        Cache(tmp_path / "cache", 10**6)


def test_a_link_to_a_cache_is_a_cache(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    assert put_unit(Cache(tmp_path / "cache", 10**6), GROUP, 0)
    assert has_unit(Cache(tmp_path / "disk", 10**6), GROUP, 0)


def test_foreign_files_inside_are_neither_counted_nor_touched(tmp_path):
    cache = Cache(tmp_path / "cache", 2 * UNIT_ON_DISK)
    foreign = [GROUP + "/notes.txt", GROUP + "/12-34-56", "other/0-1000", "README"]
    for name in foreign:
        path = cache.directory.data / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10 * UNIT_BYTES))
    assert [put_unit(cache, GROUP, number) for number in range(3)] == [True, True, False]
    assert sum(len(content) for content in files_below(cache.directory.data).values()) == (
        2 * UNIT_ON_DISK + len(foreign) * 10 * UNIT_BYTES
    )


def test_a_place_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cache cannot be used: .*file.*choose a place"):
        Cache(tmp_path / "file" / "cache", 1000)


def test_a_pickled_cache_is_the_same_cache(cache):
    put_unit(cache, GROUP, 0)
    again = pickle.loads(pickle.dumps(cache))
    assert repr(again) == repr(cache)
    assert has_unit(again, GROUP, 0)
    assert put_unit(again, GROUP, 1)


def test_threads_share_one_object(cache):
    failures = []

    def work(seed):
        try:
            for number in np.random.default_rng(seed).permutation(50):
                if not has_unit(cache, GROUP, int(number)):
                    put_unit(cache, GROUP, int(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert held_units(cache, GROUP) == [*range(50)]


def test_a_write_that_fails_is_warned_of_once_and_tried_again_later(cache, monkeypatch, caplog):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(files, "_write_fully", fail)
        assert not any(put_unit(cache, GROUP, number) for number in range(20))
    assert [record.message for record in caplog.records] == [
        f"{cache.directory.path}: cannot be written: No space left on device; going on without caching"
    ]
    assert disk_bytes(cache) == 0
    admitted = [number for number in range(100) if put_unit(cache, GROUP, number)]
    assert admitted
    assert admitted == held_units(cache, GROUP)
    # Nothing of what failed is counted.
    more = Cache(cache.directory.path, (len(admitted) + 1) * UNIT_ON_DISK)
    assert [put_unit(more, GROUP, number) for number in (100, 101)] == [True, False]


def test_an_interrupted_write_leaves_nothing(cache, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(files, "_write_fully", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put_unit(cache, GROUP, 0)
    assert disk_bytes(cache) == 0
    assert put_unit(cache, GROUP, 0)
