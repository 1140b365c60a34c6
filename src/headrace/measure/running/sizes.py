"""How much a batch holds, whatever it is made of: samples, tokens, bytes and padding.

    {"input_ids": int64 [8, 512], "attention_mask": ...}     8 samples, 4,096 tokens, padding where the mask is 0
    [("a", "b"), float32 [2, 3]]                             2 samples: fields, as default_collate returns them
    [Example, Example, Example]                              3 samples, one after the other
    7                                                        unknown

Nothing here fails: of a batch whose size cannot be found, less is known.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.load.batch import Batch

_TOKENS = ("tokens", "input_ids", "token_ids")
_MASKS = ("attention_mask", "segment_ids")
_SCALARS = (int, float, str, bytes, type(None))
_DEPTH = 6
_PROBED = 3
"""How many arrays' shapes are compared to tell batches apart."""


@dataclass(frozen=True)
class BatchSize:
    samples: int | None
    tokens: int | None
    """None if no field is known to hold tokens."""
    bytes: int


class Sizes:
    """Sizes of many batches, quickly: a batch with the shapes of an earlier one has the same size."""

    def __init__(self) -> None:
        self._probes: list[Callable[[Any], Any]] | None = None
        self._known: dict[Any, BatchSize] = {}

    def of(self, batch: Any) -> BatchSize:
        try:
            probes = self._probes
            if probes is None:
                probes = self._probes = _probes(batch)
            key = tuple([probe(batch).shape for probe in probes])
            found = self._known.get(key) if key else None
        except Exception:
            return measure_batch(batch)
        if found is None:
            found = measure_batch(batch)
            if key:
                self._known[key] = found
        return found


def _probes(batch: Any) -> list[Callable[[Any], Any]]:
    """Functions that take the first arrays out of a batch."""
    if _shape(batch) is not None:
        return [lambda batch: batch]
    keys = _keys(batch)
    arrays = [key for key in keys if _shape(batch[key]) is not None]
    others = [batch[key] for key in keys if key not in arrays]
    if not all(isinstance(value, _SCALARS) for value in others):
        # With anything else inside, such as lists, the shapes do not determine the size.
        return []
    return [operator.itemgetter(key) for key in arrays[:_PROBED]]


def _keys(batch: Any) -> list[Any]:
    """What a batch's fields can be looked up by."""
    if isinstance(batch, Mapping):
        return list(_made(batch))
    if isinstance(batch, list | tuple) and _is_fields(batch):
        return list(range(len(batch)))
    return []


def measure_batch(batch: Any) -> BatchSize:
    try:
        named = fields_of(batch)
        shape = _shape(_tokens(named))
        return BatchSize(
            samples=samples_of(batch),
            tokens=None if shape is None else math.prod(shape),
            bytes=sum(_bytes(array) for array in _arrays(batch)),
        )
    except Exception:
        return BatchSize(None, None, 0)


def samples_of(batch: Any) -> int | None:
    """How many samples a batch holds; None if that cannot be known."""
    try:
        return _samples(batch)
    except Exception:
        return None


def _samples(batch: Any) -> int | None:
    if hasattr(batch, "dtype"):
        # A tensor of uneven rows has a number for its first dimension only.
        return int(batch.shape[0]) if len(batch.shape) else None
    counted = getattr(batch, "num_graphs", None)
    if isinstance(counted, int):
        return counted
    named = fields_of(batch)
    tokens = _tokens(named)
    if tokens is not None:
        return _samples(tokens)
    if isinstance(batch, list) and not _is_fields(batch):
        return len(batch)
    has_no_names = isinstance(batch, list | tuple) and not named
    return _samples_of_fields(list(batch) if has_no_names else list(named.values()))


def _samples_of_fields(fields: Sequence[Any]) -> int | None:
    """By the first array inside, or else the first list."""
    for array in _arrays(fields):
        count = samples_of(array)
        if count is not None:
            return count
    for field in fields:
        if isinstance(field, list | tuple):
            return len(field)
    return None


def _is_fields(batch: Sequence[Any]) -> bool:
    """Whether the items of a list are fields side by side, rather than samples one after the other."""
    if isinstance(batch, tuple):
        return True
    if not batch:
        return False
    if any(_shape(each) is not None for each in batch):
        # Arrays, and perhaps other fields; samples would have no batch dimension in common.
        return True
    first = batch[0]
    if any(type(each) is not type(first) for each in batch):
        return True
    return isinstance(first, tuple | list) and _are_columns(batch)


def _are_columns(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether they are long lists of one type each, such as ("a", "b", ...) twice; samples would be ("a", 3)."""
    samples = len(lists[0])
    if samples <= len(lists):
        return False
    return all(len(each) == samples and len(set(map(type, each))) == 1 for each in lists)


def padding_share(batch: Any, pad_id: int | None = None) -> float | None:
    """The share of a batch's tokens that are padding: by `pad_id`, or by a mask or segment numbers in the batch, which
    are 0 for padding. None if that cannot be known."""
    try:
        return _padding_share(batch, pad_id)
    except Exception:
        return None


def _padding_share(batch: Any, pad_id: int | None) -> float | None:
    named = fields_of(batch)
    tokens = _tokens(named)
    if tokens is None and pad_id is not None:
        tokens = _first_integers(batch)
    count = math.prod(_shape(tokens) or (0,))
    if not count:
        return None
    if pad_id is not None:
        return int((tokens == pad_id).sum()) / count
    mask = _mask_of(tokens, named)
    return None if mask is None else int((mask == 0).sum()) / count


def _mask_of(tokens: Any, named: Mapping[str, Any]) -> Any:
    for name in _MASKS:
        mask = named.get(name)
        if mask is not None and _shape(mask) == _shape(tokens):
            return mask
    return None


def _first_integers(batch: Any) -> Any:
    """The first array that could hold tokens: whole numbers, in two dimensions."""
    for array in _arrays(batch):
        if "int" in str(array.dtype) and len(_shape(array) or ()) == 2:
            return array
    return None


def _tokens(named: Mapping[str, Any]) -> Any:
    return next((named[name] for name in _TOKENS if _shape(named.get(name)) is not None), None)


def fields_of(batch: Any) -> dict[str, Any]:
    """A batch's values by name, if it has names."""
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in _made(batch).items()}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
    if isinstance(batch, str | bytes | list | tuple | int | float) or hasattr(batch, "dtype"):
        return {}
    return dict(getattr(batch, "__dict__", {}))


def _made(batch: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Of a Loader's batch, the fields that were made: measuring must not make others."""
    return batch.made if isinstance(batch, Batch) else batch


def _arrays(value: Any, depth: int = 0) -> Iterator[Any]:
    """All arrays and tensors inside."""
    if hasattr(value, "dtype"):
        yield value
    elif depth < _DEPTH:
        named = fields_of(value)
        inner: Any = value if isinstance(value, list | tuple) and not named else named.values()
        for each in inner:
            yield from _arrays(each, depth + 1)


def _shape(value: Any) -> tuple[int, ...] | None:
    try:
        if not hasattr(value, "dtype"):
            return None
        return tuple(int(each) for each in value.shape)
    except Exception:
        # A nested tensor has no single shape.
        return None


def _bytes(array: Any) -> int:
    try:
        size = array.nbytes
    except Exception:
        return 0
    return int(size) if isinstance(size, int | np.integer) else 0
