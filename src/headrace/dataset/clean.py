"""What writers that died have left behind in a place: finding it, and removing it.

Nothing is guessed. Only the folder `.build` with its mark, files that a writer has noted there, and uploads in parts of
such files are leftovers (`format/workplace.py`). All else is kept: what a manifest names, and what is somebody else's.
While a writer holds the lock of the place, this refuses to look, because what a living one has done so far looks the
same.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import DatasetNotFoundError, StorageError, UnfinishedBuildError
from headrace.format.manifest import (
    BUILD_NAME,
    MANIFEST_NAME,
    PREVIOUS_NAME,
    Manifest,
    read_manifest,
    read_one_manifest,
)
from headrace.format.workplace import BUILD_STATE_NAME, COPY_STATE_NAME, WRITER_STATE_NAME, Workplace
from headrace.public import public
from headrace.store.address import open_output
from headrace.store.local import LocalStore
from headrace.store.store import CLAIM_NAME, Store
from headrace.store.upload import is_content_name

if TYPE_CHECKING:
    from headrace.store.remote import RemoteStore
    from headrace.store.uploads import UnfinishedUpload

_NAMES_SHOWN = 3
_KINDS = {
    BUILD_STATE_NAME: "an unfinished build, which the same `headrace build` would continue",
    WRITER_STATE_NAME: "an unfinished headrace.Writer, which resume=True would continue",
    COPY_STATE_NAME: "an unfinished copy, which the same `headrace copy` would continue",
}


@dataclass(frozen=True)
class Leftover:
    what: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Kept:
    what: str
    files: int
    why: str


@dataclass(frozen=True)
class CleanReport:
    place: str
    is_removed: bool
    """Whether the leftovers were removed; otherwise they were only looked for."""
    leftovers: Sequence[Leftover]
    kept: Sequence[Kept]

    @property
    def files(self) -> int:
        return sum(leftover.files for leftover in self.leftovers)

    @property
    def bytes(self) -> int:
        return sum(leftover.bytes for leftover in self.leftovers)


@public
def clean(place: str | os.PathLike[str] | Store, *, remove: bool = False) -> CleanReport:
    """Find what belongs to no dataset in a place, and remove it if asked to."""
    store = open_output(place)
    is_there = store.exists()
    if not store.is_remote and not is_there:
        raise DatasetNotFoundError(f"{store.name}: no such directory; name the directory of a dataset")
    with store.lock("headrace clean"):
        cleaning = _Cleaning(store)
        cleaning.check_nobody_at_work()
        if not is_there and not cleaning.leftovers and not cleaning.kept:
            # Only now: in a bucket, there may be unfinished uploads where no object is.
            raise DatasetNotFoundError(f"{store.name}: there is nothing there; give the address of a dataset")
        if remove:
            cleaning.remove()
        return CleanReport(store.name, remove, cleaning.leftovers, cleaning.kept)


class _Cleaning:
    """Looks at a place, whose lock the caller holds."""

    def __init__(self, store: Store) -> None:
        self._store, self._work = store, Workplace(store)
        self.leftovers: list[Leftover] = []
        self.kept: list[Kept] = []
        self._is_ours = self._has_our_folder()
        self._uploads: list[UnfinishedUpload] = []
        # First: if a manifest cannot be read, nobody knows which files belong to it.
        self._look_at_datasets()
        self._look_at_folder()
        if store.is_remote:
            self._look_at_uploads()

    def check_nobody_at_work(self) -> None:
        """Parts of a build do not hold the lock of the place."""
        if self._is_ours:
            self._work.check_nobody_at_work()

    def remove(self) -> None:
        from headrace.store.uploads import abort_upload

        for upload in self._uploads:
            abort_upload(_remote(self._store), upload)
        if self._is_ours and self._work.folder.exists():
            self._work.claim()
            self._work.remove()

    def _has_our_folder(self) -> bool:
        folder = self._work.folder
        if isinstance(folder, LocalStore) and folder.directory.is_symlink():
            return False
        return folder.has(CLAIM_NAME) or not folder.everything()

    def _look_at_datasets(self) -> None:
        current, previous = _current(self._store), _previous(self._store)
        named = _names(current)
        if current is not None:
            self._keep("the dataset", named, f"its manifest names {_them(named)}")
        only_previous = _names(previous) - named
        if previous is not None:
            them = _them(only_previous)
            self._keep(
                "the version before",
                only_previous,
                f"its readers may have {them} open; the next build that changes something removes {them}",
            )
        noted = self._work.left_in_directory() if self._is_ours else set()
        others = set(self._store.files()) - named - only_previous - noted - {MANIFEST_NAME, PREVIOUS_NAME}
        if others:
            them = _them(others)
            self._keep(_some(others), others, f"no dataset names {them}, and no writer has noted {them} here")

    def _keep(self, what: str, files: Iterable[str], why: str) -> None:
        self.kept.append(Kept(what, len(set(files)), why))

    def _look_at_folder(self) -> None:
        held = self._work.folder.everything()
        if not self._is_ours:
            why = f"it is not a folder of Headrace, since it has no {CLAIM_NAME}"
            self._keep(f"the folder {BUILD_NAME}", held, why)
            return
        if self._work.folder.exists():
            self.leftovers.append(Leftover(self._describe(held), len(held), sum(held.values())))
        present = self._work.left_in_directory().intersection(self._store.files())
        if present:
            size = sum(self._store.status(file).bytes for file in present)
            self.leftovers.append(Leftover("files that it had finished already", len(present), size))

    def _describe(self, held: dict[str, int]) -> str:
        if any(name.startswith("parts/") for name in held):
            return "parts of an unfinished build, which the missing parts and then `headrace build` would complete"
        for name, kind in _KINDS.items():
            if name in held:
                return f"{kind}{self._source_of_copy() if name == COPY_STATE_NAME else ''}"
        return f"the folder {BUILD_NAME} of a writer that had just begun, or was done"

    def _source_of_copy(self) -> str:
        try:
            state: Any = msgspec.json.decode(self._work.folder.read(COPY_STATE_NAME))
            return f" (from {state['source']})"
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def _look_at_uploads(self) -> None:
        from headrace.store.uploads import unfinished_uploads, upload_bytes

        store = _remote(self._store)
        try:
            found = unfinished_uploads(store)
            self._uploads = [upload for upload in found if self._is_our_upload(upload.key)]
            size = sum(upload_bytes(store, upload) for upload in self._uploads)
        except StorageError as error:
            self._uploads = []
            self._keep("unfinished uploads", (), f"they cannot be listed: {error}")
            return
        if self._uploads:
            self.leftovers.append(Leftover("unfinished uploads", len(self._uploads), size))
        others = {upload.key for upload in found} - {upload.key for upload in self._uploads}
        if others:
            self._keep(f"unfinished uploads of {_some(others)}", others, "not of a dataset here")

    def _is_our_upload(self, key: str) -> bool:
        """Whether only a writer of this place can have begun it, and so a dead one: this holds its lease."""
        address = _remote(self._store).address
        name = key.removeprefix(address.key(""))
        if name.startswith(f"{BUILD_NAME}/"):
            return self._is_ours
        return "/" not in name and is_content_name(name)


def _current(store: Store) -> Manifest | None:
    try:
        return read_manifest(store)
    except (DatasetNotFoundError, UnfinishedBuildError):
        return None


def _previous(store: Store) -> Manifest | None:
    try:
        return read_one_manifest(store, PREVIOUS_NAME)[1]
    except FileNotFoundError:
        return None


def _names(manifest: Manifest | None) -> set[str]:
    return {stored.file for stored in manifest.files} if manifest else set()


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown


def _them(files: set[str]) -> str:
    return "it" if len(files) == 1 else "them"


def _remote(store: Store) -> "RemoteStore":
    from headrace.store.remote import RemoteStore

    if not isinstance(store, RemoteStore):
        raise TypeError(f"{store!r} is not a store of objects")
    return store
