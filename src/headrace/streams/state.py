"""A stream's state: the position of one consumer, and everything else that its records depend on.

    {"headrace_stream": 1, "epoch": 0, "place": [0, [[12, 800, 0], 96]], "consumer": [3, 16],
     "inputs": "64 files, 120,000,000 bytes, 8f2a...", "block_bytes": 468750, "shuffle": true, ...}

`place` is the state of the last operation's cursor, which contains those of the cursors below it; None is the beginning
of the epoch, which is the same for all consumers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import StateError
from headrace.format.checksum import checksum
from headrace.readers.inputs import InputFile
from headrace.streams.consumer import Consumer
from headrace.streams.cursor import Operation, State, count_in, damaged, parts_of
from headrace.streams.source import StreamInputs

VERSION = 1
_LONGEST_SHOWN = 160
_ABOUT_INPUTS = (
    " (the number of files, their size, and a checksum of their names: inputs in a bucket and on a disk are different "
    "inputs, even if they hold the same)"
)


@dataclass(frozen=True)
class Start:
    """Where an iteration begins."""

    epoch: int = 0
    place: State = None
    consumer: Consumer | None = None
    """The consumer that the place belongs to."""

    def check(self, consumer: Consumer) -> None:
        if self.place is None or self.consumer in (None, consumer):
            return
        number, total = self.consumer or (0, 0)
        raise StateError(
            f"this state was saved by consumer {number} of {total} (the workers of all ranks, counted from 0), but "
            f"this is consumer {consumer.number} of {consumer.total}; each consumer must resume from its own state, "
            "with as many ranks and workers as before"
        )


def describe(source: StreamInputs, operations: Sequence[Operation]) -> dict[str, Any]:
    """Everything but the place: streams with equal descriptions give equal records in equal order."""
    settings = source.settings
    names = checksum("\0".join(map(_identity, source.files)).encode())
    total = sum(file.bytes for file in source.files)
    described: dict[str, Any] = {
        "inputs": f"{len(source.files)} files, {total:,} bytes, {names[:16]}",
        "format": settings.format,
        "split": settings.split,
        "separator": settings.separator,
        "fields": settings.fields,
        "types": {name: _name(function) for name, function in (settings.types or {}).items()},
        "block_bytes": settings.block_bytes,
        "shuffle": settings.shuffle,
        "seed": settings.seed if settings.shuffle else 0,
        "buffer": settings.buffer if settings.shuffle else 0,
        "operations": " | ".join(operation.describe() for operation in operations),
    }
    return {name: _short(value) for name, value in described.items() if value not in (None, "", {}, 0)}


def _identity(file: InputFile) -> str:
    """The name and the size of a file; of an object also its version, which costs nothing."""
    described = f"{file.path}\0{file.bytes}"
    return f"{described}\0{file.stamp}" if file.stamp else described


def to_state(described: Mapping[str, Any], start: Start) -> dict[str, Any]:
    consumer = None if start.place is None or start.consumer is None else list(start.consumer)
    return {
        "headrace_stream": VERSION,
        "epoch": start.epoch,
        "place": start.place,
        "consumer": consumer,
        **described,
    }


def from_state(state: Any, described: Mapping[str, Any]) -> Start:
    """The place in a saved state, after a check that the state belongs to this stream."""
    if not isinstance(state, Mapping) or "headrace_stream" not in state:
        raise StateError(f"state of type {type(state).__name__}: not what a stream's state_dict() returned")
    if state["headrace_stream"] != VERSION:
        raise StateError(
            f"state of version {state['headrace_stream']!r}: this Headrace reads version {VERSION}"
        )
    differences = list(_differences(state, described))
    if differences:
        raise StateError(
            "this state was saved by another stream, so resuming would repeat or lose records: "
            + "; ".join(differences)
        )
    epoch, consumer = state.get("epoch"), state.get("consumer")
    number, total = (0, 1) if consumer is None else map(count_in, parts_of(consumer, 2))
    if number >= total:
        raise damaged(consumer)
    return Start(count_in(epoch), state.get("place"), None if consumer is None else Consumer(number, total))


def _differences(state: Mapping[str, Any], described: Mapping[str, Any]) -> Iterator[str]:
    ours = {"headrace_stream", "epoch", "place", "consumer"}
    for name in sorted((set(described) | set(state)) - ours):
        here, there = described.get(name), state.get(name)
        if here != there:
            note = _ABOUT_INPUTS if name == "inputs" else ""
            yield f"{name} is {_shown(here)} here and {_shown(there)} in the state{note}"


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _short(value: Any) -> Any:
    """The value as JSON represents it; a long value is replaced by its checksum, so that states stay small."""
    text = json.dumps(value)
    if len(text) <= _LONGEST_SHOWN:
        return json.loads(text)
    return f"{text[:64]}... {checksum(text.encode())[:16]}"


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
