"""Whatever has happened to a state, loading it and going on either works or raises a StateError."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import StateError
from tests.streams import files

STREAMS = {
    "lines": lambda path: headrace.stream(path / "a.jsonl", block_bytes=200),
    "shuffled": lambda path: headrace.stream(path / "a.jsonl", seed=1, buffer=5, block_bytes=200),
    "packed": lambda path: (
        headrace.stream(path / "a.jsonl", seed=1).tokenize("bytes").pack(20, buffer=3).batch(2)
    ),
    "windows": lambda path: headrace.stream(path / "a.jsonl").tokenize("bytes").pack(20, packing="windows"),
    "repeated": lambda path: headrace.stream(path / "a.jsonl", repeat=True, seed=1).tokenize("bytes"),
}
NEW = st.one_of(
    st.none(),
    st.integers(-2, 40),
    st.sampled_from(
        [10**6, 2**63, 10**30, -(2**70), 1.5, True, "1", [], {}, [1], [0, 0], [0, 0, 0], [[0, 0], 0]]
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged")
    files.write_jsonl(path / "a.jsonl", 12)
    return path


def places_in(value: Any) -> list[tuple[Any, ...]]:
    """The ways to every part of a nested list."""
    found: list[tuple[Any, ...]] = [()]
    if isinstance(value, list):
        found += [(number, *way) for number, part in enumerate(value) for way in places_in(part)]
    return found


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    other = copy.deepcopy(value)
    other[way[0]] = replaced(value[way[0]], way[1:], new)
    return other


@pytest.mark.parametrize("name", STREAMS)
@given(
    steps=st.integers(0, 8),
    choose=st.integers(0, 1000),
    new=NEW,
    part=st.sampled_from(["place", "place", "epoch", "consumer"]),
)
def test_a_damaged_state_works_or_is_refused(folder, name, steps, choose, new, part):
    stream = STREAMS[name](folder)
    items = iter(stream)
    for _ in range(steps):
        next(items, None)
    state = json.loads(json.dumps(stream.state_dict()))
    ways = places_in(state[part])
    state[part] = replaced(state[part], ways[choose % len(ways)], new)
    resumed = STREAMS[name](folder)
    try:
        resumed.load_state_dict(state)
        for _, _item in zip(range(30), resumed, strict=False):
            pass
    except StateError as error:
        assert "state" in str(error)  # both outcomes are right


@pytest.mark.parametrize(
    "place", [[0, [999, 0, 0]], [0, [0, 0]], [1, [0, 0, 0]], [0, [0, -1, 0]], [0, [0, 0, "x"]], "x", 5, [0]]
)
def test_a_place_that_does_not_exist_is_refused(folder: Path, place: Any) -> None:
    stream = headrace.stream(folder / "a.jsonl")
    stream.load_state_dict(stream.state_dict() | {"place": place, "consumer": [0, 1]})
    with pytest.raises(StateError, match="the state is damaged"):
        list(stream)
