"""From the inputs that a user names (files, globs, directories, '-') to a sorted list of files."""

import glob
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from headrace.errors import SettingsError, StorageError
from headrace.format.manifest import MANIFEST_NAME
from headrace.readers.formats import InputFormat, format_of

logger = logging.getLogger(__name__)

STANDARD_INPUT = "-"


@dataclass(frozen=True, order=True)
class InputFile:
    """`path` is as the user gave it, so that a dataset does not depend on where the project is stored."""

    path: str
    format: InputFormat
    bytes: int


Inputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def as_list(inputs: Inputs) -> list[str]:
    """One input or several, as a list of their names."""
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    if not isinstance(given, Sequence) or not all(isinstance(each, str | os.PathLike) for each in given):
        raise SettingsError(f"inputs={inputs!r}: must be a path, a glob or a directory, or a list of them")
    if not given:
        raise SettingsError("inputs is empty: give at least one file, glob or directory")
    return [os.fspath(each) for each in given]


def find_inputs(
    inputs: Sequence[str],
    *,
    out: Path | None = None,
    format: InputFormat | None,
    include: Sequence[str] = (),
) -> list[InputFile]:
    """Every file once, sorted by path. Files inside `out` are never inputs."""
    found: dict[str, InputFile] = {}
    unknown: list[str] = []
    for path, named in _wanted_files(inputs, out, include):
        # A file that the user asked for is read as text if its name says nothing else.
        is_asked_for = named or bool(include)
        kind = format or format_of(Path(path)) or (InputFormat.TEXT if is_asked_for else None)
        if kind is None:
            unknown.append(path)
        else:
            file = InputFile(os.path.normpath(path), kind, _size(path))
            found.setdefault(os.path.realpath(path), file)
    if unknown:
        _warn_of_unknown(unknown)
    if not found:
        raise SettingsError(f"inputs {', '.join(inputs)}: {_why_none(inputs, out)}")
    return sorted(found.values())


def _why_none(inputs: Sequence[str], out: Path | None) -> str:
    if out is not None and any(Path(given).absolute() == out.absolute() for given in inputs):
        return (
            "this is also the output directory, whose files are never read; choose another output directory"
        )
    return "no files to read were found"


def _wanted_files(
    inputs: Sequence[str], out: Path | None, include: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """All wanted files, each as (path, whether the user named the file itself rather than its directory)."""
    output = None if out is None else out.absolute()
    for given in inputs:
        for path, named in _expand(given):
            is_output = output is not None and output in Path(path).absolute().parents
            is_left_out = bool(include) and not named and not _included(path, include)
            if not is_output and not is_left_out:
                yield path, named


def _warn_of_unknown(paths: list[str]) -> None:
    first = Path(paths[0])
    files = "1 file" if len(paths) == 1 else f"{len(paths)} files"
    logger.warning(
        "left out %s of unknown format, such as %s; include such files with --include '*%s', or use --format",
        files,
        paths[0],
        first.suffix or first.name,
    )


def _expand(text: str) -> Iterator[tuple[str, bool]]:
    """The files behind one input, each as (path, whether the user named the file itself rather than its directory)."""
    if os.path.isdir(text):
        if os.path.exists(os.path.join(text, MANIFEST_NAME)):
            raise SettingsError(
                f"input {text!r}: is already a Headrace dataset; give the raw files it was built from"
            )
        for path in _files_below(text):
            yield path, False
    elif os.path.lexists(text):
        yield text, True
    elif glob.has_magic(text):
        matches = list(filter(os.path.isfile, glob.glob(text, recursive=True)))
        if not matches:
            raise SettingsError(f"input {text!r}: no file matches")
        for match in matches:
            yield match, True
    else:
        raise StorageError(f"input {text!r}: no such file or directory")


def _files_below(directory: str) -> Iterator[str]:
    """All files in a directory and its subdirectories, except hidden ones."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(folder, name)


def _included(path: str, include: Sequence[str]) -> bool:
    return any(fnmatch(os.path.basename(path), pattern) or fnmatch(path, pattern) for pattern in include)


def _size(path: str) -> int:
    try:
        with open(path, "rb"):
            return os.stat(path).st_size
    except OSError as error:
        raise StorageError(f"input {path!r}: cannot be read: {error.strerror}") from error
