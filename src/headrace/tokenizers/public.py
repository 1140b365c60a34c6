"""The published tiktoken encodings: their patterns and special tokens, without their ranks.

tiktoken keeps these in functions that also load the ranks, over the network if necessary. So they are written down
here, as they are in tiktoken 0.14. A test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_END = "<|endoftext|>"
_END_OF_PROMPT = "<|endofprompt|>"
_FILL_IN_THE_MIDDLE = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

_R50K_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PublicEncoding:
    pattern: str
    special_tokens: Mapping[str, int]


_HARMONY_NAMES = {
    200002: "return",
    200003: "constrain",
    200005: "channel",
    200006: "start",
    200007: "end",
    200008: "message",
    200012: "call",
}


def _harmony_tokens() -> dict[str, int]:
    """The special tokens of o200k_harmony: those of o200k_base, and a range in which most numbers are reserved.

    The fingerprint of a definition depends on the order, which is tiktoken's.
    """
    numbers = range(200000, 201088)
    named = {f"<|{_HARMONY_NAMES.get(number, f'reserved_{number}')}|>": number for number in numbers}
    return {_END: 199999, _END_OF_PROMPT: 200018, "<|startoftext|>": 199998, **named}


PUBLIC_ENCODINGS: Mapping[str, PublicEncoding] = {
    "gpt2": PublicEncoding(_R50K_PATTERN, {_END: 50256}),
    "r50k_base": PublicEncoding(_R50K_PATTERN, {_END: 50256}),
    "p50k_base": PublicEncoding(_R50K_PATTERN, {_END: 50256}),
    "p50k_edit": PublicEncoding(
        _R50K_PATTERN, {_END: 50256, **dict(zip(_FILL_IN_THE_MIDDLE, range(50281, 50284), strict=True))}
    ),
    "cl100k_base": PublicEncoding(
        _CL100K_PATTERN,
        {
            _END: 100257,
            **dict(zip(_FILL_IN_THE_MIDDLE, range(100258, 100261), strict=True)),
            _END_OF_PROMPT: 100276,
        },
    ),
    "o200k_base": PublicEncoding(_O200K_PATTERN, {_END: 199999, _END_OF_PROMPT: 200018}),
    "o200k_harmony": PublicEncoding(_O200K_PATTERN, _harmony_tokens()),
}

# gigatoken has its own names for these splitting patterns.
_SCHEMES = {_R50K_PATTERN: "gpt2", _CL100K_PATTERN: "gpt4", _O200K_PATTERN: "o200k"}


def gigatoken_scheme(pattern: str) -> str | None:
    """gigatoken's name for a splitting pattern, if it is exactly one of the published patterns."""
    return _SCHEMES.get(pattern)
