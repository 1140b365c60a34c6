"""What decides the content of a built dataset, apart from its inputs and its tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.checks import check_text, choice, optional_number, whole_number
from headrace.errors import SettingsError
from headrace.format.fields import Field
from headrace.readers.formats import InputFormat
from headrace.readers.reader import Split

MIN_SHARD_BYTES, MAX_SHARD_BYTES = 2**12, 2**32
_SMALLEST_AUTO, _LARGEST_AUTO = 8 * 2**20, 128 * 2**20


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """`shard_bytes` is about how much input goes into one shard; None derives it from the size of all inputs."""

    text_field: str | None = None
    columns: Mapping[str, str | None] | None = None
    """Column -> the notation of its field, or None to infer it from the file."""
    format: InputFormat | None = None
    split: Split = Split.FILE
    separator: str = ""
    shuffle_seed: int | None = None
    shard_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("format", InputFormat), ("split", Split)):
            if name != "format" or self.format is not None:
                object.__setattr__(self, name, choice(name, getattr(self, name), kind))
        self._check_separator()
        self._check_numbers()

    def _check_separator(self) -> None:
        check_text("separator", self.separator)
        if self.text_field is not None:
            check_text("text_field", self.text_field)
        if self.separator and self.split is Split.FILE:
            object.__setattr__(self, "split", Split.SEPARATOR)
        if bool(self.separator) != (self.split is Split.SEPARATOR):
            raise SettingsError(
                f"split={self.split.value!r} and separator={self.separator!r} do not go together; give a separator "
                "with split='separator', and only with that"
            )

    def _check_numbers(self) -> None:
        object.__setattr__(self, "shard_bytes", optional_number("shard_bytes", self.shard_bytes))
        if self.shard_bytes is not None and not MIN_SHARD_BYTES <= self.shard_bytes <= MAX_SHARD_BYTES:
            raise SettingsError(
                f"shard_bytes={self.shard_bytes}: must be from {MIN_SHARD_BYTES:,} to {MAX_SHARD_BYTES:,}"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_seed(seed: Any) -> int:
    number = whole_number("seed", seed)
    if not 0 <= number < 2**64:
        raise SettingsError(f"seed={number}: must be from 0 to 2^64 - 1")
    return number


def parse_columns(columns: Sequence[str] | Mapping[str, str | None] | None) -> dict[str, str | None] | None:
    """['a', 'b'] or {'a': 'float32', 'b': None} -> the second form, with checked notations."""
    if columns is None:
        return None
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise SettingsError(f"columns={columns!r}: must be a list of names, or a dict from names to types")
    named = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
    if not named:
        raise SettingsError("columns is empty: name at least one column")
    for name in named:
        check_text("columns", name)
    return {name: Field.parse(notation).notation if notation else None for name, notation in named.items()}


def automatic_shard_bytes(input_bytes: int) -> int:
    """A power of two that gives about 256 shards, between 8 and 128 MiB: enough tasks for every core, but few files."""
    power: int = 1 << max(0, (input_bytes // 256 - 1).bit_length())
    return min(max(power, _SMALLEST_AUTO), _LARGEST_AUTO)
