"""Memory for the messages of Arrow Flight, which should stay with the process.

gRPC allocates memory for each message that it receives, and frees it. The allocator of glibc gives such memory back to
the system at once, and every page of the next message then costs a page fault: half of the time of a batch of 0.5 MB.
It keeps blocks of a size from the moment on at which the program has freed one of that size (mallopt(3), 'dynamic mmap
threshold'), as most training programs do with some array sooner or later.
"""

from functools import cache

import numpy as np

_BYTES = 31 * 2**20
"""The threshold does not follow blocks of more than 32 MB."""


@cache
def keep_freed_memory() -> None:
    """Let freed blocks of up to some megabytes stay with this process. It takes no memory itself."""
    np.empty(_BYTES, np.uint8)
