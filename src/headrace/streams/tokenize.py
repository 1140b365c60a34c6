"""Texts -> tokens, many in one call, with the tokenizers of a build: the tokens are those that a build would store."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import SettingsError
from headrace.readers.columns import Strings
from headrace.streams.bad import StreamBadRecords
from headrace.streams.cursor import Cursor, GroupCursor, OpenAt, State, split_state
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.encoders import Encoder
from headrace.tokenizers.find import find_tokenizer
from headrace.tokenizers.parity import SAMPLE_BYTES, choose_encoder
from headrace.tokenizers.tokenizer import tokenize

TOKENS = "tokens"
_TEXTS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 2**20
_TEXT_FIELD_REMEDY = (
    "Name the field that holds the text with text_field=NAME. If only some records lack it, leave them out with "
    "max_bad_records=N"
)

_encoders = threading.local()
"""By fingerprint, separately for each thread: creating one takes longer than an epoch of a small stream."""


@dataclass(frozen=True)
class Tokenize:
    definition: Definition
    text_field: str

    def describe(self) -> str:
        field = "" if self.text_field == "text" else f", text_field={self.text_field!r}"
        return f"tokenize({self.definition.name} {self.definition.fingerprint[:12]}{field})"

    def open(self, open_below: OpenAt, state: State, bad: StreamBadRecords) -> Cursor:
        begin, handed = split_state(state)
        below, counted = split_state(begin)
        return GroupCursor(_Encoded(open_below(below), self, bad, counted), handed)


def make_tokenize(
    tokenizer: Any,
    text_field: str,
    *,
    eos: str | bool | None,
    bos: str | bool | None,
    allow_special: bool,
) -> Tokenize:
    if not isinstance(text_field, str):
        raise SettingsError(f"text_field={text_field!r}: must be the name of a field")
    return Tokenize(find_tokenizer(tokenizer, eos=eos, bos=bos, allow_special=allow_special), text_field)


class _Encoded:
    """Groups of records, encoded. A group begins at `[the state below, bad texts before it]`."""

    def __init__(self, below: Cursor, settings: Tokenize, bad: StreamBadRecords, counted: int) -> None:
        self._below, self._settings, self._bad = below, settings, bad
        bad.in_texts = counted

    def state(self) -> State:
        return [self._below.state(), self._bad.in_texts]

    def make(self) -> Sequence[Any]:
        records, texts = self._read()
        encoder = _encoder(self._settings.definition, texts)

        def report(text: int, reason: str) -> None:
            self._bad.report_text(_shown(records[text]), reason)

        tokens = tokenize(Strings(texts), self._settings.definition, encoder, report)
        return [{TOKENS: each} for each in tokens]

    def _read(self) -> tuple[list[Any], list[str]]:
        """The records and texts of the next group, whose size is limited. Raises StopIteration if there are no more."""
        records: list[Any] = []
        texts: list[str] = []
        size = 0
        for record in self._below:
            text = record.get(self._settings.text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                self._bad.report_text(_shown(record), self._reason(record), _TEXT_FIELD_REMEDY)
                continue
            if not _is_unicode(text):
                reason = f"{self._settings.text_field!r} holds a lone surrogate, which is half of a character"
                self._bad.report_text(_shown(record), reason)
                continue
            records.append(record)
            texts.append(text)
            size += len(text)
            if len(texts) == _TEXTS_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
                break
        if not texts:
            raise StopIteration
        return records, texts

    def _reason(self, record: Any) -> str:
        """Why a record has no text."""
        name = self._settings.text_field
        if not isinstance(record, dict):
            return f"is of type {type(record).__name__}, but tokenize() takes records (dicts)"
        if name not in record:
            listed = ", ".join(map(repr, list(record)[:20])) or "none"
            return f"no field {name!r}; the fields are {listed}"
        return f"{name!r} is of type {type(record[name]).__name__}, not text"


def _is_unicode(text: str) -> bool:
    """Whether the text has a UTF-8 form. JSON can write lone surrogates, which have none."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encoder(definition: Definition, texts: list[str]) -> Encoder:
    """The fastest encoder that is correct for a sample, which is taken from the first texts of the thread."""
    made: dict[str, Encoder] = _encoders.__dict__.setdefault("made", {})
    if definition.fingerprint not in made:
        sample, size = [], 0
        for text in texts:
            sample.append(text.encode())
            size += len(sample[-1])
            if size >= SAMPLE_BYTES:
                break
        made[definition.fingerprint], _ = choose_encoder(definition, sample)
    return made[definition.fingerprint]


def _shown(record: Any) -> str:
    shown = repr(record)
    return f"record {shown if len(shown) <= 200 else shown[:200] + '...'}"
