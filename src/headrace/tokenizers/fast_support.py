"""Whether gigatoken follows everything that a definition asks for.

gigatoken ignores what it does not know in a `tokenizer.json`, so loading one proves nothing, and a sample of texts
proves little: the one document that is encoded differently may be anywhere. So this module lists what it is known to
follow, and the tests compare exactly that with the tokenizers library. Everything else is left to the reference
encoder:

    {"added_tokens": [{"content": "foo", "single_word": true, ...}], ...}
    why_not_fast(definition) == "the added token 'foo' has single_word set"
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from headrace.tokenizers import fast_vocabulary
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.fast_added_tokens import added_token_reasons
from headrace.tokenizers.public import gigatoken_scheme
from headrace.tokenizers.split_patterns import SPLIT_PATTERNS

_SECTIONS = {
    *("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor"),
    *("decoder", "model"),
}
# Unknown characters do not occur in the vocabularies that are accepted, so `unk_token` and `fuse_unk` have no effect.
_MODEL_SETTINGS = {
    *("type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk"),
    *("byte_fallback", "ignore_merges", "vocab", "merges"),
}
_UNDERSCORE = "\u2581"
_SPACES_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": _UNDERSCORE}
_LLAMA_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [{"type": "Prepend", "prepend": _UNDERSCORE}, _SPACES_REPLACED],
}
_NFC = {"type": "NFC"}
_SPLIT_AT_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


def why_not_fast(definition: Definition) -> str | None:
    """The first thing that gigatoken may do differently, or None if there is none."""
    content = msgspec.json.decode(definition.content)
    reasons = _tiktoken_reasons if definition.kind == "tiktoken" else _huggingface_reasons
    return next(reasons(content, definition), None)


def _tiktoken_reasons(content: Any, definition: Definition) -> Iterator[str]:
    if gigatoken_scheme(content["pattern"]) is None:
        yield "its splitting pattern is not one of the published ones"
    yield from fast_vocabulary.tiktoken_reasons(content["ranks"])
    if definition.allow_special:
        yield from _special_token_reasons(content["special_tokens"])


def _special_token_reasons(special_tokens: Mapping[str, int]) -> Iterator[str]:
    """Where two special tokens begin at the same place, tiktoken may choose either."""
    if max(special_tokens.values(), default=0) >= fast_vocabulary.ID_LIMIT:
        yield "the number of a special token is too large"
    names = sorted(special_tokens)
    for name, following in zip(names, names[1:], strict=False):
        if following.startswith(name):
            yield f"the special token {following!r} begins with another, {name!r}"
    if "" in special_tokens:
        yield "a special token is empty"


def _huggingface_reasons(parsed: Any, definition: Definition) -> Iterator[str]:
    yield from _unknown_settings("the tokenizer", parsed, _SECTIONS)
    yield from _model_reasons(parsed["model"])
    if parsed["model"].get("byte_fallback"):
        yield from _characters_with_byte_fallback(parsed)
    else:
        yield from _byte_level(parsed)
    yield from added_token_reasons(parsed, definition)
    yield from fast_vocabulary.huggingface_reasons(parsed)


def _unknown_settings(what: str, part: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    for name in part:
        if name not in known:
            yield f"{what} has the setting {name!r}"


def _model_reasons(model: Mapping[str, Any]) -> Iterator[str]:
    if model.get("type") != "BPE":
        yield f"the model is of type {model.get('type')!r}, not 'BPE'"
    yield from _unknown_settings("the model", model, _MODEL_SETTINGS)
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            yield f"the model has {name} set"


def _characters_with_byte_fallback(parsed: Mapping[str, Any]) -> Iterator[str]:
    """Models of characters, as SentencePiece makes them."""
    normalizer, splitter = parsed.get("normalizer"), parsed.get("pre_tokenizer")
    if normalizer not in (None, _SPACES_REPLACED, _LLAMA_NORMALIZER):
        yield f"the normalizer is {_named(normalizer)}"
    after_replacing = splitter == _SPLIT_AT_SPACES and normalizer is not None
    if not (splitter is None or after_replacing or _is_metaspace(splitter)):
        yield f"the pre-tokenizer is {_named(splitter)}"
    if parsed["model"].get("ignore_merges"):
        yield "the model has both byte_fallback and ignore_merges set"


def _is_metaspace(splitter: Any) -> bool:
    return (
        isinstance(splitter, dict)
        and splitter.keys() == {"type", "replacement", "prepend_scheme", "split"}
        and splitter["type"] == "Metaspace"
        and splitter["replacement"] == _UNDERSCORE
        and splitter["prepend_scheme"] in ("first", "always", "never")
        and isinstance(splitter["split"], bool)
    )


def _byte_level(parsed: Mapping[str, Any]) -> Iterator[str]:
    normalizer, splitter = parsed.get("normalizer"), parsed.get("pre_tokenizer")
    empty = {"type": "Sequence", "normalizers": []}
    if normalizer not in (None, empty, _NFC):
        yield f"the normalizer is {_named(normalizer)}"
    prefixed_or_not = (_is_bytes(splitter, prefix=False), _is_bytes(splitter, prefix=True))
    if not (any(prefixed_or_not) or _is_known_sequence(splitter)):
        yield f"the pre-tokenizer is {_named(splitter)}"


def _is_bytes(splitter: Any, *, prefix: bool, use_regex: bool = True) -> bool:
    if not isinstance(splitter, dict):
        return False
    # The offsets that `trim_offsets` is about are not used.
    given = {name: value for name, value in splitter.items() if name != "trim_offsets"}
    given.setdefault("use_regex", True)
    return given == {"type": "ByteLevel", "add_prefix_space": prefix, "use_regex": use_regex}


def _is_known_sequence(splitter: Any) -> bool:
    """Splits by known patterns, then bytes."""
    if not isinstance(splitter, dict) or splitter.keys() != {"type", "pretokenizers"}:
        return False
    *splits, last = splitter["pretokenizers"] or [None]
    if splitter["type"] != "Sequence" or not _is_bytes(last, prefix=False, use_regex=False):
        return False
    patterns = tuple(_pattern(split) for split in splits)
    return patterns in SPLIT_PATTERNS


def _pattern(split: Any) -> str | None:
    """The regular expression of a plain split at its matches."""
    plain = {"type": "Split", "behavior": "Isolated", "invert": False}
    if not isinstance(split, dict) or not isinstance(split.get("pattern"), dict):
        return None
    others = {name: value for name, value in split.items() if name != "pattern"}
    if others != plain or split["pattern"].keys() != {"Regex"}:
        return None
    return str(split["pattern"]["Regex"])


def _named(part: Any) -> str:
    """A normalizer or pre-tokenizer by its type, and by the types in a sequence."""
    if not isinstance(part, dict):
        return repr(part) if part else "missing"
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    types = ", ".join(str(each.get("type")) for each in inner if isinstance(each, dict))
    return f"a {part.get('type')} of {types}" if types else f"a {part.get('type')} with these settings"
