"""Eight Loaders that share a cache of a quarter of the data, and are killed at random moments."""

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.store.cache import Cache
from headrace.store.cache.upkeep import check, contents
from tests.load.remote_data import UNIT_BYTES, put, write_local

PROCESSES = 8
BATCHES_BETWEEN_KILLS = 25
SETTINGS = {"seq_len": 512, "batch_size": 4, "shuffle": "units", "pack_within": "units", "seed": 3}

READER = """
import hashlib, os, sys
import headrace
place, cache, cache_bytes, start, done = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
dataset = headrace.open(place, cache=cache, cache_bytes=cache_bytes)
loader = headrace.Loader(dataset, seq_len=512, batch_size=4, shuffle="units", pack_within="units", seed=3, epochs=100)
state = loader.state_dict()
state["position"] = 4 * start
loader.load_state_dict(state)
for step, batch in enumerate(loader, start):
    digest = hashlib.sha256(batch.tokens.tobytes() + batch.segment_ids.tobytes()).hexdigest()[:16]
    os.write(done, f"{step} {digest}\\n".encode())
"""


class Readers:
    def __init__(self, place: str, cache: Path, cache_bytes: int, steps: int, seed: int) -> None:
        self._place, self._cache, self._cache_bytes, self._steps = place, cache, cache_bytes, steps
        self._random = random.Random(seed)
        self._lines, self._done = os.pipe()
        self._unfinished = b""
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        start = self._random.randrange(self._steps)
        command = [sys.executable, "-X", "faulthandler", "-c", READER, self._place, str(self._cache)]
        command += [str(self._cache_bytes), str(start), str(self._done)]
        self.running.append(subprocess.Popen(command, pass_fds=[self._done]))

    def batches(self, count: int) -> list[tuple[int, str]]:
        """Wait for so many batches, of any of them."""
        found: list[tuple[int, str]] = []
        while len(found) < count:
            *lines, self._unfinished = (self._unfinished + os.read(self._lines, 1 << 16)).split(b"\n")
            found += [(int(line.split()[0]), line.split()[1].decode()) for line in lines]
            assert [each.poll() for each in self.running] == [None] * len(self.running)
        return found

    def kill_one(self) -> None:
        killed = self.running.pop(self._random.randrange(len(self.running)))
        killed.kill()
        assert killed.wait() == -signal.SIGKILL


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=pytest.mark.soak)])
def test_killed_loaders_that_share_a_cache(kills: int, s3_place: str, tmp_path: Path) -> None:
    local = write_local(tmp_path / "data", 400)
    remote = put(local, s3_place)
    data_bytes = sum(path.stat().st_size for path in local.iterdir())
    cache_bytes, cache = data_bytes // 4, tmp_path / "cache"
    expected, steps = batches_of(local)
    Cache(cache, cache_bytes)
    (cache / "mine.txt").write_text("not of the cache")
    readers = Readers(remote, cache, cache_bytes, steps, seed=kills)
    count = PROCESSES if kills > 10 else 3
    try:
        for _ in range(count):
            readers.start()
        for _ in range(kills):
            for step, digest in readers.batches(BATCHES_BETWEEN_KILLS):
                assert digest == expected[step]
            readers.kill_one()
            assert held_bytes(cache) <= cache_bytes + count * 2 * UNIT_BYTES
            readers.start()
    finally:
        while readers.running:
            readers.kill_one()
    opened = Cache(cache, cache_bytes)
    assert [each for each in check(opened.directory) if each.problem] == []
    assert [each for each in contents(opened.directory).datasets if each.in_use] == []
    assert (cache / "mine.txt").read_text() == "not of the cache"
    # What is left can be used at once: no lock is held by the dead.
    again = headrace.Loader(headrace.open(remote, cache=cache, cache_bytes=cache_bytes), **SETTINGS)
    assert digest_of(next(iter(again))) == expected[0]


def batches_of(local: Path) -> tuple[list[str], int]:
    """The digests of all batches that a reader may come to, and how many there are in an epoch."""
    steps = len(headrace.Loader(local, **SETTINGS))
    return [digest_of(batch) for batch in headrace.Loader(local, **SETTINGS, epochs=100)], steps


def digest_of(batch: headrace.Batch) -> str:
    return hashlib.sha256(batch.tokens.tobytes() + batch.segment_ids.tobytes()).hexdigest()[:16]


def held_bytes(cache: Path) -> int:
    sizes = []
    for path in (cache / "data").rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:
            continue
    return sum(sizes)
