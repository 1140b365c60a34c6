"""Eight processes share a small cache and are killed at random: a program for tests.

    python -m tests.store.cache_killing DIRECTORY KILLS SEED

Each process reads units in random order: from the cache, or made anew and put there. It keeps some maps for a while,
and looks at them again before it lets go. Each unit that was right is a byte in a pipe, so that the kills come after so
many units, and not after some time. The program looks at the directory after every kill, and at everything at the end.
"""

import contextlib
import faulthandler
import os
import random
import signal
import sys
import traceback
from pathlib import Path

from headrace.store.cache import Cache
from headrace.store.cache.admission import count_bytes, locked_size
from headrace.store.cache.locks import LockFile
from headrace.store.cache.upkeep import check, clear, contents
from tests.store.cache_samples import GROUPS, disk_bytes, unit_content, unit_key

PROCESSES = 8
UNIT = 20_000
UNITS_PER_GROUP = 16
DATASETS = {"first": GROUPS[:4], "second": GROUPS[4:8]}
LIMIT = len(DATASETS["first"]) * UNITS_PER_GROUP * UNIT // 4
"""A quarter of one dataset; both want it."""
UNITS_BETWEEN_KILLS = 40


def read_units(directory: Path, dataset: str, seed: int, done: int) -> None:
    """Read until killed."""
    cache = Cache(directory, LIMIT)
    cache.for_dataset(dataset, DATASETS[dataset])
    chosen = random.Random(seed)
    kept = []
    while True:
        group, number = chosen.choice(DATASETS[dataset]), chosen.randrange(UNITS_PER_GROUP)
        content = unit_content(group, number, UNIT)
        kept.append((read_unit(cache, group, number, content), content))
        if len(kept) > 20:
            mapped, expected = kept.pop(chosen.randrange(20))
            if bytes(mapped) != expected:
                raise ValueError(f"unit {number} of {group} is wrong")
            os.write(done, b".")


def read_unit(cache: Cache, group: str, number: int, content: bytes):
    key = unit_key(number, UNIT)
    mapped = cache.get(group, key, UNIT)
    if mapped is not None:
        return mapped
    with cache.fetching(group, key) as ours:
        mapped = None if ours else cache.get(group, key, UNIT)
        if mapped is None:
            mapped = cache.put(group, key, content)
        return content if mapped is None else mapped


class Crowd:
    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.units, self._done = os.pipe()
        self.children: list[int] = []

    def start(self) -> None:
        dataset, seed = self.random.choice([*DATASETS]), self.random.random()
        child = os.fork()
        if child:
            self.children.append(child)
            return
        try:
            read_units(self.directory, dataset, hash(seed), self._done)
        except BaseException:
            traceback.print_exc()
            os.write(self._done, b"!")
        finally:
            os._exit(1)

    def wait_for_units(self, count: int) -> None:
        while count > 0:
            done = os.read(self.units, count)
            if b"!" in done:
                sys.exit("a process has failed")
            count -= len(done)

    def kill_one(self) -> None:
        child = self.children.pop(self.random.randrange(len(self.children)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"a process had ended by itself: {os.waitstatus_to_exitcode(status)}")


def main(directory: Path, kills: int, seed: int) -> None:
    faulthandler.enable()
    looking = Cache(directory, LIMIT)
    foreign = put_foreign_files(looking)
    foreign_bytes = sum(map(len, foreign.values()))
    crowd = Crowd(directory, seed)
    try:
        for _ in range(PROCESSES):
            crowd.start()
        for kill in range(kills):
            crowd.wait_for_units(UNITS_BETWEEN_KILLS)
            crowd.kill_one()
            crowd.start()
            held = disk_bytes(looking) - foreign_bytes
            assert held <= LIMIT + PROCESSES * (UNIT + 64), f"{held} bytes are above the limit {LIMIT}"
            if kill % 10 == 5:
                clear(looking.directory)
    finally:
        while crowd.children:
            with contextlib.suppress(ProcessLookupError):
                crowd.kill_one()
    look_at_all(looking, foreign)


def put_foreign_files(cache: Cache) -> dict[Path, bytes]:
    folder = cache.directory.data / GROUPS[0]
    folder.mkdir()
    foreign = {folder / "notes.txt": b"mine", cache.directory.path / "mine": b"too", folder / "0-1-2": b"x"}
    for path, content in foreign.items():
        path.write_bytes(content)
    return foreign


def look_at_all(cache: Cache, foreign: dict[Path, bytes]) -> None:
    """Nothing is damaged, in use, locked or left over, and the cache can be used."""
    assert [each for each in check(cache.directory) if each.problem] == []
    assert {path: path.read_bytes() for path in foreign} == foreign
    assert [each.dataset_id for each in contents(cache.directory).datasets if each.in_use] == []
    for lock in cache.directory.locks.iterdir():
        with LockFile(lock) as file:
            assert file.lock(), f"{lock.name} is still locked"
    with locked_size(cache.directory, 60) as size:
        noted, counted = size.total_bytes, count_bytes(cache.directory)
    assert counted <= noted <= LIMIT + PROCESSES * (UNIT + 64)
    assert [*cache.directory.data.rglob(".tmp-*")] == []
    assert clear(cache.directory).kept == []
    assert cache.put(GROUPS[9], "0-4", b"1234") is not None
    print("kept", counted, "of", LIMIT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
