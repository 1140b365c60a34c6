"""Taking turns: of all processes and threads that need the same bytes at once, one fetches them.

There are 256 lock files, and who fetches locks the one that the bytes' name hashes to. Two different fetches may meet
at one file, and should not wait for each other. So the holder writes the hash into the file, where it stays, and
whoever reads another one there fetches without a lock. All that can go wrong is that something is fetched twice.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from headrace.store.cache.locks import LockFile, pauses

LONGEST_WAIT_SECONDS = 60.0
"""After this time the other one is not waited for any longer: it may be stopped, or its network stuck."""


@contextlib.contextmanager
def turn(locks: Path, name: str) -> Iterator[bool]:
    """True if it is our turn to fetch; False if somebody else has just fetched the same thing."""
    digest = xxhash.xxh3_64_digest(name.encode())
    try:
        file = LockFile(locks / f"{digest[0]:02x}")
    except OSError:
        # There are no descriptors left, or the file is not ours to open.
        yield True
        return
    with file:
        if _fetched_by_another(file, digest):
            file.close()
            yield False
        else:
            yield True


def _fetched_by_another(file: LockFile, digest: bytes) -> bool:
    """Wait while somebody else fetches the same thing. If nobody does, the file is locked for us, or somebody else has
    locked it for something else."""
    waited = False
    try:
        for _ in pauses(LONGEST_WAIT_SECONDS):
            if file.lock():
                _write(file, digest)
                return waited
            if os.pread(file.descriptor, len(digest), 0) != digest:
                break
            waited = True
    except OSError:
        pass
    # We go on without the lock, and must not write into a file that somebody else has locked.
    file.close()
    return False


def _write(file: LockFile, digest: bytes) -> None:
    # On a full disk the file may stay empty: then others do not wait for us, and may fetch the same.
    with contextlib.suppress(OSError):
        if file.descriptor >= 0:
            os.pwrite(file.descriptor, digest, 0)
