"""What decides the records of a stream and their order, apart from its inputs. Checked once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.checks import check_boolean, check_text, choice, whole_number
from headrace.errors import SettingsError
from headrace.readers.bounds import MAX_RECORD_BYTES
from headrace.readers.formats import InputFormat
from headrace.readers.reader import Split
from headrace.readers.spans import RecordOptions

SMALLEST_BLOCK, LARGEST_BLOCK = 2**16, 2**24
_BLOCKS_WANTED = 256
_LEAST = {"seed": 0, "buffer": 1, "block_bytes": 1, "max_bad_records": 0, "max_record_bytes": 1}
"""The least value of each number."""


class CsvCuts(StrEnum):
    """How a reader finds out whether the byte at which its block begins lies inside quotes."""

    LOCAL = "local"
    SCAN = "scan"


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    format: InputFormat | None = None
    split: Split = Split.LINE
    """What one record of a text file is."""
    separator: str = ""
    fields: tuple[str, ...] | None = None
    """The fields of a record; None for all of them."""
    types: Mapping[str, Callable[[str], Any]] | None = None
    """By the name of a CSV column: the function that converts its text to a value."""
    shuffle: bool = False
    seed: int = 0
    buffer: int = 4096
    """How many records are shuffled with each other."""
    block_bytes: int = SMALLEST_BLOCK
    repeat: bool = False
    """Whether each epoch is followed by the next one, without end."""
    max_bad_records: int = 0
    """How many bad records one consumer may leave out in an epoch."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """The most bytes of one record; a longer one is a bad record."""
    csv_cuts: CsvCuts = CsvCuts.LOCAL

    def __post_init__(self) -> None:
        for name, kind in (("format", InputFormat), ("split", Split), ("csv_cuts", CsvCuts)):
            if name != "format" or self.format is not None:
                self._put(name, choice(name, getattr(self, name), kind))
        self._check_separator()
        for name in ("shuffle", "repeat"):
            check_boolean(name, getattr(self, name))
        for name, least in _LEAST.items():
            self._put(name, whole_number(name, getattr(self, name), least))
        if self.seed >= 2**64:
            raise SettingsError(f"seed={self.seed}: must be from 0 to 2^64 - 1")
        if self.fields is not None:
            self._put("fields", _names(self.fields))
        if self.types is not None:
            self._put("types", _functions(self.types))

    def _put(self, name: str, value: Any) -> None:
        """Set a parsed value in this frozen instance."""
        object.__setattr__(self, name, value)

    def _check_separator(self) -> None:
        check_text("separator", self.separator)
        if self.separator and self.split is Split.LINE:
            self._put("split", Split.SEPARATOR)
        if bool(self.separator) != (self.split is Split.SEPARATOR):
            raise SettingsError(
                f"split={self.split.value!r} and separator={self.separator!r} do not go together; give a separator "
                "with split='separator', and only with that"
            )

    @property
    def record_options(self) -> RecordOptions:
        return RecordOptions(
            fields=self.fields,
            types=self.types,
            split=self.split,
            separator=self.separator,
            max_record_bytes=self.max_record_bytes,
            span_bytes=self.block_bytes,
            scan_csv=self.csv_cuts is CsvCuts.SCAN,
        )


def automatic_block_bytes(input_bytes: int) -> int:
    """A power of two that gives about 256 blocks, between 64 KiB and 16 MiB. It depends on the inputs alone, so that
    all consumers cut them alike."""
    power: int = 1 << max(0, (input_bytes // _BLOCKS_WANTED - 1).bit_length())
    return min(max(power, SMALLEST_BLOCK), LARGEST_BLOCK)


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise SettingsError(
            f"fields={value!r}: must be different names, and at least one; leave fields= out to get all"
        )
    return names


def _functions(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(callable(function) for function in value.values()):
        raise SettingsError(f"types={value!r}: must be a dict like {{'price': float}}")
    return dict(value)
