"""A disk cache of bytes that came from far away, shared by all processes of a machine.

    <directory>/.headrace-cache             the mark that says: this directory is a cache
    <directory>/data/<group>/<key>          one immutable file for each stretch of bytes, checksum included (`files.py`)
    <directory>/datasets/<id>               which groups belong to a dataset, locked while it is in use (`datasets.py`)
    <directory>/locks/00 ... ff             who fetches what just now (`turns.py`)
    <directory>/size                        how much there is, at most; locked while that changes (`admission.py`)

The rules that keep it safe are few. A file gets its name only when it is complete, and is never changed after that,
so a reader needs no lock. Files go by `unlink` alone, and a map of one stays valid. All locks are the kernel's
(`flock`), so they end with their process, however that dies. Nobody waits for a lock without a limit: if in doubt,
bytes are fetched twice, or not cached. Files that the cache did not write are neither counted nor touched.

What is there stays: once the cache is full nothing more is admitted, because every epoch needs every byte equally
often, and making room would only push out what the next epoch needs. Only datasets that no process uses any more
make room for others, the one that was opened longest ago first.
"""

from headrace.store.cache.cache import Cache
from headrace.store.cache.defaults import open_cache

__all__ = ["Cache", "open_cache"]
