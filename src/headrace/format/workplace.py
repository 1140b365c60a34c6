"""Where a writer works: the folder `.build` in the directory of the dataset.

A directory may hold files of its owner, whatever their names. So a writer deletes only what is in its own folder, and
what a manifest or its own notes name:

    .build/.headrace   marks the folder as ours; a folder without the mark is never touched
    .build/new/        new files, incomplete or complete
    .build/moved/      the names of files that were moved from `new` to the directory, or are to be deleted from it
    .build/at-work/    a folder for each writer that works here beside others, which holds its lock

A file is noted in `moved` before it is moved or deleted. If the writer dies, whoever works here next knows which files
of the directory belong to no dataset. `publish` replaces the manifest in one step, and keeps the version before it, as
`.previous.json` and the files that this names, for readers that have it open.
"""

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from headrace.errors import DatasetNotFoundError, FormatError, StorageError, UnfinishedBuildError
from headrace.format.checksum import checksum
from headrace.format.manifest import (
    BUILD_NAME,
    MANIFEST_NAME,
    PREVIOUS_NAME,
    Manifest,
    is_file_name,
    read_manifest,
    read_one_manifest,
)
from headrace.store.store import Store, write_file

BUILD_STATE_NAME = "state.json"
"""The file in which a build keeps how it was started (`ingest/site.py`)."""
WRITER_STATE_NAME = "writer.json"
"""The same for a Writer (`ingest/writer_notes.py`)."""
COPY_STATE_NAME = "copy.json"
"""The same for a copy (`dataset/copy.py`)."""


NEW_NAME, _AT_WORK_NAME = "new", "at-work"


def new_files_in(store: Store) -> Store:
    """Where the new files of a store are written before they are moved to it."""
    return store.folder(BUILD_NAME).folder(NEW_NAME)


class Workplace:
    """Owns the folder `.build` of a store while the caller holds the store's lock."""

    def __init__(self, out: Store, new: str = NEW_NAME) -> None:
        """`new` is another folder for new files, for a writer that is not alone."""
        self.out = out
        self.folder = out.folder(BUILD_NAME)
        self.new = self.folder.folder(new)
        self._moved = self.folder.folder("moved")
        self._is_claimed = False
        self._replaced: str | None = None
        """The stamp of the manifest that `publish` may replace: the one that was there when the work began."""
        self._tried = ""
        """The checksum of the manifest that `publish` was last about to put there. If it failed, it may be there."""

    def claim(self) -> None:
        """Create the folder, or go on in it. What it must not touch is refused before anything is done."""
        self._previous()
        if not self._is_claimed:
            self._replaced = self.out.stamp(MANIFEST_NAME)
            self._is_claimed = True
        self.folder.claim()
        for folder in (self.new, self._moved):
            folder.create()

    def adopt(self, files: Iterable[str]) -> None:
        """Move complete files from `new` to the directory."""
        names = sorted(set(files))
        if not names:
            return
        self._note(names)
        for name in names:
            self.out.take(name, self.new)

    def receiving(self, files: Iterable[str]) -> Store:
        """Where files with these names are to be written that are complete as soon as they have their names: on a disk
        they wait in `new`, and elsewhere they come to the directory at once."""
        if not self.out.is_remote:
            return self.new
        self._note(sorted(set(files)))
        return self.out

    def known_files(self) -> set[str]:
        """The files of the directory that are a writer's to replace: those that a manifest or a note names."""
        return _names(self._current()) | _names(self._previous()) | self._noted()

    def is_unfinished_build(self) -> bool:
        """Whether a build or a Writer was interrupted here, whose work would be lost."""
        return self.folder.has(BUILD_STATE_NAME) or self.folder.has(WRITER_STATE_NAME)

    def left_in_directory(self) -> set[str]:
        """The files of the directory that a writer has noted, and that belong to no version: `discard` deletes them."""
        belonging = _names(self._current()) | _names(self._previous())
        return self._noted() - belonging

    @contextlib.contextmanager
    def at_work(self, who: str) -> Iterator[None]:
        """For a writer that does not hold the lock of the whole place, because others work there, too."""
        own = self.folder.folder(_AT_WORK_NAME).folder(secrets.token_hex(8))
        own.create()
        with own.lock(who):
            yield
        own.remove_all()

    def check_nobody_at_work(self) -> None:
        """A DirectoryInUseError names a writer that works here beside others."""
        shared = self.folder.folder(_AT_WORK_NAME)
        for name in sorted({file.partition("/")[0] for file in shared.everything() if "/" in file}):
            with shared.folder(name).lock("headrace, which looks who is at work"):
                pass

    def _note(self, names: Sequence[str]) -> None:
        """Remember these files of the directory until all work is done: those that belong to no version then go."""
        note = msgspec.json.encode(names)
        write_file(self._moved, f"{checksum(note)}.json", [note])

    def publish(self, manifest: Manifest) -> None:
        """Make the manifest that lies in `new` the dataset's, with all files that it names."""
        current = self._current()
        if current is not None and current.checksum == self._tried:
            self._replaced = self.out.stamp(MANIFEST_NAME)
        if current is None or current.checksum != manifest.checksum:
            self.drop_previous(kept=_names(manifest))
            self._keep(current)
        # One listing: where files are objects of a bucket, asking for each of them takes minutes.
        self.adopt(_names(manifest).intersection(self.new.files()))
        self._tried = manifest.checksum
        self.out.replace(MANIFEST_NAME, self.new, self._replaced)
        self._replaced = self.out.stamp(MANIFEST_NAME)

    def _keep(self, current: Manifest | None) -> None:
        if current is not None:
            write_file(self.new, PREVIOUS_NAME, [self.out.read(MANIFEST_NAME)])
            self.out.take(PREVIOUS_NAME, self.new)

    def drop_previous(self, kept: Iterable[str] = ()) -> None:
        """Delete the version before the current one, except for files that the current one or `kept` names."""
        previous = self._previous()
        if previous is None:
            return
        names = sorted(_names(previous) - _names(self._current()) - set(kept))
        self._note(names)
        # Its manifest goes first: a reader that misses a file then knows that its version is gone.
        self.out.remove(PREVIOUS_NAME)
        for name in names:
            self.out.remove(name)

    @property
    def previous_bytes(self) -> int:
        """How much the files take that only the version before needs."""
        previous = self._previous()
        if previous is None:
            return 0
        current = _names(self._current())
        return sum({file.file: file.bytes for file in previous.files if file.file not in current}.values())

    def discard(self) -> None:
        """Delete what was moved to the directory and belongs to no version, and all new files."""
        for name in sorted(self.left_in_directory()):
            self.out.remove(name)
        self._moved.remove_all()
        self.new.remove_all()

    def remove(self) -> None:
        """The end of all work: discard what is left, and delete the folder."""
        self.discard()
        self.folder.remove_all()

    def _noted(self) -> set[str]:
        names: set[str] = set()
        for file in self._moved.files():
            try:
                note = msgspec.json.decode(self._moved.read(file), type=list[str])
            except (OSError, ValueError):
                continue  # a disk that loses what was written safely; its files stay
            names.update(name for name in note if is_file_name(name))
        return names

    def _current(self) -> Manifest | None:
        """The dataset that is here; None if there is none, or if nothing can be said about it."""
        try:
            return read_manifest(self.out)
        except (DatasetNotFoundError, UnfinishedBuildError, FormatError):
            return None

    def _previous(self) -> Manifest | None:
        try:
            return read_one_manifest(self.out, PREVIOUS_NAME)[1]
        except FileNotFoundError:
            return None
        except FormatError as error:
            raise StorageError(
                f"{self.out.locate(PREVIOUS_NAME)}: is not the manifest of a dataset ({error}), but Headrace keeps the "
                "version before the current one under this name; move the file away, or choose another directory"
            ) from None


def _names(manifest: Manifest | None) -> set[str]:
    return {stored.file for stored in manifest.files} if manifest else set()
