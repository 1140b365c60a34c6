"""Errors of a user's call: short, and next to the user's own line."""

import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import HeadraceError, SettingsError

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


MISSPELT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "build": (lambda path: headrace.build(path, path, tokeniser="bytes"), "did you mean tokenizer?"),  # type: ignore[call-arg]
    "build, as the command": (
        lambda path: headrace.build(path, path, shard_size=1),  # type: ignore[call-arg]
        "did you mean shard_bytes?",
    ),
    "open": (lambda path: headrace.open(path, in_memry=True), "did you mean in_memory?"),  # type: ignore[call-arg]
    "stream": (lambda path: headrace.stream(__file__, shufle=True), "did you mean shuffle?"),  # type: ignore[call-arg]
    "stream, ranks": (lambda path: headrace.stream(__file__, world_sise=2), "did you mean world_size?"),  # type: ignore[call-arg]
    "Shuffle": (lambda path: headrace.Shuffle(kind="block", blocks=4), "did you mean block?"),  # type: ignore[call-arg]
    "nothing near": (
        lambda path: headrace.open(path, zzz=1),
        "open() got an unexpected keyword argument 'zzz'",
    ),  # type: ignore[call-arg]
}


@pytest.mark.parametrize(("call", "said"), MISSPELT.values(), ids=MISSPELT)
def test_a_misspelt_argument_gets_a_suggestion(
    call: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        call(tmp_path)


def test_a_type_error_of_the_users_own_code_stays_as_it_is() -> None:
    class Broken:
        def __len__(self) -> int:
            raise TypeError("the user's own")

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(TypeError, match="^the user's own$"):
        headrace.Loader(Broken(), batch_size=1)


@pytest.mark.parametrize(
    "mistake",
    [lambda path: headrace.build(3, path), lambda path: headrace.stream([3]), lambda path: headrace.open(3)],  # type: ignore[arg-type, list-item]
)
def test_inputs_of_a_wrong_type_are_refused_in_words(mistake: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"=\[?3\]?: must be a path"):
        mistake(tmp_path)


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("laoder", "did you mean Loader?"),
        ("DataLoader", "did you mean headrace.torch.DataLoader?"),
        ("opne", "did you mean open?"),
        ("zzz", "module 'headrace' has no attribute 'zzz'"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(said) + "$"):
        getattr(headrace, name)
