"""The libraries that carry out a definition, behind one call: `encode(texts) -> Ragged of uint32`.

All of them treat special tokens in a text as the definition says: as plain text, unless `allow_special` is set. The
token that ends or begins a document counts as special even if its file does not say so, so a document cannot forge it.

These libraries are written in Rust. Where they meet something unforeseen they panic, with an exception that
`except Exception` does not catch; here it becomes an ordinary error.
"""

import base64
import contextlib
import functools
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import BuildError, MissingExtraError, SettingsError, how_to_install
from headrace.format.ragged import Ragged
from headrace.readers.columns import Strings, Texts
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.disputed_characters import find_disputed
from headrace.tokenizers.fast_added_tokens import kept_and_passed_over
from headrace.tokenizers.public import gigatoken_scheme

logger = logging.getLogger(__name__)


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


@contextlib.contextmanager
def panics_as_errors(library: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BuildError(f"the {library} library failed: {error}") from None


def plain_tokenizer_json(definition: Definition) -> str:
    """A `tokenizer.json` for the tokenizers library that only encodes: nothing is truncated, padded or added.

    No added token is left out, because the library would give its number to another one. Those that count as plain
    text are all marked as special.
    """
    parsed = _without_additions(definition)
    _, passed_over = kept_and_passed_over(parsed, definition)
    for token in passed_over:
        token["special"] = True
    return msgspec.json.encode(parsed).decode()


def fast_tokenizer_json(definition: Definition) -> str:
    """The same for gigatoken, which knows no special tokens, and takes the numbers as they are written."""
    parsed = _without_additions(definition)
    parsed["added_tokens"], _ = kept_and_passed_over(parsed, definition)
    return msgspec.json.encode(parsed).decode()


def _without_additions(definition: Definition) -> dict[str, Any]:
    parsed: dict[str, Any] = msgspec.json.decode(definition.content)
    parsed["truncation"] = parsed["padding"] = parsed["post_processor"] = None
    return parsed


class HuggingFaceEncoder:
    def __init__(self, definition: Definition) -> None:
        try:
            import tokenizers
        except ImportError:
            raise MissingExtraError(f"tokenizers is not installed: {how_to_install('tokenizers')}") from None
        try:
            with panics_as_errors("tokenizers"):
                self._tokenizer = tokenizers.Tokenizer.from_str(plain_tokenizer_json(definition))
        except Exception as error:  # the library raises a bare Exception if it cannot load something
            raise SettingsError(
                f"{definition.name}: the tokenizers library cannot load it: {error}"
            ) from None
        self._tokenizer.encode_special_tokens = not definition.allow_special
        self._check_numbers(definition)

    def _check_numbers(self, definition: Definition) -> None:
        """The library numbers added tokens itself, in order, whatever their file says."""
        for token in msgspec.json.decode(definition.content).get("added_tokens") or []:
            content, number = str(token["content"]), int(token["id"])
            given = self._tokenizer.token_to_id(content) if content else number
            if given != number:
                raise SettingsError(
                    f"{definition.name}: the added token {content!r} has the id {number} in the file, but the "
                    f"tokenizers library gives it {given}; correct the ids in the file, for example by loading and "
                    "saving the tokenizer with that library"
                )

    def encode(self, texts: Texts | Strings) -> Ragged:
        with panics_as_errors("tokenizers"):
            encodings = self._tokenizer.encode_batch_fast(texts.strings(), add_special_tokens=False)
        return Ragged.from_items([np.array(e.ids, dtype=np.uint32) for e in encodings], np.uint32)


class TiktokenEncoder:
    def __init__(self, definition: Definition) -> None:
        try:
            import tiktoken
        except ImportError:
            raise MissingExtraError(f"tiktoken is not installed: {how_to_install('tokenizers')}") from None
        content = msgspec.json.decode(definition.content)
        self._allowed: Any = "all" if definition.allow_special else set()
        with panics_as_errors("tiktoken"):
            self._encoding = tiktoken.Encoding(
                definition.name,
                pat_str=content["pattern"],
                mergeable_ranks=ranks_of(content),
                special_tokens=content["special_tokens"] if definition.allow_special else {},
            )

    def encode(self, texts: Texts | Strings) -> Ragged:
        encode = self._encoding.encode_to_numpy
        with panics_as_errors("tiktoken"):
            items = [
                encode(text, allowed_special=self._allowed, disallowed_special=()) for text in texts.strings()
            ]
        return Ragged.from_items(items, np.uint32)


def ranks_of(content: Any) -> dict[bytes, int]:
    return {base64.b64decode(token): int(rank) for token, rank in content["ranks"].items()}


class GigatokenEncoder:
    """Many times faster, and used only for definitions that it follows (`fast_support.py`) and if its tokens for a
    sample are the same (`parity.py`). Texts with characters that libraries may classify differently go to the
    reference, which is created when the first such text comes."""

    def __init__(self, definition: Definition) -> None:
        import awkward

        self._awkward = awkward
        self._reference = functools.cache(functools.partial(reference_encoder, definition))
        self._failed = False
        with panics_as_errors("gigatoken"):
            self._tokenizer = _gigatoken(definition)

    def encode(self, texts: Texts | Strings) -> Ragged:
        if self._failed:
            return self._reference().encode(texts)
        try:
            fast = self._encode(texts)
        except Exception as error:
            # It does not say after which of its failures it can go on, so it is not used again.
            self._failed = True
            logger.warning("%s; from here on, the slower exact encoder is used", error)
            return self._reference().encode(texts)
        return self._with_reference(fast, texts, _odd(texts))

    def _with_reference(self, fast: Ragged, texts: Texts | Strings, odd: NDArray[np.intp]) -> Ragged:
        """The tokens with those of the texts that are numbered in `odd` replaced by the reference's."""
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
        with panics_as_errors("gigatoken"):
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


def _gigatoken(definition: Definition) -> Any:
    import gigatoken

    if definition.kind == "huggingface":
        return gigatoken.Tokenizer.from_json(fast_tokenizer_json(definition))
    content = msgspec.json.decode(definition.content)
    special = content["special_tokens"] if definition.allow_special else {}
    scheme = gigatoken_scheme(content["pattern"])
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        ranks = sorted(content["ranks"].items(), key=lambda item: int(item[1]))
        file.write("".join(f"{token} {rank}\n" for token, rank in ranks).encode())
        file.flush()
        return gigatoken.Tokenizer.from_tiktoken(file.name, scheme, special)


def _odd(texts: Texts | Strings) -> NDArray[np.intp]:
    if isinstance(texts, Texts):
        return find_disputed(texts)
    others = np.array(
        [number for number, text in enumerate(texts.items) if not text.isascii()], dtype=np.intp
    )
    if not len(others):
        return others
    return others[find_disputed(Strings([texts.items[number] for number in others.tolist()]).to_texts())]
