"""What a build has finished so far: one JSON line a task, flushed to the disk before the next is begun.

A build that is cut off leaves the journal and whole shards; the same command reads the journal and goes on. A
last line cut in half is no line.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._repair()
        self._file = open(path, "ab")  # noqa: SIM115  (closed by close)

    def append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _repair(self) -> None:
        """Cut off a half-written last line, so that the next one does not become a part of it."""
        if self._path.exists():
            content = self._path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole != len(content):
                os.truncate(self._path, whole)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry
