"""Whether gigatoken finds the same added tokens in every text as the tokenizers library.

The library looks in three steps: for the tokens that are not `normalized`, then, in what is left and after
normalizing it, for those that are; special tokens that count as plain text are found and passed over. gigatoken looks
for all of them at once, and does not look for special tokens that count as plain text. Each search takes the leftmost
token, and of several the longest. So both find the same unless a token that is searched for later, or passed over,
could win against another where they overlap.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from headrace.tokenizers.definition import Definition
from headrace.tokenizers.fast_vocabulary import ID_LIMIT

_SETTINGS = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}
_MADE_BY_NFC = frozenset("K;`")
"""The ASCII characters that NFC makes of others: of the Kelvin sign, the Greek question mark and the Greek varia."""
_MOST_PAIRS = 4_000_000


def kept_and_passed_over(
    parsed: Mapping[str, Any], definition: Definition
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The added tokens that are found in texts, and those that count as plain text."""
    kept: list[dict[str, Any]] = []
    passed_over: list[dict[str, Any]] = []
    boundaries = {definition.eos_id, definition.bos_id}
    for token in parsed.get("added_tokens") or []:
        is_special = bool(token.get("special")) or token["id"] in boundaries
        is_text = is_special and not definition.allow_special
        (passed_over if is_text else kept).append(token)
    return kept, passed_over


def added_token_reasons(parsed: Mapping[str, Any], definition: Definition) -> Iterator[str]:
    kept, passed_over = kept_and_passed_over(parsed, definition)
    for token in kept:
        yield from _flag_reasons(token)
    contents = [str(token["content"]) for token in kept]
    if len(set(contents)) < len(contents):
        yield "two added tokens have the same content"
    normalized = {str(token["content"]) for token in kept if token.get("normalized")}
    plain = {str(token["content"]) for token in passed_over}
    if can_win(normalized, set(contents) - normalized):
        yield "added tokens that are 'normalized' can overlap with others that are not"
    if can_win(plain, set(contents)):
        yield "special tokens, which count as plain text, can overlap with other added tokens"
    yield from _reasons_of_normalizing(parsed, contents, normalized)
    splitter = parsed.get("pre_tokenizer") or {}
    if splitter.get("add_prefix_space") and any(content.startswith(" ") for content in contents):
        yield "an added token begins with a space, and add_prefix_space is set"


def _flag_reasons(token: Mapping[str, Any]) -> Iterator[str]:
    name = f"the added token {token['content']!r}"
    for setting in token:
        if setting not in _SETTINGS:
            yield f"{name} has the setting {setting!r}"
    for flag in ("single_word", "lstrip", "rstrip"):
        if token.get(flag):
            yield f"{name} has {flag} set"
    if not token["content"]:
        yield "an added token is empty"
    if not 0 <= token["id"] < ID_LIMIT:
        yield f"{name} has the number {token['id']}, which is too large"


def _reasons_of_normalizing(
    parsed: Mapping[str, Any], contents: Collection[str], normalized: Collection[str]
) -> Iterator[str]:
    normalizer = parsed.get("normalizer")
    if not normalizer or normalizer.get("normalizers") == []:
        return
    if normalized:
        yield f"there is a normalizer, and the added token {min(normalized)!r} is 'normalized'"
    if normalizer.get("type") != "NFC":
        return
    for content in contents:
        if not content.isascii() or _MADE_BY_NFC & set(content):
            yield f"there is a normalizer that could make the added token {content!r} out of other characters"


def can_win(first: Collection[str], second: Collection[str]) -> bool:
    """Whether in some text, one of the first overlaps with one of the second and begins before it, or begins at the
    same place and is not shorter."""
    if len(first) * len(second) > _MOST_PAIRS:
        return True
    if any(other in one for one in first for other in second):
        return True
    ends = {text[-length:] for text in first for length in range(1, len(text))}
    beginnings = {text[:length] for text in second for length in range(1, len(text))}
    return bool(ends & beginnings)
