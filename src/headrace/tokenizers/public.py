"""The published tiktoken encodings: their patterns and special tokens, without their rank files."""

from collections.abc import Mapping
from functools import cache
from typing import Any

# gigatoken knows these splitting patterns by names of its own.
_SCHEMES = {"r50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}


@cache
def public_encodings() -> Mapping[str, Mapping[str, Any]]:
    """Name -> the arguments of `tiktoken.Encoding`, with an empty vocabulary."""
    from tiktoken_ext import openai_public

    # The definitions read the vocabulary (over the network, if need be) as they go: hand them an empty one.
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
    """gigatoken's name for a splitting pattern, if it is one of the published ones to the letter."""
    for encoding, scheme in _SCHEMES.items():
        if public_encodings()[encoding]["pat_str"] == pattern:
            return scheme
    return None
