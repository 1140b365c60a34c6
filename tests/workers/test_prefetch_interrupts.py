"""Ctrl-C while a prefetched result is waited for."""

import sys
import threading
from typing import Any

from headrace.workers.prefetch import Prefetch
from tests.workers.waiting import PATIENCE_SECONDS


class _CtrlCAtLine:
    """Raises KeyboardInterrupt before the n-th line of waiting that this thread runs inside, if there are so many."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        waits = frame.f_code.co_filename == threading.__file__ or frame.f_code.co_name == "wait"
        if event == "line" and waits:
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def test_ctrl_c_at_any_line_of_a_wait_is_ctrl_c() -> None:
    """And no other error, such as that of a lock that is not held any more."""
    line, interrupted = 0, True
    while interrupted:
        line += 1
        may_go_on = threading.Event()

        def make(number: int, may_go_on: threading.Event = may_go_on) -> int:
            may_go_on.wait(PATIENCE_SECONDS)
            return number

        results = Prefetch(make, count=3, depth=2, threads=1, timeout_seconds=PATIENCE_SECONDS, stage="test")
        # It comes while the loop waits, unless Ctrl-C comes before.
        coming = threading.Timer(0.005, may_go_on.set)
        coming.start()
        interrupted = False
        try:
            with _CtrlCAtLine(line):
                next(results)
        except KeyboardInterrupt:
            interrupted = True
        coming.join()
        results.close()
    assert line > 1
