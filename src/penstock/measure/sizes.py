"""How much a batch holds, whatever it is made of: samples, tokens, bytes and padding.

{"input_ids": int64 [8, 512], "attention_mask": ...}     8 samples, 4,096 tokens, padding where the mask is 0
(float32 [32, 3, 224, 224], int64 [32])                  32 samples, no tokens
[Example, Example, ...]                                  as many samples as the list is long
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_TOKENS = ("tokens", "input_ids", "token_ids")
_MASKS = ("attention_mask", "segment_ids")
_DEPTH = 6


@dataclass(frozen=True)
class BatchSize:
    samples: int
    tokens: int | None
    """None: nothing in it is known to be tokens."""
    bytes: int


def measure_batch(batch: Any) -> BatchSize:
    named = fields_of(batch)
    arrays = list(_arrays(batch))
    tokens = _tokens(named)
    shape = _shape(tokens)
    return BatchSize(
        samples=_samples(batch, named, arrays, tokens),
        tokens=None if shape is None else math.prod(shape),
        bytes=sum(_bytes(array) for array in arrays),
    )


def padding_share(batch: Any, pad_id: int | None = None) -> float | None:
    """The share of a batch's tokens that are padding, by what it says itself: a mask, or segments of which 0 is none;
    or by `pad_id`. None: nobody knows."""
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
        return {str(name): value for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
    return {}


def _arrays(value: Any, depth: int = 0) -> Iterator[Any]:
    """All arrays and tensors inside."""
    if _shape(value) is not None:
        yield value
    elif depth < _DEPTH and not isinstance(value, str | bytes):
        named = fields_of(value)
        inner: Any = value if isinstance(value, list | tuple) and not named else named.values()
        for each in inner:
            yield from _arrays(each, depth + 1)


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        return None
    try:
        return tuple(int(each) for each in shape)
    except (TypeError, ValueError):
        return None


def _bytes(array: Any) -> int:
    size = getattr(array, "nbytes", None)
    return int(size) if isinstance(size, int | np.integer) else 0


def _is_whole_numbers(array: Any) -> bool:
    return "int" in str(getattr(array, "dtype", "")) and len(_shape(array) or ()) == 2


def _samples(batch: Any, named: Mapping[str, Any], arrays: list[Any], tokens: Any) -> int:
    if isinstance(batch, list) and not (batch and _shape(batch[0]) is not None):
        return len(batch)
    first = tokens if tokens is not None else next((array for array in arrays if _shape(array)), None)
    if first is not None:
        return (_shape(first) or (1,))[0]
    lists = [value for value in named.values() if isinstance(value, list | tuple)]
    return len(lists[0]) if lists else 1
