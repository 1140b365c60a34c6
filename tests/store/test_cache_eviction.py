"""What makes room for what: datasets that nobody uses, the one that was opened longest ago first."""

import os
import pickle
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.store.cache import Cache, datasets
from headrace.store.cache.datasets import read_notes, without_secrets
from headrace.store.cache.upkeep import clear, contents
from tests.properties import examples
from tests.store.cache_samples import (
    GROUPS,
    UNIT_ON_DISK,
    disk_bytes,
    files_below,
    has_unit,
    held_units,
    put_unit,
    unit_key,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def used_before(directory, dataset_id, groups, units, seconds, limit=10**9):
    """A dataset that a process has used and closed, at this time."""
    cache = Cache(directory, limit)
    cache.for_dataset(dataset_id, groups)
    for group in groups:
        for number in range(units):
            put_unit(cache, group, number)
    os.utime(cache.directory.datasets / dataset_id, (seconds, seconds))


def in_use(cache):
    return {each.dataset_id for each in contents(cache.directory).datasets if each.in_use}


def test_the_dataset_that_was_opened_longest_ago_goes_first(tmp_path):
    for dataset_id, group, seconds in (("b", 1, 2000), ("a", 0, 1000), ("c", 2, 3000)):
        used_before(tmp_path, dataset_id, [GROUPS[group]], 4, seconds)
    cache = Cache(tmp_path, 12 * UNIT_ON_DISK)
    cache.for_dataset("new", [GROUPS[3]])
    held = []
    for number in range(12):
        assert put_unit(cache, GROUPS[3], number)
        assert disk_bytes(cache) <= 12 * UNIT_ON_DISK
        held.append([len(held_units(cache, group)) for group in GROUPS[:3]])
    assert held[3::4] == [[0, 4, 4], [0, 0, 4], [0, 0, 0]]
    assert held_units(cache, GROUPS[3]) == [*range(12)]
    assert not put_unit(cache, GROUPS[3], 12)


def test_a_dataset_in_use_stays(tmp_path):
    user = Cache(tmp_path, 4 * UNIT_ON_DISK)
    user.for_dataset("used", [GROUPS[0]])
    for number in range(4):
        assert put_unit(user, GROUPS[0], number)
    other = Cache(tmp_path, 4 * UNIT_ON_DISK)
    other.for_dataset("other", [GROUPS[1]])
    assert not any(put_unit(other, GROUPS[1], number) for number in range(200))
    assert held_units(user, GROUPS[0]) == [0, 1, 2, 3]
    del user
    # It looks again after some refusals.
    assert any(put_unit(other, GROUPS[1], number) for number in range(200))


def test_a_forked_child_and_a_pickled_copy_use_the_dataset_too(tmp_path):
    cache = Cache(tmp_path, 10**6)
    cache.for_dataset("used", [GROUPS[0]])
    copy = pickle.loads(pickle.dumps(cache))
    looking = Cache(tmp_path, 10**6)
    begin, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(begun)
        os.read(begin, 1)
        os._exit(0)
    os.close(begin)
    del cache
    assert in_use(looking) == {"used"}
    del copy
    assert in_use(looking) == {"used"}
    os.close(begun)
    os.waitpid(child, 0)
    assert in_use(looking) == set()


def test_a_killed_process_uses_nothing(tmp_path):
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cache = Cache(tmp_path, 10**6)
            cache.for_dataset("killed", [GROUPS[0]])
            put_unit(cache, GROUPS[0], 0)
            os.write(begun, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.read(ready, 1)
    looking = Cache(tmp_path, 10**6)
    assert in_use(looking) == {"killed"}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert in_use(looking) == set()
    assert clear(looking.directory).freed_bytes == UNIT_ON_DISK
    os.close(ready)
    os.close(begun)


def test_a_file_of_two_datasets_goes_with_the_last(tmp_path):
    shared, only = GROUPS[0], GROUPS[1]
    used_before(tmp_path, "old", [shared, only], 2, 1000)
    used_before(tmp_path, "newer", [shared], 2, 2000)
    cache = Cache(tmp_path, 6 * UNIT_ON_DISK)
    cache.for_dataset("now", [GROUPS[2]])
    assert all(put_unit(cache, GROUPS[2], number) for number in range(4))
    assert (held_units(cache, shared), held_units(cache, only)) == ([0, 1], [])
    assert all(put_unit(cache, GROUPS[2], number) for number in range(6))
    assert held_units(cache, shared) == []


def test_files_of_no_dataset_go_first(tmp_path):
    used_before(tmp_path, "old", [GROUPS[0]], 2, 1000)
    assert put_unit(Cache(tmp_path, 10**9), GROUPS[1], 0)
    cache = Cache(tmp_path, 3 * UNIT_ON_DISK)
    cache.for_dataset("now", [GROUPS[2]])
    assert put_unit(cache, GROUPS[2], 0)
    assert (held_units(cache, GROUPS[0]), held_units(cache, GROUPS[1])) == ([0, 1], [])


def test_eviction_leaves_foreign_files_and_readers_alone(tmp_path):
    used_before(tmp_path, "old", [GROUPS[0]], 2, 1000)
    cache = Cache(tmp_path, 2 * UNIT_ON_DISK)
    foreign = cache.directory.data / GROUPS[0] / "notes.txt"
    foreign.write_text("mine")
    mapped = cache.get(GROUPS[0], unit_key(0), 1000)
    before = mapped.tobytes()
    cache.for_dataset("now", [GROUPS[1]])
    assert all(put_unit(cache, GROUPS[1], number) for number in range(2))
    assert files_below(cache.directory.data / GROUPS[0]) == {"notes.txt": b"mine"}
    assert mapped.tobytes() == before


def test_a_dataset_can_be_registered_again_after_its_eviction(tmp_path):
    used_before(tmp_path, "a", [GROUPS[0]], 2, 1000)
    used_before(tmp_path, "b", [GROUPS[1]], 2, 2000, limit=2 * UNIT_ON_DISK)
    cache = Cache(tmp_path, 2 * UNIT_ON_DISK)
    cache.for_dataset("a", [GROUPS[0]], "s3://bucket/a")
    assert all(put_unit(cache, GROUPS[0], number) for number in range(2))
    assert held_units(cache, GROUPS[1]) == []


def test_a_dataset_that_is_removed_while_it_is_opened_is_noted_again(tmp_path, monkeypatch):
    used_before(tmp_path, "a", [GROUPS[0]], 1, 1000)
    cache = Cache(tmp_path, 10**6)
    lock_file = datasets.flocked

    def remove_and_lock(*arguments, **options):
        monkeypatch.setattr(datasets, "flocked", lock_file)
        (tmp_path / "datasets" / "a").unlink()
        return lock_file(*arguments, **options)

    monkeypatch.setattr(datasets, "flocked", remove_and_lock)
    cache.for_dataset("a", [GROUPS[0]])
    assert in_use(cache) == {"a"}


def test_a_note_that_is_damaged_is_written_again(tmp_path):
    used_before(tmp_path, "a", [GROUPS[0]], 1, 1000)
    (tmp_path / "datasets" / "a").write_bytes(b'{"description"')
    cache = Cache(tmp_path, 10**6)
    assert [note.groups for note in read_notes(cache.directory)] == [()]
    cache.for_dataset("a", [GROUPS[0]], "s3://bucket/a")
    (note,) = read_notes(cache.directory)
    assert (note.groups, note.description) == ((GROUPS[0],), "s3://bucket/a")


@pytest.mark.parametrize("dataset_id", ["", "../x", "a/b", ".hidden", "x" * 101])
def test_an_id_must_be_a_plain_name(tmp_path, dataset_id):
    with pytest.raises(SettingsError, match="letters, digits"):
        Cache(tmp_path, 1).for_dataset(dataset_id, [])


def test_addresses_are_noted_without_secrets(tmp_path):
    cache = Cache(tmp_path, 1)
    cache.for_dataset("a", [], "https://user:geheim@host:9000/bucket/data?X-Amz-Signature=geheim#geheim")
    assert read_notes(cache.directory)[0].description == "https://host:9000/bucket/data"
    assert not any(b"geheim" in content for content in files_below(tmp_path).values())
    assert without_secrets("/data/with@sign?and more") == "/data/with@sign?and more"
    assert without_secrets("https://[geheim/x") == ""


@pytest.mark.parametrize("share", [0.25, 0.5, 0.83])
def test_from_the_second_epoch_on_hits_are_as_many_as_can_be(tmp_path, share):
    units = 100
    limit = int(share * units * UNIT_ON_DISK)
    caches = [Cache(tmp_path, limit) for _ in range(2)]
    for cache in caches:
        cache.for_dataset("data", [GROUPS[0]])
    random = np.random.default_rng(3)
    for epoch in range(3):
        hits = 0
        for place, number in enumerate(random.permutation(units)):
            cache = caches[place % 2]
            if has_unit(cache, GROUPS[0], int(number)):
                hits += 1
            else:
                put_unit(cache, GROUPS[0], int(number))
        assert epoch == 0 or hits / units >= share - 0.02
        assert disk_bytes(caches[0]) <= limit


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 1), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("lose"), st.integers(0, 1), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("restart"), st.integers(0, 1), st.integers(1, 8), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@examples(25)
@given(steps=STEPS)
def test_it_behaves_as_a_dictionary_that_may_refuse(tmp_path_factory, steps):
    """Two processes, each with a dataset of three groups of its own, against a plain dictionary."""
    path = tmp_path_factory.mktemp("cache")
    datasets = [GROUPS[:3], GROUPS[3:6]]
    limit = 8 * UNIT_ON_DISK

    def start(number):
        cache = Cache(path, limit)
        cache.for_dataset(f"data-{number}", datasets[number])
        return cache

    caches = [start(0), start(1)]
    held = set()
    for name, who, group, unit in steps:
        group = datasets[who][group % 3]
        if name == "put":
            fits = (group, unit) in held or len(held) < 8
            assert put_unit(caches[who], group, unit) == fits
            held |= {(group, unit)} if fits else set()
        elif name == "lose" and (group, unit) in held:
            # By damage that is found at once.
            with open(caches[who].directory.file(group, unit_key(unit)), "ab") as file:
                file.write(b"more")
            assert not has_unit(caches[1 - who], group, unit)
            held.remove((group, unit))
        elif name == "restart":
            caches[who] = start(who)
        elif name == "clear":
            # Everything is in use.
            assert clear(caches[0].directory).freed_bytes == 0
        found = {
            (each, number)
            for each in GROUPS[:6]
            for number in range(4)
            if has_unit(caches[who], each, number)
        }
        assert found == held
        assert disk_bytes(caches[0]) == len(held) * UNIT_ON_DISK
