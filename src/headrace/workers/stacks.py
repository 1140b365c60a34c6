"""What threads are doing, for errors that say why a batch does not arrive."""

import gc
import sys
import threading
import traceback
from collections.abc import Iterable
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """The frame that each thread is in.

    Python before 3.11.9 and 3.12.3 may hang here forever, with all its threads, if the garbage collector happens to run
    inside (python/cpython#106883), so it is disabled meanwhile.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collecting:
            gc.enable()


def stacks_of(threads: Iterable[threading.Thread]) -> str:
    """The stacks of the threads that are alive, formatted like tracebacks."""
    frames = current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )
