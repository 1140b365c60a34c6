"""`headrace.copy`: the files of a dataset to another place, the manifest last.

The copy has the same names and bytes, so it has the same fingerprint, and states continue on either. Files come to the
destination as a build's do (`format/workplace.py`): a copy that is killed leaves no dataset, and the same call goes on
after the files that are whole already. On a disk they wait in `.build/new` until all of them are there. A bucket has no
incomplete files, and moving an object is copying it once more: there they are noted, and get their names at once.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.checks import check_boolean
from headrace.dataset.copy_files import FileRun, OnCopyProgress, copy_files
from headrace.errors import SettingsError, StorageError, UnfinishedBuildError
from headrace.format.container import StoredFile
from headrace.format.manifest import MANIFEST_NAME, Manifest, read_manifest_and_bytes, read_raw_manifest
from headrace.format.workplace import COPY_STATE_NAME, Workplace
from headrace.public import public
from headrace.store.address import open_output, open_store
from headrace.store.store import CLAIM_NAME, Store, write_file


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """The outcome of `headrace.copy`. The manifest is not counted."""

    source: str
    destination: str
    records: int
    files: int
    bytes: int
    copied_files: int
    copied_bytes: int
    """The others were there already."""
    previous_bytes: int
    """What the files take that are kept only for readers of the dataset that was replaced."""
    is_changed: bool
    """Whether the destination was not the same dataset before, or had lost files of it."""
    seconds: float


@public
def copy(
    source: str | os.PathLike[str] | Store,
    destination: str | os.PathLike[str] | Store,
    *,
    replace: bool = False,
    verify: bool = False,
    progress: OnCopyProgress | None = None,
) -> CopyReport:
    """Copy a dataset to a directory or an object store, from either, and check every file on the way.

    The copy is the same dataset: it has the same files, and states continue on either. Call it again to continue a copy
    that was interrupted: files that are whole are not copied again.

    Args:
        source: The dataset: a directory, an address like "s3://bucket/prefix", or a store.
        destination: Where the copy goes. A directory is created if it does not exist.
        replace: Replace the dataset that is there, if it is another one. Its files are kept for readers that have it
            open, until the next build or copy that changes something.
        verify: Check the checksums of all files that are there already, and copy those again that are damaged. Without
            it, files of an object store and of a complete copy are taken to be whole if they have the right size.
        progress: A function that is called from time to time with a `CopyProgress`.

    Returns:
        A `CopyReport`: how much was copied, and how much was there already.
    """
    started = time.monotonic()
    check_boolean("replace", replace)
    check_boolean("verify", verify)
    origin, out = open_store(source), open_output(destination)
    if origin == out:
        raise SettingsError(f"{out.name}: is the source and the destination; name another destination")
    raw, manifest = read_manifest_and_bytes(origin)
    copying = _Copying(origin, out, raw, manifest, verify, progress or (lambda _: None))
    copied: list[StoredFile] = []
    is_changed = not copying.is_complete()
    if is_changed:
        out.create()
        with out.lock("headrace copy"):
            copied = copying.carry_out(replace)
    return CopyReport(
        source=origin.name,
        destination=out.name,
        records=manifest.records,
        files=len(copying.files),
        bytes=sum(stored.bytes for stored in copying.files),
        copied_files=len(copied),
        copied_bytes=sum(stored.bytes for stored in copied),
        previous_bytes=copying.previous_bytes,
        is_changed=is_changed,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class _Found:
    """What is at the destination already."""

    whole: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    """Files of these names are there, but are not whole."""


class _Copying:
    def __init__(
        self,
        source: Store,
        out: Store,
        raw: bytes,
        manifest: Manifest,
        verify: bool,
        progress: OnCopyProgress,
    ) -> None:
        self._source, self._out, self._raw, self._manifest = source, out, raw, manifest
        self._verify, self._progress = verify, progress
        self.previous_bytes = 0
        # Two shards with the same content share one file.
        self.files = list({stored.file: stored for stored in manifest.files}.values())

    def is_complete(self) -> bool:
        """Whether this very dataset is at the destination, with all its files, and nothing is left of its copying."""
        try:
            if self._out.read(MANIFEST_NAME) != self._raw:
                return False
        except FileNotFoundError:
            return False
        work = Workplace(self._out)
        if work.folder.has(CLAIM_NAME) and not work.is_unfinished_build():
            return False
        return len(self._find(self._out, self._verify).whole) == len(self.files)

    def carry_out(self, replace: bool) -> list[StoredFile]:
        """Copy what is missing, and publish it; the caller holds the lock."""
        work = Workplace(self._out)
        self._refuse(work, replace)
        work.claim()
        work.new.remove_leftovers()
        state = {"source": self._source.name, "manifest": self._manifest.checksum}
        write_file(work.folder, COPY_STATE_NAME, [msgspec.json.encode(state)])
        left = self._missing(work)
        into = work.receiving(stored.file for stored in left)
        copy_files(self._source, self._manifest, into, left, self._progress)
        write_file(work.new, MANIFEST_NAME, [self._raw])
        work.publish(self._manifest)
        self.previous_bytes = work.previous_bytes
        work.remove()
        return left

    def _refuse(self, work: Workplace, replace: bool) -> None:
        if replace:
            if work.is_unfinished_build():
                work.claim()
                work.remove()
            return
        name = self._out.name
        try:
            here = read_raw_manifest(self._out)
        except (FileNotFoundError, UnfinishedBuildError):
            here = self._raw
        if here != self._raw:
            raise SettingsError(f"{name}: holds another dataset; choose another place, or use replace=True")
        if work.is_unfinished_build():
            raise UnfinishedBuildError(
                f"{name}: a build or a writer was interrupted here; complete it, choose another place, or use "
                "replace=True to discard it"
            )

    def _missing(self, work: Workplace) -> list[StoredFile]:
        """The files that are to be copied."""
        here = self._find(self._out, self._verify or not self._out.is_remote)
        foreign = sorted(here.wrong - work.known_files())
        if foreign:
            raise StorageError(
                f"{self._out.locate(foreign[0])}: is there already with another content, and belongs to no "
                "dataset that is known there; move it away, or choose another place"
            )
        for file in sorted(here.wrong) if self._out.is_remote else ():
            # Where a name says what the content is, nothing is written under a name that is taken.
            self._out.remove(file)
        waiting = self._find(work.new, True)
        there = here.whole | waiting.whole
        return [stored for stored in self.files if stored.file not in there]

    def _find(self, store: Store, by_content: bool) -> _Found:
        """Which of the dataset's files a store has; with `by_content`, they are read."""
        names = set(store.files())
        present = [stored for stored in self.files if stored.file in names]
        run = FileRun("checking", present, self._progress)

        def is_whole(stored: StoredFile) -> bool:
            try:
                if store.status(stored.file).bytes != stored.bytes:
                    run.skip(stored)
                    return False
                if not by_content:
                    run.skip(stored)
                    return True
                return run.checksum(store, stored) == stored.checksum
            except FileNotFoundError:
                return False

        return _sorted_out(present, run.carry_out(is_whole))


def _sorted_out(files: Sequence[StoredFile], are_whole: Sequence[bool]) -> _Found:
    found = _Found()
    for stored, is_whole in zip(files, are_whole, strict=True):
        (found.whole if is_whole else found.wrong).add(stored.file)
    return found
