"""From the inputs that a user names (files, globs, directories, '-', addresses) to a sorted list of files."""

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
from headrace.readers.ranges import head
from headrace.readers.raw_file import LocalRawFile, RawFile, RemoteRawFile
from headrace.readers.remote_inputs import already_a_dataset, expand_address
from headrace.readers.shapes import JSON_REMEDY, is_csv, is_json_lines, other_json
from headrace.store.address import is_address, refuse_mistyped
from headrace.store.fetching import SMALL_BYTES
from headrace.store.remote_address import is_within

logger = logging.getLogger(__name__)

STANDARD_INPUT = "-"
_SNIFFED_BYTES = 2**16


@dataclass(frozen=True, order=True)
class InputFile:
    """`path` is the name of the file as the user gave it, so that a dataset does not depend on where the project is
    stored; or the address of an object."""

    path: str
    format: InputFormat
    bytes: int
    stamp: str = ""
    """Of an object: tells the version that was listed from others."""
    kept_at: str = ""
    """The file that holds the input during a build, if that is not the one with its name: for standard input."""

    @property
    def is_remote(self) -> bool:
        return is_address(self.path)

    @property
    def is_small(self) -> bool:
        """Whether all of a remote file is fetched as soon as a part of it."""
        return self.bytes <= SMALL_BYTES

    def raw(self) -> RawFile:
        """The bytes of the file, for one reader."""
        if self.is_remote:
            return RemoteRawFile(self.path, self.bytes, self.stamp)
        return LocalRawFile(Path(self.kept_at) if self.kept_at else to_path(self.path))


Inputs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def as_list(inputs: Inputs) -> list[str]:
    """One input or several, as a list of their names."""
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    if not isinstance(given, Sequence) or not all(isinstance(each, str | os.PathLike) for each in given):
        raise SettingsError(
            f"inputs={inputs!r}: must be a path, a glob, a directory or an address, or a list of them"
        )
    if not given:
        raise SettingsError("inputs is empty: give at least one file, glob, directory or address")
    return [os.fspath(each) for each in given]


@dataclass(frozen=True)
class _Candidate:
    """A file that may become an input."""

    path: str
    is_named: bool
    """Whether the user named the file itself, or a pattern that it matches, rather than its directory."""
    bytes: int = 0
    stamp: str = ""
    """The size and the stamp of an object. A local file is asked for its size if it becomes an input."""

    @property
    def is_remote(self) -> bool:
        return is_address(self.path)

    @property
    def identity(self) -> str:
        """The same for two names of one file."""
        return self.path if self.is_remote else os.path.realpath(self.path)

    def as_input(self, kind: InputFormat) -> InputFile:
        if self.is_remote:
            return InputFile(self.path, kind, self.bytes, self.stamp)
        return InputFile(to_name(os.path.normpath(self.path)), kind, _size(self.path))


@dataclass(frozen=True)
class _Expanded:
    """What is behind one of the inputs that were given."""

    is_directory: bool
    files: Sequence[_Candidate]


def find_inputs(
    inputs: Sequence[str],
    *,
    out: str | None = None,
    format: InputFormat | None,
    include: Sequence[str] = (),
) -> list[InputFile]:
    """Every file once, sorted by path. Files inside `out`, a directory or an address, are never inputs."""
    expanded = [_expand(given) for given in inputs]
    _check_include(include, any(each.is_directory for each in expanded))
    found: dict[str, InputFile] = {}
    unknown: list[str] = []
    candidates = [file for each in expanded for file in each.files]
    outside = [file for file in candidates if not _is_inside(file, out)]
    for file in _wanted(outside, include):
        kind = format or format_of(Path(file.path))
        if kind is None and not file.is_named and not include and not _is_special(file.path):
            unknown.append(file.path)
            continue
        # A file that the user asked for is read as text if its name says nothing else.
        found_file = file.as_input(kind or InputFormat.TEXT)
        if kind is None and not include:
            check_is_text(found_file.raw(), file.path)
        found.setdefault(file.identity, found_file)
    if unknown:
        _warn_of_unknown(unknown)
    if not found:
        has_output = len(outside) < len(candidates)
        raise SettingsError(f"inputs {', '.join(inputs)}: {_why_none(inputs, out, has_output=has_output)}")
    return sorted(found.values())


def check_is_text(raw: RawFile, name: str) -> None:
    """Raise an error if a file that would be read as text, because nobody said what it is, looks like records."""
    first = head(raw, _SNIFFED_BYTES)
    is_cut = len(first) == _SNIFFED_BYTES
    if is_json_lines(first, is_cut=is_cut):
        raise SettingsError(_looks_like(name, "JSON lines", "read its lines as records with format='jsonl'"))
    if json := other_json(first, is_cut=is_cut):
        raise SettingsError(_looks_like(name, json, JSON_REMEDY))
    if is_csv(first, is_cut=is_cut):
        raise SettingsError(_looks_like(name, "CSV", "read its rows as records with format='csv'"))


def _looks_like(name: str, what: str, remedy: str) -> str:
    return f"{name}: looks like {what}, but nothing says so; {remedy}, or read all of it as text with format='text'"


def check_is_lines(raw: RawFile, name: str) -> None:
    """Raise an error if a file that should hold JSON lines holds other JSON."""
    first = head(raw, _SNIFFED_BYTES)
    if found := other_json(first, is_cut=len(first) == _SNIFFED_BYTES):
        raise FormatError(f"{name}: is {found}, not JSON lines; {JSON_REMEDY}")


def _check_include(include: Sequence[str], has_directory: bool) -> None:
    if isinstance(include, str) or not all(isinstance(pattern, str) for pattern in include):
        raise SettingsError(f"include={include!r}: must be a list of patterns, such as ['*.py']")
    if include and not has_directory:
        raise SettingsError(
            f"include={list(include)!r}: chooses among the files of directories, and there is no directory among the "
            "inputs; leave it out"
        )


def _is_special(path: str) -> bool:
    """Whether this is a pipe, a device or a socket."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # a link that leads nowhere, or an address
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _is_inside(file: _Candidate, out: str | None) -> bool:
    if out is None or file.is_remote != is_address(out):
        return False
    if file.is_remote:
        return is_within(file.path, out)
    return Path(out).absolute() in Path(file.path).absolute().parents


def _why_none(inputs: Sequence[str], out: str | None, *, has_output: bool) -> str:
    is_output = out is not None and any(Path(given).absolute() == Path(out).absolute() for given in inputs)
    if is_output:
        return (
            "this is also the output directory, whose files are never read; choose another output directory"
        )
    if has_output:
        return (
            f"all files there are inside the output {out}, whose files are never read; choose another output"
        )
    return "no files to read were found"


def _wanted(files: Sequence[_Candidate], include: Sequence[str]) -> Iterator[_Candidate]:
    """The files, without those of directories that no pattern includes."""
    for file in files:
        if file.is_named or not include or _included(file.path, include):
            yield file


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


def _expand(text: str) -> _Expanded:
    refuse_mistyped(text)
    if is_address(text):
        found = expand_address(text)
        files = [
            _Candidate(str(each), not found.is_directory, each.size, each.stamp) for each in found.objects
        ]
        return _Expanded(found.is_directory, files)
    if os.path.isdir(text):
        if os.path.exists(os.path.join(text, MANIFEST_NAME)):
            raise already_a_dataset(text)
        return _Expanded(True, [_Candidate(path, is_named=False) for path in _files_below(text)])
    if os.path.lexists(text):
        return _Expanded(False, [_Candidate(text, is_named=True)])
    if glob.has_magic(text):
        matches = list(filter(os.path.isfile, glob.glob(text, recursive=True)))
        if not matches:
            raise SettingsError(f"input {text!r}: no file matches")
        return _Expanded(False, [_Candidate(match, is_named=True) for match in matches])
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
    size = LocalRawFile(Path(path)).size()
    try:
        # Only opening it tells whether it can be read.
        with open(path, "rb"):
            return size
    except OSError as error:
        raise StorageError(f"input {path!r}: cannot be read: {error.strerror}") from error
