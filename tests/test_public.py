"""Errors of a user's call: short, and next to the user's own line."""

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import HeadraceError

DATA = headrace.from_arrays({"x": np.zeros(8)})
MISTAKES: dict[str, Callable[[Path], Any]] = {
    "Loader": lambda path: headrace.Loader(DATA, batch_size=0),
    "Loader of nothing": lambda path: headrace.Loader(path / "nothing", batch_size=2),
    "open": lambda path: headrace.open(path / "nothing"),
    "build": lambda path: headrace.build([], path / "out", split="word"),
    "mix": lambda path: headrace.mix({}),
    "stream": lambda path: headrace.stream(path, split="word"),
    "from_arrays": lambda path: headrace.from_arrays({}),
    "Writer": lambda path: headrace.Writer(path, fields={"x": "float33"}),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_one_frame_after_the_users_line(
    mistake: Callable[[Path], Any], tmp_path: Path
) -> None:
    with pytest.raises(HeadraceError) as caught:
        mistake(tmp_path)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames == ["test_a_mistake_ends_one_frame_after_the_users_line", "<lambda>", "called"]


@pytest.mark.parametrize(
    "function", [headrace.Loader, headrace.build, headrace.open, headrace.mix, headrace.stream]
)
def test_help_shows_every_argument(function: Any) -> None:
    described = inspect.getdoc(function) or ""
    listed = described.split("Args:")[1]
    names = [
        name for name in inspect.signature(function).parameters if name not in ("self", "options", "world")
    ]
    missing = [
        name
        for name in names
        if f"{name}:" not in listed and f"{name}," not in listed and f", {name}" not in listed
    ]
    assert not missing
