"""Which tokenizer a build uses: the one that was named, bytes for text files, or none for a dataset of records."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from headrace.errors import SettingsError
from headrace.ingest.settings import BuildSettings
from headrace.readers.formats import InputFormat
from headrace.readers.reader import Split
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.find import find_tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """What the caller said about the tokenizer; `tokenizer` is None if none was named."""

    tokenizer: Any
    eos: str | bool | None
    bos: str | bool | None
    allow_special: bool

    @property
    def about_special_tokens(self) -> list[str]:
        """Those that were given, as they were written."""
        given = [
            f"{name}={value!r}" for name, value in (("eos", self.eos), ("bos", self.bos)) if value is not None
        ]
        return [*given, "allow_special=True"] if self.allow_special else given


def choose_tokenizer(
    settings: BuildSettings, formats: Set[InputFormat], options: TokenizerOptions
) -> Definition | None:
    """The tokenizer's definition, or None for a dataset of records: tables with neither a tokenizer nor a text field.

    `formats` are those of all inputs.
    """
    if settings.text_field is not None and formats == {InputFormat.TEXT}:
        raise SettingsError(
            f"text_field={settings.text_field!r}: the inputs are read as text, which has no fields; leave it out, or "
            "say what the inputs are, for example with format='jsonl'"
        )
    if settings.separator and InputFormat.TEXT not in formats:
        raise SettingsError(
            f"separator={settings.separator!r}: applies only to text, and there is none among the inputs; leave it out"
        )
    if settings.split is not Split.FILE and InputFormat.TEXT not in formats:
        raise SettingsError(
            f"split={settings.split.value!r}: applies only to text, and there is none among the inputs; leave it out"
        )
    wants_text = options.tokenizer is not None or settings.text_field is not None
    if not wants_text and InputFormat.TEXT not in formats:
        if given := options.about_special_tokens:
            raise SettingsError(
                f"{given[0]}: is about tokens, but without tokenizer= the columns become records as they are; name a "
                "tokenizer, or leave it out"
            )
        return None
    if settings.columns is not None:
        raise SettingsError(
            "columns= can only be given for a dataset of records; with a tokenizer, text_field= names the one column "
            "to read"
        )
    if not wants_text and formats != {InputFormat.TEXT}:
        raise SettingsError(
            "the inputs are both text files and tables; give tokenizer= and text_field=, or build two datasets"
        )
    tokenizer = "bytes" if options.tokenizer is None else options.tokenizer
    return find_tokenizer(tokenizer, eos=options.eos, bos=options.bos, allow_special=options.allow_special)
