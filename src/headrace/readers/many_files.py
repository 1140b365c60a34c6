"""Asking many files something. Objects of a store are asked several at a time, since each answer is long on its way."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.readers.inputs import InputFile

_AT_ONCE = 16
_FILES_AHEAD = 64
Result = TypeVar("Result")


def of_each_file(function: Callable[[InputFile], Result], files: Sequence[InputFile]) -> Iterator[Result]:
    """The results for all files, in their order. The error of the first file that has one is raised."""
    if sum(file.is_remote for file in files) <= 1:
        yield from map(function, files)
        return
    with ThreadPoolExecutor(_AT_ONCE, "headrace-inputs") as threads:
        for first in range(0, len(files), _FILES_AHEAD):
            yield from threads.map(function, files[first : first + _FILES_AHEAD])
