"""A view that is drawn again and again, beside the work that it shows."""

import logging
import threading
from collections.abc import Callable

_JOIN_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Repeating:
    """Calls `work` at regular intervals in its own thread while the context is open; stops if a call fails."""

    def __init__(self, work: Callable[[], None], seconds: float) -> None:
        self._work, self._seconds = work, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-monitor", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # Not forever: nobody can write to a terminal that was stopped with Ctrl-S.
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                self._work()
        except Exception:
            _log.warning("the view has failed and stopped; the work that it shows continues", exc_info=True)
