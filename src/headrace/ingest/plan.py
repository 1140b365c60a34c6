"""Inputs -> tasks. A task makes its own shards from its own slices of the inputs, and knows no other task.

The plan is a pure function of the inputs' names and contents and of the settings. It never depends on the number of
workers, on what was built before, or on what was interrupted. Building again, continuing and extending are therefore
the same thing: plan, and leave out the tasks whose result is already there.

Large files are cut into ranges, one task for each. Small files share tasks. A hash of the next file's name decides
where a shared task ends, so an added or removed file changes the task that it belongs to and no other: with the files
a b c d e f and a task boundary before d, adding b2 leaves the task d e f as it was.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.format.checksum import header_checksum
from headrace.readers.file_names import without_bucket
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile
from headrace.readers.many_files import of_each_file
from headrace.readers.reader import ReadOptions, reader_for

_LARGEST_GROUP = 4
"""A shared task ends when it holds more than this many times the target size, if not earlier."""


@dataclass(frozen=True)
class Slice:
    """A range of one input, in the unit of its reader."""

    path: str
    format: InputFormat
    start: int
    stop: int


@dataclass(frozen=True)
class BuildTask:
    slices: tuple[Slice, ...]
    files: tuple[InputFile, ...]
    """The files of the slices, in the same order: where they are, and which versions of them."""
    input_bytes: int


Ranges = Sequence[tuple[int, int]]


def make_plan(
    inputs: Sequence[InputFile],
    shard_bytes: int,
    options: ReadOptions,
    known: Mapping[tuple[str, str], Ranges] | None = None,
) -> Iterator[BuildTask]:
    """`known` has the ranges of files that were planned before in the same way, by their names and versions."""

    def ranges_of(file: InputFile) -> Ranges:
        raw = file.raw()
        version = raw.version()
        before = None if version is None else (known or {}).get((file.path, version))
        return before or reader_for(file.format).plan(raw, shard_bytes, options)

    group: list[Slice] = []
    files: list[InputFile] = []
    group_bytes = 0
    for file, ranges in zip(inputs, of_each_file(ranges_of, inputs), strict=True):
        slices = [Slice(file.path, file.format, start, stop) for start, stop in ranges]
        is_large = len(slices) > 1
        is_group_full = group_bytes > _LARGEST_GROUP * shard_bytes
        if group and (is_large or is_group_full or _begins_group(file, shard_bytes)):
            yield BuildTask(tuple(group), tuple(files), group_bytes)
            group, files, group_bytes = [], [], 0
        if is_large:
            share = file.bytes // len(slices)
            yield from (BuildTask((piece,), (file,), share) for piece in slices)
        else:
            group.extend(slices)
            files.append(file)
            group_bytes += file.bytes
    if group:
        yield BuildTask(tuple(group), tuple(files), group_bytes)


def _begins_group(file: InputFile, shard_bytes: int) -> bool:
    """Whether a file begins a new group, decided by its name and size alone so that groups are about `shard_bytes`. The
    same files in a bucket and on a disk are grouped in the same way."""
    draw = int(header_checksum(without_bucket(file.path).encode()), 16) / 2**64
    return draw < file.bytes / shard_bytes
