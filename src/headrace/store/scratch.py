"""A temporary local directory that is made when it is first needed and removed with its owner."""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any


class Scratch:
    def __init__(self) -> None:
        self._removal: weakref.finalize[Any, Any] | None = None
        self._path: Path | None = None

    def path(self) -> Path:
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix="headrace-"))
            self._removal = weakref.finalize(self, shutil.rmtree, self._path, ignore_errors=True)
        return self._path

    def remove(self) -> None:
        if self._removal is not None:
            self._removal()
        self._path = self._removal = None
