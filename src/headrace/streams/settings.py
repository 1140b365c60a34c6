"""What decides the records of a stream and their order, apart from its inputs; checked once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from headrace.errors import SettingsError
from headrace.readers.reader import InputFormat, Split
from headrace.readers.spans import RecordOptions

SMALLEST_BLOCK, LARGEST_BLOCK = 2**16, 2**24
_BLOCKS_WANTED = 256


class CsvCuts(StrEnum):
    """How a reader finds out whether the byte at which its block begins lies inside quotes."""

    LOCAL = "local"
    SCAN = "scan"


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    format: InputFormat | None = None
    split: Split = Split.LINE
    """What a record of a text file is."""
    separator: str = ""
    fields: tuple[str, ...] | None = None
    """The fields of a record; all of them if not said."""
    types: Mapping[str, Callable[[str], Any]] | None = None
    """What makes a value of the text of a CSV column, by the column's name."""
    shuffle: bool = False
    seed: int = 0
    buffer: int = 4096
    """Records that are mixed with each other."""
    block_bytes: int = SMALLEST_BLOCK
    repeat: bool = False
    """Whether the end of an epoch is followed by the next one, for ever."""
    max_bad_records: int = 0
    """How many records of an epoch one consumer may leave out."""
    csv_cuts: CsvCuts = CsvCuts.LOCAL

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, kind in (("format", InputFormat), ("split", Split), ("csv_cuts", CsvCuts)):
            put(self, name, _choice(name, getattr(self, name), kind))
        if self.separator and self.split is Split.LINE:
            put(self, "split", Split.SEPARATOR)
        if bool(self.separator) != (self.split is Split.SEPARATOR):
            raise SettingsError(
                f"split={self.split.value!r} and separator={self.separator!r} do not go together"
            )
        for name in ("shuffle", "repeat"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be True or False")
        for name, least in (("seed", 0), ("buffer", 1), ("block_bytes", 1), ("max_bad_records", 0)):
            put(self, name, whole_number(name, getattr(self, name), least))
        if self.seed >= 2**64:
            raise SettingsError(f"seed={self.seed}: must be 0 to 2^64 - 1")
        if self.fields is not None:
            put(self, "fields", _names(self.fields))
        if self.types is not None:
            put(self, "types", _functions(self.types))

    @property
    def record_options(self) -> RecordOptions:
        return RecordOptions(
            fields=self.fields,
            types=self.types,
            split=self.split,
            separator=self.separator,
            span_bytes=self.block_bytes,
            scan_csv=self.csv_cuts is CsvCuts.SCAN,
        )


def automatic_block_bytes(input_bytes: int) -> int:
    """A power of two that makes about 256 blocks, within 64 KiB and 16 MiB: a function of the inputs alone, so that
    all who read them cut alike."""
    power: int = 1 << max(0, (input_bytes // _BLOCKS_WANTED - 1).bit_length())
    return min(max(power, SMALLEST_BLOCK), LARGEST_BLOCK)


def whole_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise SettingsError(f"{name}={value!r}: must be a whole number of at least {least}")
    return int(value)


def _choice(name: str, value: Any, kind: type[StrEnum]) -> StrEnum | None:
    if value is None and name == "format":
        return None
    try:
        return kind(value)
    except ValueError:
        raise SettingsError(f"{name}={value!r}: must be one of {', '.join(kind)}") from None


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise SettingsError(f"fields={value!r}: must be different names, at least one; leave it out for all")
    return names


def _functions(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(callable(function) for function in value.values()):
        raise SettingsError(f"types={value!r}: must be a dict like {{'price': float}}")
    return dict(value)
