"""A batch: arrays by name, as attributes and as a mapping, and the forms that trainers expect.

batch.tokens, batch["tokens"], model(**batch.as_huggingface())

Some arrays may be created only on first access; see fields.py.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FieldError, SettingsError
from headrace.rows.fields import Fields, late_fields, made_names, names_of


class BatchInfo(NamedTuple):
    """A batch's place in the stream: `rows` rows from `position` on, at step number `step` of its iteration.

    If shuffle="units" and there are several ranks, each rank takes the rows of its own lanes, so others may come in
    between. Then `dealt` has the positions of all rows of the batch, and `position` is the first of them.
    """

    step: int
    position: int
    rows: int
    labels: str = "shifted"
    ignore_index: int = -100
    dealt: tuple[int, ...] | None = None

    @property
    def positions(self) -> NDArray[np.int64]:
        """The positions of the batch's rows in the stream, in ascending order."""
        if self.dealt is None:
            return np.arange(self.position, self.position + max(0, self.rows))
        return np.array(self.dealt, dtype=np.int64)


NOWHERE = BatchInfo(step=-1, position=-1, rows=-1, labels="unknown")
"""Of a batch that someone else has made: trainers copy one with `type(batch)({name: ... for name in batch})`."""


class Batch(Mapping[str, Any]):
    __slots__ = ("_convert", "_fields", "_values", "info")

    def __init__(
        self,
        fields: dict[str, Any],
        info: BatchInfo = NOWHERE,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        """`convert` turns a field into what the user gets, such as a tensor, when it is first accessed."""
        self._fields, self._convert = fields, convert
        self._values = fields if convert is None else {}
        self.info = info

    @property
    def made(self) -> Mapping[str, Any]:
        """The fields that exist already. Reading these creates no others, so none of those counts as used."""
        return {name: self[name] for name in made_names(self._fields)}

    def __getitem__(self, name: str) -> Any:
        values, fields = self._values, self._fields
        if name in values:
            return values[name]
        if name not in fields and name not in self:
            raise FieldError(f"this batch has no {name!r}; it has {', '.join(map(str, self))}")
        value = fields[name]
        if self._convert is not None:
            value = values[name] = self._convert(value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except FieldError as error:
            raise AttributeError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(names_of(self._fields))

    def __len__(self) -> int:
        return len(names_of(self._fields))

    def __contains__(self, name: object) -> bool:
        return name in names_of(self._fields)

    def __repr__(self) -> str:
        # Printing a batch does not count as using its fields.
        made = self.made
        held = (f"{name}: {_describe(made[name]) if name in made else 'created on use'}" for name in self)
        return f"Batch({', '.join(held)})"

    # By identity, like any object: comparing arrays gives one result for each element.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.info)

    def replace(self, fields: dict[str, Any]) -> "Batch":
        """A batch with other contents at the same place in the stream."""
        return type(self)(fields, self.info)

    def to(self, device: Any, **options: Any) -> "Batch":
        """Call `tensor.to(device, ...)` for each tensor of the batch.

        A field that has not been used yet is moved when it is first accessed.
        """
        made, late = self.made, late_fields(self._fields)
        if not any(hasattr(value, "to") for value in made.values()):
            raise SettingsError(
                f"to({device!r}): this batch holds NumPy arrays; use headrace.torch.Loader to get tensors"
            )
        convert = self._convert or (lambda value: value)

        def move(value: Any) -> Any:
            return value.to(device, **options) if hasattr(value, "to") else value

        moved = {name: move(value) for name, value in made.items()}
        if late is not None:
            moved = Fields(self, lambda name: move(convert(late[name])), moved)
        return self.replace(moved)

    # What trainers expect

    def as_huggingface(self) -> dict[str, Any]:
        """A padding-free batch like that of `DataCollatorWithFlattening`: all rows in one, with explicit boundaries.

        Labels are unshifted, since the models shift them. The padding of a row is a sequence without labels.
        """
        tokens = self["tokens"].reshape(1, -1)
        positions = self["position_ids"].reshape(1, -1)
        bounds, longest = self._flat_bounds()
        if self.info.labels == "unshifted" and "labels" in self:
            labels = self["labels"].reshape(1, -1)
        else:
            unknown = (positions == 0) | (self["segment_ids"].reshape(1, -1) == 0)
            labels = _module(tokens).where(unknown, self.info.ignore_index, tokens)
        batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        if "segment_ids" in self:
            batch["seq_idx"] = _sequence_numbers(positions)
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        return batch | {"max_length_q": longest, "max_length_k": longest}

    def as_flash_attention(self) -> dict[str, Any]:
        """All fields flattened, with the boundaries that `flash_attn_varlen_func` takes."""
        bounds, longest = self._flat_bounds()
        flat = {
            name: self[name].reshape(-1)
            for name in ("tokens", "labels", "position_ids", "loss_mask")
            if name in self
        }
        ends = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        return flat | ends | {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def as_megatron(self) -> dict[str, Any]:
        """The fields of a Megatron batch: shifted labels, and the loss mask as float32."""
        if self.info.labels != "shifted":
            raise SettingsError(
                f"as_megatron(): needs labels='shifted', but the labels of this batch are {self.info.labels!r}"
            )
        names = ("tokens", "labels", "position_ids", "cu_seqlens", "max_seqlen")
        batch = {name: self[name] for name in names}
        mask = self["loss_mask"]
        module = _module(mask)
        batch["loss_mask"] = mask.to(module.float32) if hasattr(mask, "to") else mask.astype(module.float32)
        return batch

    def _flat_bounds(self) -> tuple[Any, int]:
        bounds = self["cu_seqlens"]
        if len(bounds.shape) != 1:
            raise SettingsError("this form needs cu_seqlens='batch', but this Loader has cu_seqlens='row'")
        return bounds, self["max_seqlen"]


def _module(array: Any) -> Any:
    """The module that the array belongs to: numpy, torch or jax.numpy."""
    name = type(array).__module__.partition(".")[0]
    return importlib.import_module("jax.numpy" if name in ("jax", "jaxlib") else name)


def _sequence_numbers(positions: Any) -> Any:
    """0 for the first sequence, 1 for the second, and so on; a sequence starts where its positions restart at 0."""
    module = _module(positions)
    starts = positions == 0
    if module.__name__ == "torch":
        return (starts.cumsum(1) - 1).to(module.int32)
    return (module.cumsum(starts, axis=1) - 1).astype(module.int32)


def _describe(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).rpartition('.')[2]}{list(value.shape)}"
    return repr(value) if isinstance(value, int | float) else type(value).__name__
