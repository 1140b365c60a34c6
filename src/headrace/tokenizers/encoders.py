"""The libraries that carry out a definition, behind one call: `encode(texts) -> Ragged of uint32`.

All of them treat special tokens in a text as the definition says: as plain text, unless `allow_special` is set. For
Hugging Face definitions, the special entries are removed from `added_tokens` before any library sees them, so there is
nothing left that a document could forge.
"""

import base64
import functools
import json
import re
import tempfile
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import MissingExtraError, SettingsError
from headrace.format.ragged import Ragged
from headrace.readers.columns import Strings, Texts
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.disputed_characters import find_disputed
from headrace.tokenizers.public import gigatoken_scheme


class Encoder(Protocol):
    def encode(self, texts: Texts | Strings) -> Ragged: ...


def reference_encoder(definition: Definition) -> Encoder:
    """The library that a definition comes from, whose output is correct by definition."""
    kinds: dict[str, Callable[[Definition], Encoder]] = {
        "bytes": BytesEncoder,
        "huggingface": HuggingFaceEncoder,
        "tiktoken": TiktokenEncoder,
    }
    return kinds[definition.kind](definition)


class BytesEncoder:
    """One token for each byte; 256 and 257 are the special tokens."""

    def __init__(self, definition: Definition) -> None:
        self._special = {name.encode(): i for name, i in definition.special_tokens.items()}
        self._split = re.compile(b"(" + b"|".join(map(re.escape, self._special)) + b")")
        self._allow_special = definition.allow_special

    def encode(self, texts: Texts | Strings) -> Ragged:
        if self._allow_special:
            return Ragged.from_items([self._with_special(texts[i]) for i in range(len(texts))], np.uint32)
        ragged = texts.to_ragged()
        return Ragged(ragged.values.astype(np.uint32), ragged.offsets)

    def _with_special(self, text: bytes) -> Any:
        ids: list[int] = []
        for piece in self._split.split(text):
            ids.extend([self._special[piece]] if piece in self._special else piece)
        return np.array(ids, dtype=np.uint32)


def plain_tokenizer_json(definition: Definition) -> str:
    """A `tokenizer.json` that only encodes: nothing is truncated, padded or added, and special tokens are recognized
    only if the definition allows it."""
    parsed = json.loads(definition.content)
    parsed["truncation"] = parsed["padding"] = parsed["post_processor"] = None
    if not definition.allow_special:
        boundaries = {definition.eos_id, definition.bos_id}
        parsed["added_tokens"] = [
            token
            for token in parsed.get("added_tokens") or []
            if not token.get("special") and token["id"] not in boundaries
        ]
    return json.dumps(parsed)


class HuggingFaceEncoder:
    def __init__(self, definition: Definition) -> None:
        try:
            import tokenizers
        except ImportError:
            raise MissingExtraError(
                "tokenizers is not installed: pip install 'headrace[tokenizers]'"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(plain_tokenizer_json(definition))
        except Exception as error:  # the library raises a bare Exception if it cannot load something
            raise SettingsError(
                f"{definition.name}: the tokenizers library cannot load it: {error}"
            ) from None

    def encode(self, texts: Texts | Strings) -> Ragged:
        encodings = self._tokenizer.encode_batch_fast(texts.strings(), add_special_tokens=False)
        return Ragged.from_items([np.array(e.ids, dtype=np.uint32) for e in encodings], np.uint32)


class TiktokenEncoder:
    def __init__(self, definition: Definition) -> None:
        try:
            import tiktoken
        except ImportError:
            raise MissingExtraError("tiktoken is not installed: pip install 'headrace[tokenizers]'") from None
        content = json.loads(definition.content)
        self._allowed: Any = "all" if definition.allow_special else set()
        self._encoding = tiktoken.Encoding(
            definition.name,
            pat_str=content["pattern"],
            mergeable_ranks=ranks_of(content),
            special_tokens=content["special_tokens"] if definition.allow_special else {},
        )

    def encode(self, texts: Texts | Strings) -> Ragged:
        encode = self._encoding.encode_to_numpy
        items = [
            encode(text, allowed_special=self._allowed, disallowed_special=()) for text in texts.strings()
        ]
        return Ragged.from_items(items, np.uint32)


def ranks_of(content: Any) -> dict[bytes, int]:
    return {base64.b64decode(token): int(rank) for token, rank in content["ranks"].items()}


class GigatokenEncoder:
    """Many times faster, and used only if `parity.py` has shown that its tokens are the same. Texts with characters
    that libraries may classify differently go to the reference, which is created when the first such text comes."""

    def __init__(self, definition: Definition) -> None:
        import awkward
        import gigatoken

        self._awkward = awkward
        self._reference = functools.cache(functools.partial(reference_encoder, definition))
        if definition.kind == "huggingface":
            self._tokenizer = gigatoken.Tokenizer.from_json(plain_tokenizer_json(definition))
            return
        content = json.loads(definition.content)
        special = content["special_tokens"] if definition.allow_special else {}
        scheme = gigatoken_scheme(content["pattern"])
        if scheme is None:
            raise SettingsError(f"gigatoken has no splitter for the pattern of {definition.name}")
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            ranks = sorted(content["ranks"].items(), key=lambda item: int(item[1]))
            file.write("".join(f"{token} {rank}\n" for token, rank in ranks).encode())
            file.flush()
            self._tokenizer = gigatoken.Tokenizer.from_tiktoken(file.name, scheme, special)

    def encode(self, texts: Texts | Strings) -> Ragged:
        fast, odd = self._encode(texts), _odd(texts)
        if not len(odd):
            return fast
        items = list(fast)
        chosen = Strings([texts[number].decode() for number in odd.tolist()])
        for number, item in zip(odd.tolist(), self._reference().encode(chosen), strict=True):
            items[number] = item
        return Ragged.from_items(items, np.uint32)

    def _encode(self, texts: Texts | Strings) -> Ragged:
        inputs = texts.items if isinstance(texts, Strings) else self._array(texts)
        # One thread, because the build already has a process for each core.
        encoded = self._tokenizer.encode_batch(inputs, parallel=False).layout
        return Ragged(np.asarray(encoded.content.data), np.asarray(encoded.offsets.data))

    def _array(self, texts: Texts) -> Any:
        """The texts as an awkward array over the same buffer: nothing is copied."""
        ak = self._awkward
        layout = ak.contents.ListArray(
            ak.index.Index64(texts.starts),
            ak.index.Index64(texts.stops),
            ak.contents.NumpyArray(texts.data, parameters={"__array__": "char"}),
            parameters={"__array__": "string"},
        )
        return ak.Array(layout)


def _odd(texts: Texts | Strings) -> NDArray[np.intp]:
    if isinstance(texts, Texts):
        return find_disputed(texts)
    if all(map(str.isascii, texts.items)):
        return np.empty(0, dtype=np.intp)
    return find_disputed(texts.to_texts())
