"""Records that are left out: counted, logged with their place, and too many of them are an error."""

import logging

from headrace.readers.bad_records import too_many_bad

_log = logging.getLogger(__name__)


class StreamBadRecords:
    """Counts those of one consumer in one epoch; what was found in files apart from what was found in texts, since
    each is counted again from another place when a stream is resumed."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.in_files = 0
        self.in_texts = 0

    def forget(self) -> None:
        """Another epoch begins."""
        self.in_files = self.in_texts = 0

    def report_in_file(self, path: str, where: str, reason: str) -> None:
        self.in_files += 1
        self._check(f"{path}, {where}", reason)

    def report_text(self, record: str, reason: str) -> None:
        self.in_texts += 1
        self._check(record, reason)

    def _check(self, where: str, reason: str) -> None:
        count = self.in_files + self.in_texts
        if count > self._allowed:
            remedy = "leave such records out with max_bad_records=N"
            raise too_many_bad(count, self._allowed, f"{where}: {reason}", remedy)
        _log.warning("bad record left out (%d of at most %d): %s: %s", count, self._allowed, where, reason)
