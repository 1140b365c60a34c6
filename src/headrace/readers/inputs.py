"""From what a user names (files, globs, directories, '-') to a sorted list of input files."""

import glob
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from headrace.errors import SettingsError, StorageError
from headrace.readers.reader import InputFormat, format_of

logger = logging.getLogger(__name__)

STANDARD_INPUT = "-"


@dataclass(frozen=True, order=True)
class InputFile:
    """`path` is as the user gave it, so that a dataset does not depend on where the project lies."""

    path: str
    format: InputFormat
    bytes: int


def find_inputs(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    out: Path | None = None,
    format: InputFormat | None,
    include: Sequence[str] = (),
) -> list[InputFile]:
    """Every file once, sorted by path. Files inside `out` are never inputs."""
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    found: dict[str, InputFile] = {}
    unknown: list[str] = []
    for path, named in _wanted_files(inputs, out, include):
        kind = format or format_of(Path(path))
        if kind is None and (named or include):
            kind = InputFormat.TEXT
        if kind is None:
            unknown.append(path)
        else:
            found.setdefault(os.path.realpath(path), InputFile(os.path.normpath(path), kind, _size(path)))
    if unknown:
        _warn_of_unknown(unknown)
    if not found:
        listed = ", ".join(map(str, inputs)) or "(none)"
        raise SettingsError(f"inputs {listed}: no files to read were found there")
    return sorted(found.values())


def _wanted_files(
    inputs: Sequence[str | os.PathLike[str]], out: Path | None, include: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """(path, whether the user named it rather than its directory) of all files that are meant."""
    output = None if out is None else out.absolute()
    for given in inputs:
        for path, named in _expand(os.fspath(given)):
            is_output = output is not None and output in Path(path).absolute().parents
            is_left_out = bool(include) and not named and not _included(path, include)
            if not is_output and not is_left_out:
                yield path, named


def _warn_of_unknown(paths: list[str]) -> None:
    first = Path(paths[0])
    logger.warning(
        "%d files of unknown kind left out, such as %s; name them with --include '*%s' or give --format",
        len(paths),
        paths[0],
        first.suffix or first.name,
    )


def _expand(text: str) -> Iterator[tuple[str, bool]]:
    """(path, whether the user named it rather than its directory)."""
    if os.path.isdir(text):
        for folder, folders, files in os.walk(text):
            folders.sort()
            yield from (
                (os.path.join(folder, name), False) for name in sorted(files) if not name.startswith(".")
            )
    elif os.path.lexists(text):
        yield text, True
    elif glob.has_magic(text):
        matches = [match for match in glob.glob(text, recursive=True) if os.path.isfile(match)]
        if not matches:
            raise SettingsError(f"input {text!r}: no file matches")
        yield from ((match, True) for match in matches)
    else:
        raise StorageError(f"input {text!r}: no such file or directory")


def _included(path: str, include: Sequence[str]) -> bool:
    return any(fnmatch(os.path.basename(path), pattern) or fnmatch(path, pattern) for pattern in include)


def _size(path: str) -> int:
    try:
        with open(path, "rb"):
            return os.stat(path).st_size
    except OSError as error:
        raise StorageError(f"input {path!r}: cannot be read: {error.strerror}") from error
