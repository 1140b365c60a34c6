"""Raw files for streams, and ways to look at what came of them."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import headrace
from headrace.streams.stream import Stream

MakeStream = Callable[[], Stream]
WORLDS = [1, 2, 3, 7]


def lines(count: int, prefix: str = "line") -> list[str]:
    """Texts of uneven lengths, no two of them the same."""
    return [f"{prefix} {number} " + "é" * (number * 7919 % 23) for number in range(count)]


def write_lines(path: Path, count: int, prefix: str = "line") -> list[str]:
    texts = lines(count, prefix)
    path.write_text("".join(text + "\n" for text in texts))
    return texts


def write_jsonl(path: Path, count: int, prefix: str = "line") -> list[dict[str, Any]]:
    records = [
        {"n": number, "text": text, "x": number / 4} for number, text in enumerate(lines(count, prefix))
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def write_parquet(path: Path, count: int, group: int = 10) -> list[dict[str, Any]]:
    records = [
        {"n": number, "text": text, "list": [number] * (number % 3)}
        for number, text in enumerate(lines(count))
    ]
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=group)
    return records


# What came


def shares(inputs: Any, world_size: int, **options: Any) -> list[list[Any]]:
    """What each rank gets."""
    return [
        list(headrace.stream(inputs, rank=rank, world_size=world_size, **options))
        for rank in range(world_size)
    ]


def joined(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return [each for part in parts for each in part]


def as_bag(records: Iterable[Any]) -> list[str]:
    """Comparable whatever the order; twice the same record is twice there."""
    return sorted(repr(plain(record)) for record in records)


def plain(item: Any) -> Any:
    """Arrays as lists with their dtype, so that items can be compared."""
    if isinstance(item, dict):
        return {name: plain(value) for name, value in item.items()}
    if isinstance(item, np.ndarray):
        return (str(item.dtype), item.tolist())
    if isinstance(item, list):
        return [plain(each) for each in item]
    return item


def copies(items: Iterable[Any], count: int | None = None) -> list[Any]:
    """They stay what they are, whatever becomes of their memory."""
    return [plain(item) for item in islice(items, count)]


# Resuming


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 1024, f"a state of {len(text)} bytes: {text}"
    restored: dict[str, Any] = json.loads(text)
    assert restored == state, "JSON changes the state"
    return restored


def resumes_at_every_step(make: MakeStream, steps: int | None = None) -> None:
    """From the state after any item, a new stream gives exactly the items that would have come.

    Four ways: once from each step, again and again with an item or two in between, in the same stream, and by the
    iterator alone. An endless stream is followed for `steps` items.
    """
    stream = make()
    states, items = [through_json(stream.state_dict())], []
    for item in islice(stream, steps):
        items.append(plain(item))
        states.append(through_json(stream.state_dict()))
    assert len(items) > 2, "too few items to show anything"
    ends = steps is None
    for step, state in enumerate(states):
        other = make()
        other.load_state_dict(state)
        assert other.state_dict() == state, f"loading the state of step {step} and saving it changes it"
        rest = items[step:]
        assert copies(other, None if ends else len(rest)) == rest, f"other items after step {step}"
        if ends:
            assert other.epoch == 1
    _resumes_in_a_row(make, items)
    middle = len(items) // 2
    stream.load_state_dict(states[middle])
    assert copies(stream, len(items) - middle) == items[middle:], "a stream does not go back to its own state"
    _iterator_resumes(make, states[middle], items[middle:])


def _resumes_in_a_row(make: MakeStream, items: Sequence[Any]) -> None:
    found: list[Any] = []
    state = make().state_dict()
    while len(found) < len(items):
        stream = make()
        stream.load_state_dict(state)
        found += copies(stream, min(1 + len(found) % 2, len(items) - len(found)))
        state = through_json(stream.state_dict())
    assert found == items, "resuming again and again gives other items"


def _iterator_resumes(make: MakeStream, state: dict[str, Any], rest: list[Any]) -> None:
    iterator: Any = iter(make())
    next(iterator)
    iterator.load_state_dict(state)
    assert iterator.state_dict() == state
    assert copies(iterator, 1) == rest[:1]
    after = through_json(iterator.state_dict())
    iterator.load_state_dict(after)
    assert copies(iterator, len(rest) - 1) == rest[1:], "the iterator does not go on from its own state"


# Functions for workers, which find them by name


def text_of(record: dict[str, Any]) -> str:
    return str(record["text"])


def has_even_number(record: dict[str, Any]) -> bool:
    return int(record["n"]) % 2 == 0


def numbered(record: dict[str, Any]) -> dict[str, Any]:
    return {"n": record["n"]}
