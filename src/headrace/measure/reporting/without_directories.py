"""A report without the directories of this machine, since pages are passed on to others.

/home/someone/data/books          ->  books
open '/home/someone/a b/x.bin'    ->  open x.bin
s3://bucket/books/part            stays as it is
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.measure.reporting.report import Point, Report

_NAME = r"[^\s/'\"<>:,;()]"
_PATH = re.compile(
    r"(?P<quote>['\"])/[^'\"\n]*/(?P<quoted>[^'\"/\n]*)(?P=quote)"
    rf"|(?:file://|(?<![\w.:/<]))/(?:{_NAME}+/)+(?P<last>{_NAME}*)"
)
"""An absolute path, either in quotes or without spaces."""


def without_directories(report: Report) -> Report:
    shortened = _Shortened(report.target)
    return dataclasses.replace(
        report,
        target=shortened.value(report.target),
        settings=shortened.value(report.settings),
        step=shortened.prose(report.step),
        environment=shortened.value(report.environment),
        notes=[shortened.prose(note) for note in report.notes],
        points=[shortened.point(point) for point in report.points],
    )


class _Shortened:
    """Each method returns its argument with the names of files in place of their paths."""

    def __init__(self, target: str) -> None:
        self._target = target

    def prose(self, said: str) -> str:
        # The target is known, so it is found even if its path contains spaces.
        if self._target.startswith("/"):
            said = said.replace(self._target, _last_name(self._target))
        return _PATH.sub(lambda found: found["quoted"] or found["last"] or "…", said)

    def value(self, found: Any) -> Any:
        if isinstance(found, Mapping):
            return {self.prose(str(key)): self.value(each) for key, each in found.items()}
        if isinstance(found, list | tuple):
            return [self.value(each) for each in found]
        if isinstance(found, str | Path):
            return self._text(str(found))
        return found

    def _text(self, found: str) -> str:
        return _last_name(found) if found.startswith("/") else self.prose(found)

    def point(self, point: Point) -> Point:
        return dataclasses.replace(
            point,
            settings=self.value(point.settings),
            errors=[self.prose(error) for error in point.errors],
            runs=[self._run(run) for run in point.runs],
        )

    def _run(self, run: Mapping[str, Any]) -> dict[str, Any]:
        return {**run, "notes": [self.prose(note) for note in run.get("notes") or ()]}


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or "/"
