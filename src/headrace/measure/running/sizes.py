"""How much a batch holds, whatever it is made of: samples, tokens, bytes and padding.

    {"input_ids": int64 [8, 512], "attention_mask": ...}     8 samples, 4,096 tokens, padding where the mask is 0
    [("a", "b"), float32 [2, 3]]                             2 samples: fields, as default_collate gives them
    [Example, Example, Example]                              3 samples, one after the other
    7                                                        nobody knows

Nothing here fails: a batch that cannot be sized is one of which less is known.
"""

import dataclasses
import math
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
"""Arrays of a batch whose shapes tell it from others."""


@dataclass(frozen=True)
class BatchSize:
    samples: int | None
    tokens: int | None
    """None: nothing in it is known to be tokens."""
    bytes: int


class Sizes:
    """Sizes of many batches, quickly: one that has the shapes of an earlier one is as large."""

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
    """Ways to the first arrays of a batch."""
    if _shape(batch) is not None:
        return [lambda batch: batch]
    keys: list[Any] = list(_made(batch)) if isinstance(batch, Mapping) else []
    if isinstance(batch, list | tuple) and _is_fields(batch):
        keys = list(range(len(batch)))
    found = [key for key in keys if _shape(batch[key]) is not None]
    if not all(key in found or isinstance(batch[key], _SCALARS) for key in keys):
        # With anything else inside, such as lists, shapes do not tell all.
        return []
    return [lambda batch, key=key: batch[key] for key in found[:_PROBED]]  # type: ignore[misc]


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
    """How many samples a batch holds, as far as it tells; None if it does not."""
    try:
        return _samples(batch)
    except Exception:
        return None


def _samples(batch: Any, depth: int = 0) -> int | None:
    if hasattr(batch, "dtype"):
        # Of tensors of uneven rows only the first dimension is a number.
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
    fields = list(batch) if isinstance(batch, list | tuple) and not named else list(named.values())
    arrays = next((count for array in _arrays(fields) if (count := samples_of(array)) is not None), None)
    if arrays is not None or depth > _DEPTH:
        return arrays
    return next((len(each) for each in fields if isinstance(each, list | tuple)), None)


def _is_fields(batch: Sequence[Any]) -> bool:
    """Whether the items of a list are fields side by side, and not samples one after the other."""
    if isinstance(batch, tuple) or not batch:
        return isinstance(batch, tuple)
    if any(_shape(each) is not None for each in batch):
        # Arrays, and perhaps other fields; samples would have no batch dimension in common.
        return True
    if any(type(each) is not type(batch[0]) for each in batch):
        return True
    # Texts of two fields, ("a", "b", ...) twice; samples of two kinds would be ("a", 3).
    return isinstance(batch[0], tuple | list) and all(
        len(each) == len(batch[0]) > len(batch) and len({type(item) for item in each}) == 1 for each in batch
    )


def padding_share(batch: Any, pad_id: int | None = None) -> float | None:
    """The share of a batch's tokens that are padding, by what it says itself: a mask, or segments of which 0 is none;
    or by `pad_id`. None: nobody knows."""
    try:
        return _padding_share(batch, pad_id)
    except Exception:
        return None


def _padding_share(batch: Any, pad_id: int | None) -> float | None:
    named = fields_of(batch)
    tokens = _tokens(named)
    if tokens is None and pad_id is not None:
        tokens = next((array for array in _arrays(batch) if _is_whole_numbers(array)), None)
    count = math.prod(_shape(tokens) or (0,))
    if not count:
        return None
    if pad_id is not None:
        return int((tokens == pad_id).sum()) / count
    for name in _MASKS:
        mask = named.get(name)
        if mask is not None and _shape(mask) == _shape(tokens):
            return int((mask == 0).sum()) / count
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
    """Of a Loader's batch, what was made: to measure a field is not to use it."""
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
        # Nested tensors have no one shape.
        return None


def _bytes(array: Any) -> int:
    try:
        size = array.nbytes
    except Exception:
        return 0
    return int(size) if isinstance(size, int | np.integer) else 0


def _is_whole_numbers(array: Any) -> bool:
    return "int" in str(getattr(array, "dtype", "")) and len(_shape(array) or ()) == 2
