"""`headrace.stream`: from the inputs that a user names to a stream of records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from headrace.errors import SettingsError
from headrace.load.world import WorldOptions, find_world
from headrace.order.world import World
from headrace.public import public
from headrace.readers.bounds import MAX_RECORD_BYTES
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import Inputs, as_list, find_inputs
from headrace.readers.reader import Split
from headrace.streams.settings import StreamSettings, automatic_block_bytes
from headrace.streams.source import StreamInputs
from headrace.streams.stream import Stream


@public
def stream(
    inputs: Inputs,
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
    max_record_bytes: int = MAX_RECORD_BYTES,
    csv_cuts: str = "local",
    **world: Unpack[WorldOptions],
) -> Stream:
    """Read records straight from raw files, as dicts, without building a dataset first.

    All ranks, and all workers of a PyTorch DataLoader, share the records: each record goes to exactly one of them.

    Args:
        inputs: Files, globs or directories; one or several. Also addresses of objects, patterns and prefixes in object
            stores, like "s3://bucket/*.parquet".
        format: The format of all inputs, if it cannot be told from their names.
        include: Patterns of file names: only the files that match are taken from directories, and those of unknown
            format are read as text.
        split: What a record of a text file is: "line", "file" or "separator".
        separator: The text that ends a record, with split="separator".
        fields: The fields to take from each record. All of them by default.
        types: Functions that convert the text of CSV columns, like {"price": float}. By default, values stay text.
        shuffle: Whether each epoch has a different order. By default it does if a seed is given.
        seed: The seed of that order.
        buffer: How many consecutive records are shuffled with each other.
        block_bytes: The size of the blocks in which files are read and shared. By default, about 256 blocks in all.
        repeat: Continue with the next epoch without end, instead of stopping after one.
        max_bad_records: How many unreadable records each consumer may leave out in an epoch.
        max_record_bytes: The longest record that is read (128 MiB by default). A longer one counts as unreadable, so
            that a damaged or hostile file cannot fill the memory.
        csv_cuts: How to find out whether a block of a CSV file begins inside quotes: "local" looks at the bytes around
            its beginning, "scan" reads the file from its start.
        **world: `rank` and `world_size`, or `data_rank` and `data_world_size`, or `mesh` and `mesh_dim`, as for a
            Loader.

    Returns:
        A `Stream`, with `.map()`, `.filter()`, `.batch()`, `.tokenize()`, `.pack()` and `state_dict()`.
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
        max_record_bytes=max_record_bytes,
        csv_cuts=csv_cuts,  # type: ignore[arg-type]
    )
    files = find_inputs(as_list(inputs), format=settings.format, include=include)
    formats = {file.format for file in files}
    if settings.types and InputFormat.CSV not in formats:
        raise SettingsError("types=: applies only to CSV files, and there are none among the inputs")
    if settings.separator and InputFormat.TEXT not in formats:
        raise SettingsError("separator=: applies only to text files, and there are none among the inputs")
    if settings.split is Split.FILE and InputFormat.TEXT not in formats:
        raise SettingsError("split='file': applies only to text files, and there are none among the inputs")
    if block_bytes is None:
        block_bytes = automatic_block_bytes(sum(file.bytes for file in files))
    settings = replace(settings, block_bytes=block_bytes)
    return Stream(StreamInputs(tuple(files), settings), _given_world(world))


def _given_world(options: WorldOptions) -> World | None:
    """The world that the caller gave, or None to find it out when a loop begins."""
    if all(value is None for value in options.values()):
        return None
    return find_world(**options)
