"""Inputs -> tasks. A task makes its own shards from its own slices of the inputs and knows of no other task.

The plan is a pure function of the inputs' names and contents and of the settings: never of the number of
workers, of what was built before, or of what was interrupted. Building again, continuing and extending are
then one thing: plan, and leave out the tasks whose result is already there.

Large files are cut into ranges, a task each. Small files share tasks. Where a shared task ends is decided by a
hash of the next file's name, so an added or removed file changes the one task it is in and no other: with
files a b c d e f and a task boundary before d, adding b2 leaves the task d e f as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.format.checksum import header_checksum
from headrace.readers.inputs import InputFile
from headrace.readers.reader import InputFormat, ReadOptions, reader_for

_LARGEST_GROUP = 4
"""A shared task ends at the latest when it holds this many times the target."""


@dataclass(frozen=True)
class Slice:
    """A range of one input, in its reader's unit."""

    path: str
    format: InputFormat
    start: int
    stop: int


@dataclass(frozen=True)
class BuildTask:
    slices: tuple[Slice, ...]
    input_bytes: int


def make_plan(
    inputs: Sequence[InputFile], shard_bytes: int, options: ReadOptions, locate: Callable[[str], Path] = Path
) -> Iterator[BuildTask]:
    """`locate` finds the file behind an input's name (standard input is kept in a file of another name)."""
    group: list[Slice] = []
    group_bytes = 0
    for file in inputs:
        ranges = reader_for(file.format).plan(locate(file.path), shard_bytes, options)
        slices = [Slice(file.path, file.format, start, stop) for start, stop in ranges]
        begins = (
            len(slices) > 1 or _begins_group(file, shard_bytes) or group_bytes > _LARGEST_GROUP * shard_bytes
        )
        if group and begins:
            yield BuildTask(tuple(group), group_bytes)
            group, group_bytes = [], 0
        if len(slices) > 1:
            share = file.bytes // len(slices)
            yield from (BuildTask((piece,), share) for piece in slices)
        else:
            group.extend(slices)
            group_bytes += file.bytes
    if group:
        yield BuildTask(tuple(group), group_bytes)


def _begins_group(file: InputFile, shard_bytes: int) -> bool:
    """True for a share of files that makes groups of about `shard_bytes`, by name and size alone."""
    draw = int(header_checksum(file.path.encode()), 16) / 2**64
    return draw < file.bytes / shard_bytes
