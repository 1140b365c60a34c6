"""`headrace.open`: find out what is at a path, and open it."""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from headrace.dataset.dataset import Dataset
from headrace.dataset.megatron import MegatronPair
from headrace.dataset.nanogpt import DEFAULT_DTYPE, NanogptFile
from headrace.dataset.neighbour import NeighbourSource
from headrace.dataset.stored import StoredSource
from headrace.dataset.units import UnitSource
from headrace.errors import DatasetNotFoundError, FormatError, SettingsError
from headrace.format.manifest import MANIFEST_NAME
from headrace.public import public
from headrace.store.address import open_store, split_place
from headrace.store.cache import open_cache
from headrace.store.store import Store


@public
def open_dataset(
    path: str | os.PathLike[str] | Store,
    *,
    in_memory: bool = False,
    verify: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | str | None = None,
    dtype: Any = None,
    eos_id: int | None = None,
) -> Dataset:
    """Open a dataset. This reads only the manifest; shards are checked and mapped on first use.

    Args:
        path: The directory of a dataset, the address of a store (`memory://name`), or a store; or a file of another
            system, which is used in place: a Megatron pair (its prefix, its `.bin` or its `.idx`), or a nanoGPT `.bin`
            of raw tokens. The first time, an index is written next to such a file, as `<name>.headrace-index`;
            of a file in an object store, it is made in memory each time.
        in_memory: Read everything into RAM first, for data that fits in memory.
        verify: "reads" checks every part of a local dataset when it is first touched, so that a damaged file is noticed
            before its bytes reach a batch. Remote data is always checked in this way.
        cache: The directory in which data that was fetched is kept; by default `HEADRACE_CACHE`, or else
            `~/.cache/headrace`. "off" keeps nothing.
        cache_bytes: How large the cache may become, as a number or like "200GB"; by default `HEADRACE_CACHE_BYTES`, or
            a share of the disk.
        dtype: The type of the tokens in a `.bin` of raw tokens, "uint16" by default.
        eos_id: The token that ends a document in a `.bin` of raw tokens. Without it, the whole file is one document.

    Returns:
        A `Dataset`: `len(ds)`, `ds[i]`, `ds[-5:]`, `ds[[i, j, k]]`, iteration.
    """
    if not isinstance(path, str | os.PathLike) and not hasattr(path, "exists"):
        raise SettingsError(f"path={path!r}: must be a path, an address or a store")
    if verify not in (None, "reads"):
        raise SettingsError(f"verify={verify!r}: must be 'reads', or None")
    store = open_store(path)
    if store.is_remote and dtype is None and eos_id is None:
        # Without looking around first: each look is a request.
        with contextlib.suppress(DatasetNotFoundError):
            return _open_stored(store, in_memory, verify, cache, cache_bytes)
    neighbour = find_neighbour(path, dtype, eos_id) if isinstance(path, str | os.PathLike) else None
    if neighbour is not None:
        return Dataset(NeighbourSource(neighbour, in_memory))
    if _is_directory(store):
        _refuse_raw_settings(store.name, "a Headrace dataset", dtype, eos_id)
    return _open_stored(store, in_memory, verify, cache, cache_bytes)


def _open_stored(
    store: Store,
    in_memory: bool,
    verify: str | None,
    cache: str | os.PathLike[str] | None,
    cache_bytes: int | str | None,
) -> Dataset:
    if in_memory:
        return Dataset(StoredSource(store, in_memory))
    if store.is_remote:
        return Dataset(UnitSource(store, open_cache(cache, cache_bytes)))
    return Dataset(StoredSource(store) if verify is None else UnitSource(store))


# It is `headrace.open`, and `help` and errors call it so.
open_dataset.__name__ = open_dataset.__qualname__ = "open"


def find_neighbour(
    path: str | os.PathLike[str], dtype: Any = None, eos_id: int | None = None
) -> MegatronPair | NanogptFile | None:
    """The files of another system at a path; None if the path is a directory or does not exist."""
    if _is_directory(open_store(path)):
        return None
    named = _NamedFile(*split_place(path))
    exists = named.store.has(named.file)
    # A dtype marks a file of any name as raw tokens, even if an .idx lies beside it.
    is_marked_raw = exists and dtype is not None and not named.file.endswith((".bin", ".idx"))
    if named.store.has(named.idx) and not is_marked_raw:
        what = "a Megatron pair, whose .idx states its dtype and documents"
        _refuse_raw_settings(str(path), what, dtype, eos_id)
        return named.pair()
    if is_marked_raw or (exists and named.file.endswith(".bin")):
        return NanogptFile(named.store, named.file, DEFAULT_DTYPE if dtype is None else dtype, eos_id)
    named.refuse_if_there(path)
    return None


def _is_directory(store: Store) -> bool:
    """Whether a place holds files. A web server does not tell a folder from a file: there, the manifest decides."""
    return store.exists() or (store.is_remote and store.has(MANIFEST_NAME))


@dataclass(frozen=True)
class _NamedFile:
    """A file that a user has named, and the Megatron pair that the name may mean."""

    store: Store
    file: str

    @property
    def _prefix(self) -> str:
        return self.file[:-4] if self.file.endswith((".bin", ".idx")) else self.file

    @property
    def tokens(self) -> str:
        return f"{self._prefix}.bin"

    @property
    def idx(self) -> str:
        return f"{self._prefix}.idx"

    def pair(self) -> MegatronPair:
        if not self.store.has(self.tokens):
            raise DatasetNotFoundError(
                f"{self.store.locate(self.tokens)}: missing, although {self.idx} exists; a Megatron pair needs both"
            )
        return MegatronPair(self.store, self.tokens)

    def refuse_if_there(self, path: str | os.PathLike[str]) -> None:
        """Say what is missing, if there is something at a path that cannot be opened."""
        if self.file == MANIFEST_NAME and self.store.has(self.file):
            raise FormatError(f"{path}: is the manifest of a dataset; did you mean {self.store.name}?")
        if self.store.has(self.file):
            raise FormatError(
                f"{path}: not a dataset; give the directory of a dataset, a Megatron prefix, or a .bin of raw tokens "
                "(for a file with another ending, give dtype too)"
            )
        if self.store.has(self.tokens):
            raise DatasetNotFoundError(
                f"{self.store.locate(self.idx)}: missing; a Megatron pair needs it. "
                f"To open a file of raw tokens, give {self.store.locate(self.tokens)}"
            )


def _refuse_raw_settings(path: str, what: str, dtype: Any, eos_id: int | None) -> None:
    for name, value in (("dtype", dtype), ("eos_id", eos_id)):
        if value is not None:
            raise SettingsError(
                f"{name}={value!r}: {path} is {what}; {name} applies only to files of raw tokens, so leave it out"
            )
