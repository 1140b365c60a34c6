"""Records that are left out: they are counted and logged with their place, and too many of them are an error."""

import logging

from headrace.readers.bad_records import too_many_bad

_log = logging.getLogger(__name__)
_REMEDY = "Correct the input, or leave such records out with max_bad_records=N"


class StreamBadRecords:
    """Counts the bad records of one consumer in one epoch. Those found in files and those found in texts are counted
    separately, because a resumed stream counts each of them again from a different place."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.in_files = 0
        self.in_texts = 0

    def forget(self) -> None:
        """Start again from zero, for another epoch."""
        self.in_files = self.in_texts = 0

    def report_in_file(self, path: str, where: str, reason: str) -> None:
        self.in_files += 1
        self._check(f"{path}, {where}", reason)

    def report_text(self, record: str, reason: str, remedy: str = _REMEDY) -> None:
        self.in_texts += 1
        self._check(record, reason, remedy)

    def _check(self, where: str, reason: str, remedy: str = _REMEDY) -> None:
        count = self.in_files + self.in_texts
        if count > self._allowed:
            raise too_many_bad(count, self._allowed, f"{where}: {reason}", remedy)
        _log.warning("left out a bad record (%d of at most %d): %s: %s", count, self._allowed, where, reason)
