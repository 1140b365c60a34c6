"""The compiled loops, for tests of them."""

import importlib
import shutil
from typing import Any

import pytest


def compiled_kernel() -> Any:
    """The compiled module. The tests of it are skipped only where nothing could have compiled it."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        return pytest.importorskip("headrace.rows._kernel")
    return importlib.import_module("headrace.rows._kernel")
