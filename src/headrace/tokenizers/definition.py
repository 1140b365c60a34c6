"""What a tokenizer is, independently of the library that runs it.

A definition is data: the vocabulary, the special tokens, and which of them end or begin a document. It is stored
beside the shards, so that a dataset can be decoded, checked and extended wherever it is. Its fingerprint shows whether
a rebuild would give the same tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headrace.errors import FormatError, SettingsError
from headrace.format.checksum import checksum

Kind = Literal["bytes", "huggingface", "tiktoken"]


@dataclass(frozen=True, kw_only=True)
class Definition:
    kind: Kind
    name: str
    vocab_size: int
    special_tokens: Mapping[str, int]
    content: bytes = field(default=b"", repr=False)
    """A `tokenizer.json`; for tiktoken, the pattern and the ranks as JSON; empty for bytes."""
    eos_id: int | None = None
    bos_id: int | None = None
    allow_special: bool = False
    """Whether a special token that is written out in a document becomes that token. Otherwise it stays plain text."""

    @property
    def dtype(self) -> str:
        if self.vocab_size > 2**32:
            raise SettingsError(
                f"tokenizer {self.name}: a vocabulary of {self.vocab_size:,} tokens does not fit uint32"
            )
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def fingerprint(self) -> str:
        described = {
            **self.identity,
            "special_tokens": dict(self.special_tokens),
            "content": checksum(self.content),
        }
        return checksum(json.dumps(described, sort_keys=True).encode())

    @property
    def identity(self) -> dict[str, Any]:
        """A summary of what decides the tokens, which does not include the name of the tokenizer's file."""
        return {
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "bos_id": self.bos_id,
            "allow_special": self.allow_special,
        }

    def to_json(self) -> dict[str, Any]:
        """What the manifest says about the tokenizer (the content is a separate file)."""
        return {
            "name": self.name,
            **self.identity,
            "fingerprint": self.fingerprint,
            "special_tokens": dict(self.special_tokens) if len(self.special_tokens) <= 64 else {},
        }

    def with_boundaries(
        self, eos: str | bool | None, bos: str | bool | None, guess: Mapping[str, str]
    ) -> "Definition":
        """Choose the tokens at the end and the beginning of each document.

        None means the default: an end token, but no beginning token. False means none, True the tokenizer's own, and
        a string names the token. `guess` is what the tokenizer's own files call 'eos' and 'bos'.
        """
        eos_id = self._boundary("eos", True if eos is None else eos, guess, _END_NAMES)
        bos_id = self._boundary("bos", bos or False, guess, _BEGIN_NAMES)
        return replace(self, eos_id=eos_id, bos_id=bos_id)

    def _boundary(
        self, which: str, choice: str | bool, guess: Mapping[str, str], names: tuple[str, ...]
    ) -> int | None:
        if choice is False:
            return None
        known = self.special_tokens
        if isinstance(choice, str):
            if choice not in known:
                own = f". For the tokenizer's own token, give {which}=True" if choice == "auto" else ""
                raise SettingsError(
                    f"{which}={choice!r}: not a special token of {self.name}; it has {_some(known)}{own}"
                )
            return known[choice]
        for name in [guess[which]] if which in guess else names:
            if name in known:
                return known[name]
        raise SettingsError(
            f"tokenizer {self.name}: it is unclear which token is its {which.upper()}; name it with "
            f"{which}=TOKEN ({_some(known)}), or use {which}=False"
        )


_END_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]"),
    *("<EOS>", "[SEP]"),
)
_BEGIN_NAMES = (
    "<|startoftext|>",
    "<|begin_of_text|>",
    "<｜begin▁of▁sentence｜>",
    "<s>",
    "<bos>",
    "[BOS]",
    "<BOS>",
    "[CLS]",
)


def _some(names: Mapping[str, int]) -> str:
    if not names:
        return "no special tokens"
    listed = ", ".join(repr(name) for name in list(names)[:8])
    return f"{listed} and {len(names) - 8} more" if len(names) > 8 else listed


BYTES = Definition(
    kind="bytes", name="bytes", vocab_size=258, special_tokens={"<|endoftext|>": 256, "<|startoftext|>": 257}
)


def huggingface_definition(name: str, content: bytes, *, allow_special: bool) -> Definition:
    """The definition in a `tokenizer.json`; its vocabulary includes tokens that are only in `added_tokens`."""
    try:
        parsed = json.loads(content)
        added = parsed.get("added_tokens") or []
        added_ids = {str(token["content"]): int(token["id"]) for token in added}
        special = {str(token["content"]): int(token["id"]) for token in added if token.get("special")}
        size = 1 + max([*added_ids.values(), _largest_id(parsed["model"])])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{name}: not a Hugging Face tokenizer.json: {error!r}") from None
    if parsed["model"].get("dropout"):
        raise SettingsError(
            f"{name}: its model has a dropout of {parsed['model']['dropout']}, with which the same text gives other "
            'tokens each time; set "dropout" in its "model" section to null'
        )
    return Definition(
        kind="huggingface",
        name=name,
        vocab_size=size,
        special_tokens=special,
        content=content,
        allow_special=allow_special,
    )


def _largest_id(model: Mapping[str, Any]) -> int:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        # Unigram models list [piece, score] pairs; the place of a pair is its id.
        return len(vocabulary) - 1
    return max(map(int, vocabulary.values()), default=-1)
