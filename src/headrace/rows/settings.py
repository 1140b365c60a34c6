"""The settings that determine the row at each position, and what it holds; checked once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

import numpy as np

from headrace.checks import check_boolean, choice, optional_number, whole_number
from headrace.errors import SettingsError
from headrace.order.shuffle import Shuffle, ShuffleKind
from headrace.pack.overlong import Overlong
from headrace.pack.packing import Packing

TOKEN_FIELDS = (
    "tokens",
    "labels",
    "position_ids",
    "segment_ids",
    "cu_seqlens",
    "max_seqlen",
    "loss_mask",
)

_ONLY_OF_TOKENS = (
    *("packing", "overlong", "group_shards", "pack_within", "token_field", "align_documents", "boundaries"),
    *("labels", "pad_id", "ignore_index", "cu_seqlens", "max_documents"),
)

_ALIGN_NEEDS = "align_documents=True: needs packing='windows' and boundaries=True"


class Labels(StrEnum):
    SHIFTED = "shifted"
    UNSHIFTED = "unshifted"


class CuSeqlens(StrEnum):
    BATCH = "batch"
    ROW = "row"


class PackWithin(StrEnum):
    DATASET = "dataset"
    UNITS = "units"
    AUTO = "auto"


class RowOptions(TypedDict, total=False):
    """The keyword arguments that determine what a row holds; `RowSettings` says what each means."""

    seq_len: int | None
    packing: str
    shuffle: Any
    seed: int
    token_field: str | None
    fields: Iterable[str] | None
    overlong: str
    group_shards: int | None
    pack_within: str
    align_documents: bool
    boundaries: bool
    labels: str
    dtype: Any
    pad_id: int
    ignore_index: int
    max_documents: int | None


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    seq_len: int | None = None
    """Tokens per row. Without it, the records of the data are the rows."""
    packing: Packing = Packing.BEST_FIT
    shuffle: Shuffle = field(default_factory=lambda: Shuffle(kind=ShuffleKind.AUTO))
    seed: int = 0
    token_field: str | None = None
    """The field of the dataset that holds the tokens, if it is not called 'tokens'."""
    fields: tuple[str, ...] | None = None
    """The fields of a batch. By default all of them; each is made ahead once the loop has used it."""
    overlong: Overlong = Overlong.SPLIT
    """What happens to documents longer than a row: split, truncate or drop."""
    group_shards: int | None = None
    """Pack only within groups of this many shards, so that reads stay near each other."""
    pack_within: PackWithin = PackWithin.AUTO
    """Whether a row has documents of the whole dataset or of one unit; auto decides by the data and the shuffle."""
    align_documents: bool = False
    """Whether each window starts with the first document that begins in it, if there is one."""
    boundaries: bool = True
    """If False, windows ignore where documents end, as nanoGPT does; only the end of a shard still counts."""
    labels: Labels = Labels.SHIFTED
    dtype: str = "int64"
    """The type of tokens, labels and position ids: int64 or int32."""
    pad_id: int = 0
    ignore_index: int = -100
    cu_seqlens: CuSeqlens = CuSeqlens.BATCH
    """Whether boundaries are those of the whole flattened batch or of each row."""
    max_documents: int | None = None
    """The number of segments (documents and padding) that cu_seqlens has room for, so that its shape never changes."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, kind in _CHOICES.items():
            put(self, name, choice(name, getattr(self, name), kind))
        put(self, "shuffle", Shuffle.parse(self.shuffle))
        for name, (least, optional) in _NUMBERS.items():
            check = optional_number if optional else whole_number
            put(self, name, check(name, getattr(self, name), least))
        for name in ("align_documents", "boundaries"):
            check_boolean(name, getattr(self, name))
        put(self, "dtype", _dtype(self.dtype))
        self._check_ranges()
        if self.group_shards is not None and self.pack_within is PackWithin.UNITS:
            raise SettingsError(
                f"group_shards={self.group_shards} with pack_within='units': a unit is a part of one shard; give one "
                "of the two"
            )
        put(self, "fields", _record_fields(self.fields) if self.seq_len is None else _fields(self.fields))
        if self.seq_len is None:
            self._check_without_seq_len()
        if self.packing is Packing.WINDOWS:
            self._check_windows()
        else:
            self._check_documents()

    def _check_ranges(self) -> None:
        limits = np.iinfo(self.dtype)
        for name in ("pad_id", "ignore_index"):
            if not limits.min <= getattr(self, name) <= limits.max:
                raise SettingsError(f"{name}={getattr(self, name)}: does not fit into {self.dtype}")
        if self.seed >= 2**64:
            raise SettingsError(f"seed={self.seed}: must be 0 to 2^64 - 1")

    def _check_without_seq_len(self) -> None:
        """Refuse settings that only rows of tokens have."""
        given = [name for name in _ONLY_OF_TOKENS if getattr(self, name) != getattr(type(self), name)]
        if given:
            value = getattr(self, given[0])
            shown = repr(str(value) if isinstance(value, StrEnum) else value)
            raise SettingsError(
                f"{given[0]}={shown} without seq_len: this setting applies only to rows of tokens; give seq_len too"
            )

    def _check_windows(self) -> None:
        """Check what goes with packing='windows'."""
        if self.align_documents and not self.boundaries:
            raise SettingsError(_ALIGN_NEEDS)
        if self.overlong is not Overlong.SPLIT:
            raise SettingsError(
                f"overlong={str(self.overlong)!r}: windows always split documents; "
                "use packing='best-fit' or 'pad', or leave overlong out"
            )
        if self.group_shards is not None:
            raise SettingsError(
                f"group_shards={self.group_shards}: windows need no groups; "
                "use shuffle='block' to keep their reads near each other"
            )

    def _check_documents(self) -> None:
        """Check what goes with packings that make rows of documents."""
        if self.align_documents:
            raise SettingsError(_ALIGN_NEEDS)
        if not self.boundaries:
            raise SettingsError(
                "boundaries=False: needs packing='windows'; with other packings, rows are made of documents"
            )

    @property
    def token_fields(self) -> tuple[str, ...]:
        """The fields that a batch of token rows can have."""
        return self.fields or TOKEN_FIELDS

    @property
    def packing_settings(self) -> dict[str, Any]:
        """The settings that determine which tokens a row holds: a resumed run must have the same."""
        names: tuple[str, ...] = ("seq_len",)
        if self.seq_len is not None:
            names += ("token_field", "packing", "overlong", "group_shards", "align_documents")
        if self.pack_within is PackWithin.UNITS:
            names += ("pack_within",)
        chosen = {name: getattr(self, name) for name in names}
        return {name: str(value) if isinstance(value, StrEnum) else value for name, value in chosen.items()}


_CHOICES = {
    "packing": Packing,
    "pack_within": PackWithin,
    "overlong": Overlong,
    "labels": Labels,
    "cu_seqlens": CuSeqlens,
}
_NUMBERS = {
    "seq_len": (2, True),
    "seed": (0, False),
    "group_shards": (1, True),
    "max_documents": (1, True),
    "pad_id": (0, False),
    "ignore_index": (None, False),
}


def _dtype(value: Any) -> str:
    try:
        name = str(np.dtype(value).name)
    except TypeError:
        # A dtype of a framework, like torch.int32.
        name = str(value).rpartition(".")[2]
    if name not in ("int32", "int64"):
        raise SettingsError(f"dtype={value!r}: must be 'int64' or 'int32'")
    return name


def _record_fields(value: Any) -> tuple[str, ...] | None:
    """The fields of records, whose names only the dataset knows."""
    if value is None:
        return None
    asked = (value,) if isinstance(value, str) else tuple(value)
    if not asked:
        raise SettingsError("fields=(): must name at least one field; leave fields out to get all of them")
    return asked


def _fields(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    asked = (value,) if isinstance(value, str) else tuple(value)
    unknown = [name for name in asked if name not in TOKEN_FIELDS]
    if unknown or not asked:
        raise SettingsError(f"fields={asked!r}: must be some of {', '.join(TOKEN_FIELDS)}")
    return tuple(name for name in TOKEN_FIELDS if name in asked)
