"""The fast encoder gives exactly the library's tokens, or it is not used."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import headrace
from headrace.errors import HeadraceError
from headrace.tokenizers.definition import Definition, huggingface_definition
from headrace.tokenizers.encoders import GigatokenEncoder, reference_encoder
from headrace.tokenizers.fast_added_tokens import can_win
from headrace.tokenizers.fast_support import why_not_fast
from headrace.tokenizers.find import find_tokenizer
from headrace.tokenizers.parity import as_texts, choose_encoder
from headrace.tokenizers.public import PUBLIC_ENCODINGS
from headrace.tokenizers.split_patterns import SPLIT_PATTERNS
from tests.properties import examples
from tests.tokenizers import random_tokenizers
from tests.tokenizers.random_tokenizers import added_token, content_of, random_tokenizer, splits

pytestmark = pytest.mark.usefixtures("tokenizers")


def library_tokens(content: bytes, texts: list[str], allow_special: bool) -> list[list[int]]:
    """What the tokenizers library says about the file as it is."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(content.decode())
    library.encode_special_tokens = not allow_special
    try:
        encodings = library.encode_batch(texts, add_special_tokens=False)
    except BaseException as error:
        # The library panics at some added tokens, and then has no answer to compare with.
        assume(type(error).__name__ != "PanicException")
        raise
    return [encoding.ids for encoding in encodings]


def tokens_of(encoder: Any, texts: list[str]) -> list[list[int]]:
    return [item.tolist() for item in encoder.encode(as_texts([text.encode() for text in texts]))]


@examples(120)
@given(source=st.randoms(use_true_random=False), allow_special=st.booleans())
def test_random_tokenizers_are_encoded_exactly_or_not_at_all(
    source: random.Random, allow_special: bool
) -> None:
    pytest.importorskip("gigatoken")
    made = random_tokenizer(source)
    content = content_of(made)
    definition = huggingface_definition("random", content, allow_special=allow_special)
    try:
        reference = reference_encoder(definition)
    except HeadraceError:
        return  # the library refuses the file, or numbers its tokens differently
    texts = random_tokenizers.random_texts(source, made)
    expected = library_tokens(content, texts, allow_special)
    assert tokens_of(reference, texts) == expected
    if why_not_fast(definition) is None:
        try:
            fast = GigatokenEncoder(definition)
        except ValueError:
            return  # it refuses the file itself
        assert tokens_of(fast, texts) == expected
        assert not fast._failed


def _random_ranks(source: random.Random) -> dict[bytes, int]:
    """Bytes in any order, and tokens each of which is made of two that are there before it."""
    numbers = list(range(256))
    source.shuffle(numbers)
    ranks = {bytes([byte]): number for byte, number in enumerate(numbers)}
    letters = [letter.encode()[:1] for letter in random_tokenizers.LETTERS]
    tokens = [*letters, b" ", b"a", b"\n"]
    for _ in range(source.randrange(60)):
        joined = source.choice(tokens) + source.choice(tokens)
        if joined not in ranks and len(_merged(joined, ranks)) == 2:
            ranks[joined] = len(ranks)
            tokens.append(joined)
    return ranks


def _merged(text: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    pieces = [bytes([byte]) for byte in text]
    while True:
        pairs = [(ranks.get(a + b, 2**32), place) for place, (a, b) in enumerate(pairwise(pieces))]
        rank, place = min(pairs, default=(2**32, 0))
        if rank == 2**32:
            return pieces
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@examples(30)
@given(
    source=st.randoms(use_true_random=False), name=st.sampled_from(["r50k_base", "cl100k_base", "o200k_base"])
)
@pytest.mark.usefixtures("tiktoken")
def test_random_ranks_are_encoded_exactly(source: random.Random, name: str) -> None:
    import tiktoken

    pytest.importorskip("gigatoken")
    ranks = _random_ranks(source)
    special = {"<|a|>": len(ranks), "<|b": len(ranks) + 1}
    encoding = tiktoken.Encoding(
        name, pat_str=PUBLIC_ENCODINGS[name].pattern, mergeable_ranks=ranks, special_tokens=special
    )
    definition = find_tokenizer(encoding, eos=False, allow_special=True)
    assert why_not_fast(definition) is None
    texts = ["".join(source.choices([*random_tokenizers.LETTERS, *special], k=12)) for _ in range(60)]
    expected = [encoding.encode(text, allowed_special="all") for text in texts]
    assert tokens_of(GigatokenEncoder(definition), texts) == expected


@pytest.mark.parametrize(
    ("ranks", "special", "reason"),
    [
        ({b"ab": 300}, {}, "its ranks have gaps"),
        ({b"\x00": 256, b"ab": 0}, {}, "are not the single bytes"),
        ({}, {"<a": 256, "<a>": 257}, "'<a>' begins with another"),
        ({}, {"<a": 2**31}, "the number of a special token"),
    ],
)
@pytest.mark.usefixtures("tiktoken")
def test_ranks_that_the_fast_encoder_reads_differently_are_named(
    ranks: dict[bytes, int], special: dict[str, int], reason: str
) -> None:
    import tiktoken

    all_ranks = {bytes([byte]): byte for byte in range(256)} | ranks
    pattern = PUBLIC_ENCODINGS["r50k_base"].pattern
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=all_ranks, special_tokens=special)
    found = why_not_fast(find_tokenizer(encoding, eos=False, allow_special=True))
    assert found is not None
    assert reason in found


def plain(**changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer without merges."""
    vocabulary = {character: number for number, character in enumerate(random_tokenizers.BYTES)}
    made = random_tokenizers._file({"vocab": vocabulary, "merges": []}, None, random_tokenizers.byte_level())
    return {**made, **changes}


def defined(made: dict[str, Any], allow_special: bool = False) -> Definition:
    return huggingface_definition("made", content_of(made), allow_special=allow_special)


@pytest.mark.parametrize("patterns", sorted(SPLIT_PATTERNS), ids=lambda each: each[0][:20])
def test_known_patterns_are_supported(patterns: tuple[str, ...]) -> None:
    assert why_not_fast(defined(plain(pre_tokenizer=splits(*patterns)))) is None


@pytest.mark.parametrize("name", ["trained", "tiktoken", "deepseek"])
def test_common_tokenizers_are_supported(name: str, tokenizer_called: Callable[[str], Any]) -> None:
    for allow_special in (False, True):
        definition = find_tokenizer(tokenizer_called(name), allow_special=allow_special)
        assert why_not_fast(definition) is None


FOO = added_token(256, "foo")
MODEL = plain()["model"]
WITHOUT_B = {token: number for token, number in MODEL["vocab"].items() if token != "b"}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (plain(added_tokens=[{**FOO, "single_word": True}]), "'foo' has single_word set"),
        (plain(added_tokens=[{**FOO, "lstrip": True}]), "'foo' has lstrip set"),
        (plain(added_tokens=[{**FOO, "rstrip": True}]), "'foo' has rstrip set"),
        (plain(added_tokens=[{**FOO, "regex": True}]), "'foo' has the setting 'regex'"),
        (plain(added_tokens=[{**FOO, "normalized": True}], normalizer={"type": "NFC"}), "is 'normalized'"),
        (plain(added_tokens=[added_token(256, "K")], normalizer={"type": "NFC"}), "could make the added token"),
        (plain(added_tokens=[FOO, added_token(257, "afo", normalized=True)]), "'normalized' can overlap"),
        (plain(added_tokens=[FOO, added_token(257, "of", special=True)]), "count as plain text, can overlap"),
        (plain(added_tokens=[added_token(2**31, "far")]), "'far' has the number 2147483648"),
        (plain(normalizer={"type": "Lowercase"}), "the normalizer is a Lowercase"),
        (plain(pre_tokenizer=None), "the pre-tokenizer is missing"),
        (plain(pre_tokenizer=splits("a+")), "the pre-tokenizer is a Sequence of Split, ByteLevel"),
        (plain(pre_tokenizer=splits(random_tokenizers.CL100K_PATTERNS[0])), "the pre-tokenizer is"),
        (plain(pre_tokenizer=random_tokenizers.byte_level(use_regex=False)), "the pre-tokenizer is"),
        (plain(cleanup=True), "has the setting 'cleanup'"),
        (plain(model={**MODEL, "type": "WordPiece"}), "of type 'WordPiece', not 'BPE'"),
        (plain(model={**MODEL, "end_of_word_suffix": "</w>"}), "has end_of_word_suffix set"),
        (plain(model={**MODEL, "temperature": 1}), "the model has the setting 'temperature'"),
        (plain(model={**MODEL, "vocab": {**MODEL["vocab"], "x": 2**32 - 1}}), "a number outside 0 to"),
        (plain(model={**MODEL, "merges": [["a", "b"], "a b"]}), "a merge is listed twice"),
        (plain(model={**MODEL, "vocab": {**MODEL["vocab"], "ab": 7}}), "have the same number"),
        (plain(model={**MODEL, "vocab": WITHOUT_B, "merges": []}), "no token for the byte 0x62"),
    ],
)  # fmt: skip
def test_what_the_fast_encoder_does_not_follow_is_named(made: dict[str, Any], reason: str) -> None:
    found = why_not_fast(defined(made))
    assert found is not None
    assert reason in found


def test_an_added_token_keeps_its_number_beside_special_tokens() -> None:
    """The library would number the added token anew if the special one before it were left out."""
    made = plain(added_tokens=[added_token(256, "<s>", special=True), added_token(257, "foo")])
    definition = defined(made)
    assert tokens_of(reference_encoder(definition), ["afoo<s>"]) == [[97, 257, 60, 115, 62]]
    pytest.importorskip("gigatoken")
    encoder, name = choose_encoder(definition, [])
    assert name == "gigatoken"
    assert tokens_of(encoder, ["afoo<s>"]) == [[97, 257, 60, 115, 62]]


def test_ids_that_the_library_does_not_give_are_refused() -> None:
    with pytest.raises(HeadraceError, match=r"'foo' has the id 300 in the file, but .* gives it 256"):
        reference_encoder(defined(plain(added_tokens=[added_token(300, "foo")])))


def test_dropout_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(plain(model={**MODEL, "dropout": 0.1})))
    with pytest.raises(HeadraceError, match='a dropout of 0.1, .* set "dropout"'):
        find_tokenizer(file, eos=False)


def test_a_number_near_the_largest_does_not_end_the_process(tmp_path: Path) -> None:
    """gigatoken would allocate a place for each number below it, and abort."""
    (tmp_path / "huge.json").write_text(
        json.dumps(plain(model={**MODEL, "vocab": {**MODEL["vocab"], "far": 2**32 - 1}}))
    )
    (tmp_path / "a.txt").write_text("a far cry")
    report = headrace.build(
        tmp_path / "a.txt", tmp_path / "out", tokenizer=tmp_path / "huge.json", eos=False, workers=1
    )
    assert (report.encoder, report.tokens) == ("huggingface", 9)


class PanicException(BaseException):
    """As the Rust libraries raise it: it is no `Exception`."""


def test_a_panic_goes_on_with_the_exact_encoder(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("gigatoken")
    encoder = GigatokenEncoder(defined(plain()))

    class Panics:
        def encode_batch(self, *_: Any, **__: Any) -> Any:
            raise PanicException("index out of bounds")

    encoder._tokenizer = Panics()
    assert tokens_of(encoder, ["ab"]) == [[97, 98]]
    assert "index out of bounds; from here on, the slower exact encoder is used" in caplog.text


def test_a_panic_while_loading_is_a_reason_not_to_use_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gigatoken = pytest.importorskip("gigatoken")

    def panics(_: str) -> Any:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", panics)
    assert choose_encoder(defined(plain()), [])[1] == "huggingface"
    assert "not by the faster gigatoken" in caplog.text
    assert "Option::unwrap" in caplog.text


WORDS = st.text("ab", min_size=1, max_size=4)


@given(first=st.lists(WORDS, max_size=3), second=st.lists(WORDS, max_size=3))
def test_overlaps_are_those_that_some_text_shows(first: list[str], second: list[str]) -> None:
    def wins(one: str, other: str) -> bool:
        """Lay the second at each place from the beginning of the first, with a character in common."""
        for shift in range(len(one)):
            common = range(shift, min(len(one), shift + len(other)))
            agree = all(one[place] == other[place - shift] for place in common)
            if agree and (shift > 0 or len(one) >= len(other)):
                return True
        return False

    assert can_win(first, second) == any(wins(one, other) for one in first for other in second)
