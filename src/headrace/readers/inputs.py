"""From the inputs that a user names (files, globs, directories, '-') to a sorted list of files."""

import glob
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from headrace.errors import FormatError, SettingsError, StorageError
from headrace.format.manifest import MANIFEST_NAME
from headrace.readers.file_names import to_name, to_path
from headrace.readers.formats import InputFormat, format_of
from headrace.readers.ranges import file_size, head
from headrace.readers.shapes import JSON_REMEDY, is_csv, is_json_lines, other_json

logger = logging.getLogger(__name__)

STANDARD_INPUT = "-"
_SNIFFED_BYTES = 2**16


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
    _check_include(inputs, include)
    found: dict[str, InputFile] = {}
    unknown: list[str] = []
    for path, named in _wanted_files(inputs, out, include):
        kind = format or format_of(Path(path))
        if kind is None and not named and not include and not _is_special(path):
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
    """Raise an error if a file that would be read as text, because nobody said what it is, looks like records."""
    first = head(path, _SNIFFED_BYTES)
    is_cut = len(first) == _SNIFFED_BYTES
    if is_json_lines(first, is_cut=is_cut):
        raise SettingsError(_looks_like(name, "JSON lines", "read its lines as records with format='jsonl'"))
    if json := other_json(first, is_cut=is_cut):
        raise SettingsError(_looks_like(name, json, JSON_REMEDY))
    if is_csv(first, is_cut=is_cut):
        raise SettingsError(_looks_like(name, "CSV", "read its rows as records with format='csv'"))


def _looks_like(name: str, what: str, remedy: str) -> str:
    return f"{name}: looks like {what}, but nothing says so; {remedy}, or read all of it as text with format='text'"


def check_is_lines(path: Path, name: str) -> None:
    """Raise an error if a file that should hold JSON lines holds other JSON."""
    first = head(path, _SNIFFED_BYTES)
    if found := other_json(first, is_cut=len(first) == _SNIFFED_BYTES):
        raise FormatError(f"{name}: is {found}, not JSON lines; {JSON_REMEDY}")


def _check_include(inputs: Sequence[str], include: Sequence[str]) -> None:
    if isinstance(include, str) or not all(isinstance(pattern, str) for pattern in include):
        raise SettingsError(f"include={include!r}: must be a list of patterns, such as ['*.py']")
    if include and not any(os.path.isdir(given) for given in inputs):
        raise SettingsError(
            f"include={list(include)!r}: chooses among the files of directories, and there is no directory among the "
            "inputs; leave it out"
        )


def _is_special(path: str) -> bool:
    """Whether this is a pipe, a device or a socket."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # a link that leads nowhere
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


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
    pattern = os.path.join(os.path.dirname(paths[0]), f"*{first.suffix}") if first.suffix else paths[0]
    logger.warning(
        "left out %s of unknown format, such as %s; to read such files as text too, add them to the inputs, "
        "for example as '%s' (include= would read only the files that match)",
        files,
        paths[0],
        pattern,
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
