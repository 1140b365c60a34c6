"""The map-style dataset: `len(ds)`, `ds[i]`, `ds[[i, j, k]]`, over any list of parts.

A part holds some records, field by field: a shard, arrays in RAM, a file of another system. Parts are loaded on first
use, so a dataset of thousands of shards opens at once, and each process maps its own. At most `MOST_PARTS` of them
stay loaded. A part that was let go of is still shared with whoever uses it, and only loaded again when nobody does.
"""

import contextlib
import operator
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CorruptError, FieldError
from headrace.format.fields import Field, FieldKind
from headrace.format.index import LengthTable
from headrace.format.manifest import Manifest
from headrace.format.ragged import Ragged
from headrace.format.shard import Column
from headrace.order.distinct import distinct

MOST_PARTS = 16_384
"""How many parts stay loaded. A process can usually have 65,530 maps."""

Histogram = tuple[NDArray[Any], NDArray[Any]]
"""Distinct lengths, ascending, and how many records have each."""


class Part(Protocol):
    def __getitem__(self, name: str) -> Column: ...


class PartSource(Protocol):
    """Where a dataset's parts come from. Pickling a dataset pickles its source."""

    @property
    def name(self) -> str: ...
    @property
    def fields(self) -> Mapping[str, Field]: ...
    @property
    def part_records(self) -> Sequence[int]: ...
    @property
    def elements(self) -> Mapping[str, int]: ...
    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def fingerprint(self) -> str: ...
    def part_elements(self, field: str) -> Sequence[int]: ...
    def load_part(self, number: int) -> Part: ...
    def histogram(self, field: str) -> Histogram: ...
    def length_table(self, field: str) -> LengthTable: ...


class Dataset:
    """Records by number. Values are read-only views of the mapped files, except bytes, which are copies."""

    def __init__(self, source: PartSource) -> None:
        self._source = source
        self._starts = np.concatenate([[0], np.cumsum(source.part_records, dtype=np.int64)]).astype(np.int64)
        self._starts_list: list[int] = self._starts.tolist()
        self._parts: list[Part | None] = [None] * len(source.part_records)
        self._alive: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        """The parts that someone uses, even if they are not in `_parts` any more."""
        self._loading_order: deque[int] = deque()
        self.most_parts: int = getattr(source, "most_parts", MOST_PARTS)
        self._fields = dict(source.fields)

    # What it is

    @property
    def source(self) -> PartSource:
        """Where the parts come from: a directory, arrays in RAM, or a file of another system."""
        return self._source

    @property
    def fields(self) -> Mapping[str, Field]:
        return dict(self._fields)

    @property
    def manifest(self) -> Manifest | None:
        """The contents of `headrace.json`; None for arrays and files of other systems."""
        return self._source.manifest

    @property
    def fingerprint(self) -> str:
        """A checksum of the content, which does not depend on where the dataset is stored."""
        return self._source.fingerprint

    @property
    def token_field(self) -> str:
        """The ragged field that holds tokens: the one called 'tokens', or the only one there is."""
        ragged = [name for name, field in self._fields.items() if field.kind is FieldKind.RAGGED]
        if "tokens" in ragged:
            return "tokens"
        if len(ragged) == 1:
            return ragged[0]
        if ragged:
            several = ", ".join(map(repr, ragged))
            problem = f"there is no field 'tokens', and any of {several} might be meant; choose one with token_field"
        else:
            problem = self._why_no_tokens()
        raise FieldError(f"{self._source.name}: {problem}")

    def _why_no_tokens(self) -> str:
        fixed = self._fields.get("tokens")
        if fixed is not None and fixed.kind is FieldKind.FIXED:
            return (
                f"the field 'tokens' is {fixed.notation}, but packing needs documents of any length, like "
                f"{fixed.dtype}[*]; leave seq_len out to load the records as they are"
            )
        return (
            f"there is no field of tokens among {self._names()}; to get tokens from text, build with a tokenizer "
            "(headrace build ... --tokenizer bytes, or a tokenizer.json). Or leave seq_len out to load the records as "
            "they are, or name the field that holds tokens with token_field"
        )

    @property
    def num_tokens(self) -> int:
        return self._source.elements[self.token_field]

    @property
    def num_elements(self) -> Mapping[str, int]:
        """For each field, the number of its elements in all records (the number of records if the shape is fixed)."""
        return dict(self._source.elements)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of every record. This reads all offsets; `length_histogram` is cheaper."""
        return self.lengths_of(self.token_field)

    def lengths_of(self, field: str) -> NDArray[np.int64]:
        self._check_variable(field)
        columns = (self.part(number)[field] for number in range(len(self._parts)))
        return join_lengths(columns, self._source.name)

    def length_histogram(self, field: str | None = None) -> Histogram:
        """Distinct lengths and their counts, from the stored histograms; no record is read."""
        field = self.token_field if field is None else field
        self._check_variable(field)
        return self._source.histogram(field)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {field.notation}" for name, field in self._fields.items())
        ragged = [n for n, f in self._fields.items() if f.kind is FieldKind.RAGGED]
        amount = "".join(f", {self._source.elements[name]:,} {name}" for name in ragged)
        return f"Dataset({self._source.name!r}, {len(self):,} records{amount}, fields {{{fields}}})"

    # Reading

    def __len__(self) -> int:
        return self._starts_list[-1]

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """One record as a dict; for a slice or a list of numbers, one dict of columns."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return (
                self._stretch(start, stop)
                if step == 1
                else self.batch(np.arange(start, stop, step, dtype=np.int64))
            )
        if isinstance(index, (list, tuple, range)) or (isinstance(index, np.ndarray) and index.ndim):
            return self.batch(index)
        return self._record(_whole_number(index))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._record(number) for number in range(len(self)))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """What a PyTorch DataLoader calls for a batch: a list of records for its collate function.

        They are gathered in one call, and are writable, as PyTorch requires.
        """
        columns = self.batch([_whole_number(index) for index in indices])
        return [{name: column[row] for name, column in columns.items()} for row in range(len(indices))]

    def batch(self, indices: Any) -> dict[str, Any]:
        """Many records in one call, as a dict of columns: stacked arrays for fixed fields, a Ragged for ragged fields,
        and a list for bytes. All of them are copies.
        """
        numbers = self._check_indices(indices)
        parts = np.searchsorted(self._starts, numbers, side="right") - 1
        local = numbers - self._starts[parts]
        groups = [(part, np.flatnonzero(parts == part)) for part in distinct(parts)]
        return {name: self._gather(name, field, groups, local) for name, field in self._fields.items()}

    def part(self, number: int) -> Part:
        part = self._parts[number]
        return self._load(number) if part is None else part

    def _load(self, number: int) -> Part:
        # Two threads may both load a part; either map will do, and the other is released.
        part = self._alive.get(number)
        if part is None:
            part = self._source.load_part(number)
            with contextlib.suppress(TypeError):
                # A plain dict, whose arrays are in RAM, can have no weak reference.
                self._alive[number] = part
        self._parts[number] = part
        self._loading_order.append(number)
        while len(self._loading_order) > self.most_parts:
            self._parts[self._loading_order.popleft()] = None
        return part

    def _record(self, number: int) -> dict[str, Any]:
        count = self._starts_list[-1]
        if not -count <= number < count:
            raise IndexError(f"index {number} is out of range for a dataset of {count} records")
        number = number + count if number < 0 else number
        where = bisect_right(self._starts_list, number) - 1
        part, local = self.part(where), number - self._starts_list[where]
        return {name: _item(part[name], local, field) for name, field in self._fields.items()}

    def _gather(
        self, name: str, field: Field, groups: list[tuple[int, NDArray[Any]]], local: NDArray[np.int64]
    ) -> Any:
        if field.variable:
            items: list[Any] = [None] * len(local)
            for part, where in groups:
                column = self.part(part)[name]
                for place, number in zip(where.tolist(), local[where].tolist(), strict=True):
                    items[place] = _item(column, number, field)
            if field.kind is FieldKind.BYTES:
                return items
            return Ragged.from_items(items, field.numpy_dtype, field.shape)
        out = np.empty((len(local), *field.shape), dtype=field.numpy_dtype)
        for part, where in groups:
            out[where] = self.part(part)[name][local[where]]
        return out

    def _stretch(self, start: int, stop: int) -> dict[str, Any]:
        """Consecutive records: views if they are all in one part, else a copy."""
        where = bisect_right(self._starts_list, start) - 1
        if start >= stop or stop > self._starts_list[where + 1]:
            return self.batch(np.arange(start, stop, dtype=np.int64))
        part, first, last = (
            self.part(where),
            start - self._starts_list[where],
            stop - self._starts_list[where],
        )
        return {name: _items(part[name], first, last, field) for name, field in self._fields.items()}

    def _check_indices(self, indices: Any) -> NDArray[np.int64]:
        try:
            numbers = np.asarray(indices)
        except ValueError:
            raise TypeError(
                "indices are lists of different lengths: must be a list of whole numbers"
            ) from None
        if numbers.size == 0:
            numbers = numbers.astype(np.int64)
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            raise TypeError(
                f"indices of dtype {numbers.dtype} and shape {numbers.shape}: must be a list of whole numbers"
            )
        count = len(self)
        # Checked before any conversion: 2^64 - 1 as int64 would be -1, the last record.
        bad = (numbers < -count) | (numbers >= count)
        if bad.any():
            raise IndexError(f"index {numbers[bad][0]} is out of range for a dataset of {count} records")
        numbers = numbers.astype(np.int64)
        return np.where(numbers < 0, numbers + count, numbers)

    def _check_variable(self, field: str) -> None:
        if not isinstance(field, str) or field not in self._fields:
            raise FieldError(
                f"{self._source.name}: there is no field {field!r}; the fields are {self._names()}"
            )
        if not self._fields[field].variable:
            raise FieldError(f"{self._source.name}: field {field!r} has a fixed shape, so it has no lengths")

    def _names(self) -> str:
        return ", ".join(f"{name!r} ({field.notation})" for name, field in self._fields.items())

    # Only the source is pickled: another process opens the files itself.

    def __reduce__(self) -> tuple[Callable[..., "Dataset"], tuple[Any, ...]]:
        return Dataset, (self._source,)


def join_lengths(columns: Iterable[Column], name: str) -> NDArray[np.int64]:
    """The lengths of all records of a variable field, checked, since this is what reads all offsets at once."""
    lengths = np.concatenate([np.empty(0, np.int64), *(c.lengths for c in columns if isinstance(c, Ragged))])
    if lengths.min(initial=0) < 0:
        raise CorruptError(f"{name}: the offsets are damaged: they decrease; run `headrace verify`")
    return lengths


def _whole_number(index: Any) -> int:
    # True and False would be records 1 and 0, which nobody wants.
    if not isinstance(index, bool | np.bool_):
        with contextlib.suppress(TypeError):
            return operator.index(index)
    raise TypeError(f"index {str(index)[:80]!r}: must be a whole number, a slice or a list of numbers")


def _item(column: Column, number: int, field: Field) -> Any:
    if not isinstance(column, Ragged):
        return column[number]
    offsets = column.offsets
    start, stop = int(offsets[number]), int(offsets[number + 1])
    if not start <= stop <= len(column.values):
        raise CorruptError(
            f"the offsets of record {number} are damaged ({start} to {stop}); run `headrace verify`"
        )
    values = column.values[start:stop]
    return values.tobytes() if field.kind is FieldKind.BYTES else values


def _items(column: Column, first: int, last: int, field: Field) -> Any:
    if not isinstance(column, Ragged):
        return column[first:last]
    if field.kind is FieldKind.BYTES:
        return [_item(column, number, field) for number in range(first, last)]
    offsets = column.offsets[first : last + 1].astype(np.int64)
    if (np.diff(offsets) < 0).any() or not 0 <= offsets[0] <= offsets[-1] <= len(column.values):
        raise CorruptError(f"the offsets of records {first} to {last} are damaged; run `headrace verify`")
    return Ragged(column.values[offsets[0] : offsets[-1]], offsets - offsets[0])
