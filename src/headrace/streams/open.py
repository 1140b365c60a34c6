"""`headrace.stream`: from what a user names to a stream of records."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from headrace.errors import SettingsError
from headrace.load.world import WorldOptions, find_world
from headrace.readers.inputs import find_inputs
from headrace.readers.reader import InputFormat
from headrace.streams.settings import StreamSettings, automatic_block_bytes
from headrace.streams.source import Source
from headrace.streams.stream import Stream

_FORMATS = (InputFormat.TEXT, InputFormat.JSONL, InputFormat.CSV, InputFormat.PARQUET)


def stream(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    include: Sequence[str] = (),
    split: str = "line",
    separator: str = "",
    fields: Sequence[str] | None = None,
    types: Mapping[str, Callable[[str], Any]] | None = None,
    shuffle: bool | None = None,
    seed: int | None = None,
    buffer: int = 4096,
    block_bytes: int | None = None,
    repeat: bool = False,
    max_bad_records: int = 0,
    csv_cuts: str = "local",
    **world: Unpack[WorldOptions],
) -> Stream:
    """The records of raw files, as dicts, read when they are asked for; see `docs/stream.md` for each argument.

    Ranks and the workers of a torch DataLoader share the records among them, each exactly once.
    """
    settings = StreamSettings(
        format=format,  # type: ignore[arg-type]  # strings are parsed there
        split=split,  # type: ignore[arg-type]
        separator=separator,
        fields=fields,  # type: ignore[arg-type]
        types=types,
        shuffle=seed is not None if shuffle is None else shuffle,
        seed=0 if seed is None else seed,
        buffer=buffer,
        repeat=repeat,
        max_bad_records=max_bad_records,
        csv_cuts=csv_cuts,  # type: ignore[arg-type]
    )
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    # Nothing is written, so there is no output directory to leave out.
    files = find_inputs(given, out=Path(os.devnull), format=settings.format, include=include)
    for file in files:
        if file.format not in _FORMATS:
            raise SettingsError(
                f"{file.path}: a stream reads {', '.join(_FORMATS)}, not {file.format}; build a dataset of it first"
            )
    if settings.types and not any(file.format is InputFormat.CSV for file in files):
        raise SettingsError("types=: only CSV files have values without a type, and there is none")
    automatic = automatic_block_bytes(sum(file.bytes for file in files))
    settings = replace(settings, block_bytes=automatic if block_bytes is None else block_bytes)
    known = find_world(**world) if any(value is not None for value in world.values()) else None
    return Stream(Source(tuple(files), settings), known)
