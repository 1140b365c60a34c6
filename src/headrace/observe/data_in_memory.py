"""What a user's dataset holds in memory, by the names of its attributes.

    class Images: self.pixels = np.load("x.npy", mmap_mode="r"); self.names = [...]
    data_in_memory(images)  ->  [DataPiece("pixels", 12e9 bytes, a memory map), DataPiece("names", 2e8 bytes, objects)]

It looks at a bounded number of objects, and estimates the size of long collections from some of their items.
"""

import itertools
import mmap
import sys
import types
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from headrace.dataset.dataset import Dataset

_MOST_LOOKED_AT = 400
_FEW = 32
"""Of a longer collection, only about this many items are looked at."""
_PLAIN = (str, bytes, int, float, bool, complex, type(None))
_COLLECTIONS = (list, tuple, dict, set, frozenset)
"""Not every mapping: iterating over one may read a database."""
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class DataKind(StrEnum):
    MAP = "memory map"
    ARRAY = "array"
    OBJECTS = "Python objects"


@dataclass(frozen=True)
class DataPiece:
    name: str
    bytes: int
    kind: DataKind


def data_in_memory(thing: Any, least_bytes: int = 0) -> list[DataPiece]:
    """Arrays and collections, the largest first. Objects that define how they are pickled are not looked into."""
    found: list[DataPiece] = []
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque([("", thing)])
    for _ in range(_MOST_LOOKED_AT):
        if not waiting:
            break
        name, value = waiting.popleft()
        if id(value) in seen or isinstance(value, (*_PLAIN, *_CODE)):
            continue
        seen.add(id(value))
        piece = _piece(name or type(value).__name__, value)
        if piece is None:
            waiting.extend(_inside(name, value))
        elif piece.bytes >= least_bytes:
            found.append(piece)
    return sorted(found, key=lambda piece: -piece.bytes)


def _piece(name: str, value: Any) -> DataPiece | None:
    """An array or a long collection; None of anything else, which is looked into."""
    if isinstance(value, np.ndarray):
        kind = DataKind.MAP if is_mapped(value) else DataKind.ARRAY
        return DataPiece(name, value.nbytes, kind)
    if isinstance(value, _COLLECTIONS) and len(value) > _FEW:
        return _long_collection(name, value)
    return None


def is_mapped(array: Any) -> bool:
    """Whether an array, or what it is a view of, is a memory-mapped file."""
    while array is not None:
        if isinstance(array, mmap.mmap):
            return True
        if isinstance(array, np.memmap) and getattr(array, "_mmap", None) is not None:
            return True
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return False


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", each) for key, each in value.items()]
    if isinstance(value, _COLLECTIONS):
        return [(f"{name}[{number}]", each) for number, each in enumerate(value)]
    if isinstance(value, Dataset):
        return [(_dotted(name, "source"), value.source)]
    if _pickles_itself(type(value)):
        return []
    return [(_dotted(name, key), each) for key, each in attributes_of(value).items()]


def attributes_of(value: Any) -> dict[str, Any]:
    try:
        own = dict(vars(value))
    except TypeError:
        own = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                own[slot] = getattr(value, slot)
    return own


def _pickles_itself(kind: type) -> bool:
    if hasattr(kind, "__dataclass_fields__"):
        return False
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(getattr(kind, name, None) is not getattr(object, name, None) for name in names)


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _long_collection(name: str, value: Any) -> DataPiece:
    """Judged by some of its items."""
    some = _some_of(value)
    kind = _kind_of_most(some)
    own = 0 if kind is DataKind.MAP else sys.getsizeof(value)
    seen = sum(_size(each, 2) for each in some)
    return DataPiece(name, own + seen * len(value) // max(1, len(some)), kind)


def _some_of(value: Any) -> list[Any]:
    """Items from all over a list, or the first ones of what cannot be indexed."""
    if isinstance(value, list | tuple):
        every = max(1, len(value) // _FEW)
        return [value[number] for number in range(0, len(value), every)]
    items = value.items() if isinstance(value, dict) else value
    return list(itertools.islice(items, _FEW))


def _kind_of_most(items: list[Any]) -> DataKind:
    arrays = [each for each in items if isinstance(each, np.ndarray)]
    maps = [array for array in arrays if is_mapped(array)]
    if 2 * len(maps) > len(items):
        return DataKind.MAP
    if 2 * len(arrays) > len(items):
        return DataKind.ARRAY
    return DataKind.OBJECTS


def _size(value: Any, depth: int) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    size = sys.getsizeof(value, 0)
    if depth and isinstance(value, _COLLECTIONS):
        inner = [each for pair in value.items() for each in pair] if isinstance(value, dict) else list(value)
        some = inner[:_FEW]
        size += sum(_size(each, depth - 1) for each in some) * len(inner) // max(1, len(some))
    return size
