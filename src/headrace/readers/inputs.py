"""From the inputs that a user names (files, globs, directories, '-') to a sorted list of files."""

import glob
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from headrace.errors import SettingsError, StorageError
from headrace.format.manifest import MANIFEST_NAME
from headrace.readers.file_names import to_name, to_path
from headrace.readers.formats import InputFormat, format_of
from headrace.readers.ranges import file_size, head

logger = logging.getLogger(__name__)

STANDARD_INPUT = "-"
_SNIFFED_BYTES = 2**16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OBJECT_BEGINS = re.compile(rb'\{\s*"')


@dataclass(frozen=True, order=True)
class InputFile:
    """`path` is the name of the file as the user gave it, so that a dataset does not depend on where the project is
    stored."""

    path: str
    format: InputFormat
    bytes: int

    @property
    def location(self) -> Path:
        """Where the file is on disk; its name differs if that is not UTF-8."""
        return to_path(self.path)


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
        kind = format or format_of(Path(path))
        if kind is None and not named and not include:
            unknown.append(path)
            continue
        size = _size(path)
        if kind is None:
            # A file that the user asked for is read as text if its name says nothing else.
            kind = InputFormat.TEXT
            if not include:
                check_is_text(Path(path), path)
        file = InputFile(to_name(os.path.normpath(path)), kind, size)
        found.setdefault(os.path.realpath(path), file)
    if unknown:
        _warn_of_unknown(unknown)
    if not found:
        raise SettingsError(f"inputs {', '.join(inputs)}: {_why_none(inputs, out)}")
    return sorted(found.values())


def check_is_text(path: Path, name: str) -> None:
    """Raise an error if a file that would be read as text, because nobody said what it is, holds JSON lines."""
    first = head(path, _SNIFFED_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()
    line, _, rest = first.partition(b"\n")
    is_cut = not rest and len(first) >= _SNIFFED_BYTES // 2
    if _is_object(line) or (is_cut and _OBJECT_BEGINS.match(line)):
        raise SettingsError(
            f"{name}: looks like JSON lines, but nothing says so; read its lines as records with "
            "--format jsonl, or all of it as text with --format text"
        )


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


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
    size = file_size(Path(path))
    try:
        # Only opening it tells whether it can be read.
        with open(path, "rb"):
            return size
    except OSError as error:
        raise StorageError(f"input {path!r}: cannot be read: {error.strerror}") from error
