"""Whether gigatoken reads the same vocabulary and merges as the library that a definition comes from.

gigatoken has one table from bytes to token numbers, and an array with a place for each number. So two tokens of the
same bytes would be mixed up, and a number near 2^32 would take more memory than there is.
"""

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

ID_LIMIT = 2**21
"""gigatoken's own limit for its fast tables; the largest published vocabularies have 2^18 tokens."""


def _byte_characters() -> dict[int, int]:
    """Code point -> byte, for the characters that stand for bytes in byte-level vocabularies. Other characters below
    256 become one that is no byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, 0xFFFF)
    table |= {byte: byte for byte in printable}
    return table | {256 + number: byte for number, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_LIKE_A_BYTE_TOKEN = re.compile(r"<0x..>", re.DOTALL)


def tiktoken_reasons(ranks: Mapping[str, int]) -> Iterator[str]:
    """`ranks` are those of a definition's content, with tokens in base 64."""
    if len(ranks) > ID_LIMIT:
        yield f"it has {len(ranks):,} tokens"
    if sorted(ranks.values()) != list(range(len(ranks))):
        yield "its ranks have gaps"
    single_bytes = {base64.b64encode(bytes([byte])).decode() for byte in range(256)}
    if {ranks.get(token) for token in single_bytes} != set(range(256)):
        yield "its first 256 tokens are not the single bytes"


def huggingface_reasons(parsed: Mapping[str, Any]) -> Iterator[str]:
    model = parsed["model"]
    vocabulary = model["vocab"]
    numbers = list(vocabulary.values())
    if len(set(numbers)) < len(numbers):
        yield "two tokens of the vocabulary have the same number"
    if not 0 <= min(numbers, default=0) <= max(numbers, default=0) < ID_LIMIT:
        yield f"a token of the vocabulary has a number outside 0 to {ID_LIMIT:,}"
    merges = [_pair(merge) for merge in model["merges"]]
    if len(set(merges)) < len(merges):
        yield "a merge is listed twice"
    if model.get("byte_fallback"):
        yield from _byte_fallback_reasons(vocabulary, merges)
    else:
        added = {str(token["content"]): int(token["id"]) for token in parsed.get("added_tokens") or []}
        yield from _byte_level_reasons(vocabulary, merges, added, bool(model.get("ignore_merges")))


def _pair(merge: str | Sequence[str]) -> tuple[str, ...]:
    """A merge is a list of two tokens; in older files, a string with a space between them."""
    return tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)


def _byte_level_reasons(
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, ...]],
    added: Mapping[str, int],
    ignore_merges: bool,
) -> Iterator[str]:
    by_bytes: dict[bytes, int] = {}
    not_bytes = set()
    for token, number in vocabulary.items():
        try:
            content = token.translate(_BYTE_CHARACTERS).encode("latin-1")
        except UnicodeEncodeError:
            not_bytes.add(token)
            content = token.encode()
        if by_bytes.setdefault(content, number) != number:
            yield f"the token {token!r} has the same bytes as another"
    for byte in range(256):
        if bytes([byte]) not in by_bytes:
            yield f"the vocabulary has no token for the byte 0x{byte:02X}"
    for token, number in added.items():
        if by_bytes.setdefault(token.encode(), number) != number:
            yield f"the added token {token!r} has the same bytes as another token"
    # gigatoken takes such a token for its UTF-8 bytes; the tokenizers library never gives it.
    if not_bytes and ignore_merges:
        yield f"ignore_merges is set, and the token {min(not_bytes)!r} is not written as bytes"
    if any(not_bytes.intersection(merge) for merge in merges):
        yield "a merge contains a token that is not written as bytes"


def _byte_fallback_reasons(vocabulary: Mapping[str, int], merges: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for byte, token in enumerate(_BYTE_TOKENS):
        if token not in vocabulary and not (byte < 128 and chr(byte) in vocabulary):
            yield f"the vocabulary has no token {token!r}"
    known = set(_BYTE_TOKENS)
    odd = (token for token in vocabulary if _LIKE_A_BYTE_TOKEN.fullmatch(token) and token not in known)
    for token in odd:
        yield f"the vocabulary has a token {token!r}, which is not one of the 256 bytes"
    for merge in merges:
        if known.intersection((*merge, "".join(merge))):
            yield "a merge contains the token of a byte"
