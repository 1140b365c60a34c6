"""What a process needs before it uses Arrow Flight: an allocator that keeps freed memory, and no lines from gRPC.

gRPC allocates memory for each message that it receives, and frees it. The allocator of glibc gives such memory back to
the system at once, and every page of the next message then costs a page fault: half of the time of a batch of 0.5 MB.
It keeps blocks of a size from the moment on at which the program has freed one of that size (mallopt(3), 'dynamic mmap
threshold'), as most training programs do with some array sooner or later.
"""

import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from functools import cache

import numpy as np

from headrace.errors import MissingExtraError, how_to_install

_BYTES = 31 * 2**20
"""The threshold does not follow blocks of more than 32 MB."""
_VERBOSITY = "GRPC_VERBOSITY"
_lock = threading.Lock()


def missing_flight(error: ImportError) -> MissingExtraError:
    """Why Arrow Flight cannot be imported, and what to do about it."""
    is_part_missing = importlib.util.find_spec("pyarrow") is not None
    reason = f"cannot be imported ({error})" if is_part_missing else "is not installed: it is part of pyarrow"
    return MissingExtraError(
        f"addresses with grpc:// need Arrow Flight, which {reason}; {how_to_install('serve')}"
    )


@cache
def keep_freed_memory() -> None:
    """Let freed blocks of up to some megabytes stay with this process. It takes no memory itself."""
    np.empty(_BYTES, np.uint8)


@contextlib.contextmanager
def starting_flight() -> Iterator[None]:
    """Clients and servers of Arrow Flight are made in this context.

    gRPC would write lines of its own about every connection that fails, and errors say the same. It reads the variable
    when it starts, so child processes need not inherit it.
    """
    keep_freed_memory()
    with _lock:
        is_chosen = _VERBOSITY in os.environ
        if not is_chosen:
            os.environ[_VERBOSITY] = "NONE"
        try:
            yield
        finally:
            if not is_chosen:
                del os.environ[_VERBOSITY]
