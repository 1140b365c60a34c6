"""Ctrl-C at a chosen moment."""

import dis
import sys
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any
from weakref import finalize


class CtrlCAt:
    """Ctrl-C at the n-th moment inside at which Python would notice it: when a function begins, when a loop goes on,
    and when a call of what is not Python has returned, with its result still in nobody's hands. Elsewhere it never
    comes: an exception between any two instructions may leave Python itself in disorder. Nor does it come while
    multiprocessing closes the pipes of a process that has ended: it counts as done when it begins, so what is left open
    then is Python's to lose; nor while garbage is collected, where Python ignores it. Without a number, it only
    counts these moments.

    `within` is a folder: moments elsewhere do not count."""

    _NOTICED_BEFORE = ("RESUME", "JUMP_BACKWARD")
    _NOTICED_AFTER = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")

    def __init__(self, place: int | None = None, within: str = "") -> None:
        self._place, self._within, self.passed = place, within, 0
        self._latest: tuple[FrameType | None, str] = (None, "")

    def __enter__(self) -> "CtrlCAt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)
        self._latest = (None, "")

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "exception":
            # After a call that raises, Python does not look for Ctrl-C; one that came there would leave the exception
            # as "being handled" for ever, and it would turn up as the context of later ones.
            self._latest = (None, "")
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            called = self._latest[0] is frame and self._latest[1] in self._NOTICED_AFTER
            self._latest = (frame, name)
            is_noticed = called or name in self._NOTICED_BEFORE
            if is_noticed and self._counts(frame) and not _is_lost(frame):
                self.passed += 1
                if self.passed == self._place:
                    raise KeyboardInterrupt
        return self._trace

    def _counts(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._within)


def _is_lost(frame: FrameType | None) -> bool:
    while frame is not None:
        is_garbage = frame.f_code is finalize.__call__.__code__ and frame.f_locals["_"] is not None
        if is_garbage or frame.f_code is Finalize.__call__.__code__:
            return True
        frame = frame.f_back
    return False
