"""Files as memory: read-only maps of data, and memory that processes share."""

import ctypes
import functools
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StorageError
from headrace.store.files import opened, read_stretch


def read_bytes(path: Path) -> NDArray[np.uint8]:
    """A whole file in RAM, read-only."""
    content, _ = read_stretch(path, 0, None)
    return np.frombuffer(content, dtype=np.uint8)


def map_bytes(path: Path) -> NDArray[np.uint8]:
    """A whole file as a read-only memory map, which exists as long as any view of it.

    Python's `mmap.mmap` keeps a file descriptor open for each map (until 3.13), and a thousand shards
    would reach the usual limit of 1,024 open files. A map needs no descriptor, so we call mmap(2)
    directly and close the file at once.
    """
    with opened(path) as (descriptor, count):
        if count == 0:
            return sealed(np.empty(0, dtype=np.uint8))
        try:
            return map_open_file(descriptor, count)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be memory-mapped: {error.strerror}; open it with in_memory=True"
            ) from error


def map_open_file(descriptor: int, count: int) -> NDArray[np.uint8]:
    """The first `count` bytes of an open file, at least one, as a read-only memory map; the file may be closed."""
    if sys.platform == "win32":
        return np.frombuffer(mmap.mmap(descriptor, count, access=mmap.ACCESS_READ), dtype=np.uint8)
    memory = _map(descriptor, count, mmap.PROT_READ, mmap.MAP_SHARED)
    return np.frombuffer(memoryview(memory).toreadonly(), dtype=np.uint8)


def map_memory(descriptor: int, count: int, *, private: bool = False) -> Any:
    """An open file as writable memory, which exists as long as any view of it; the descriptor may be closed.

    Everything written is visible to all processes that map the file, and all pages are mapped at once, which is cheaper
    than one page fault for each. With `private`, nobody else sees what is written, and pages are mapped on access.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return _map(descriptor, count, mmap.PROT_READ | mmap.PROT_WRITE, flags)


def _map(descriptor: int, count: int, protection: int, flags: int) -> Any:
    libc = _libc()
    address = libc.mmap(None, count, protection, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * count).from_address(address)
    _maps[address] = memory
    # At interpreter exit, daemon threads may still use views, so unmapping is left to the kernel.
    weakref.finalize(memory, libc.munmap, address, count).atexit = False
    return memory


_maps: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""All current maps, by address."""


def expect_random_reads(array: NDArray[Any]) -> None:
    """Tell the kernel that a view of a map is read randomly; otherwise each read may load megabytes."""
    root: Any = array
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    memory = root.obj if isinstance(root, memoryview) else None
    if not isinstance(memory, ctypes.Array) or _maps.get(ctypes.addressof(memory)) is not memory:
        return
    if not array.nbytes or not hasattr(mmap, "MADV_RANDOM"):
        return
    address = array.ctypes.data
    first = address - address % mmap.PAGESIZE
    _libc().madvise(first, address + array.nbytes - first, mmap.MADV_RANDOM)


def sealed(content: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be made writeable again (the flag of an array can simply be set back)."""
    return np.asarray(content.data.toreadonly())


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *numbers]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
