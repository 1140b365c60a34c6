"""The published tiktoken encodings: their patterns and special tokens, without their rank files."""

from collections.abc import Mapping
from functools import cache
from typing import Any

# gigatoken has its own names for these splitting patterns.
_SCHEMES = {"r50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}


@cache
def public_encodings() -> Mapping[str, Mapping[str, Any]]:
    """Name -> the arguments of `tiktoken.Encoding`, with an empty vocabulary."""
    from tiktoken_ext import openai_public

    # These functions load the vocabulary, over the network if necessary: give them an empty one instead.
    loaders = {
        name: getattr(openai_public, name)
        for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks")
    }
    for name in loaders:
        setattr(openai_public, name, lambda *_, **__: {})
    try:
        return {name: constructor() for name, constructor in openai_public.ENCODING_CONSTRUCTORS.items()}
    finally:
        for name, loader in loaders.items():
            setattr(openai_public, name, loader)


def gigatoken_scheme(pattern: str) -> str | None:
    """gigatoken's name for a splitting pattern, if it is exactly one of the published patterns."""
    for encoding, scheme in _SCHEMES.items():
        if public_encodings()[encoding]["pat_str"] == pattern:
            return scheme
    return None
