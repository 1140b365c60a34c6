"""Texts with characters that are younger than some library's tables are found, wherever they stand."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.tokenizers import disputed_characters as module
from headrace.tokenizers.disputed_characters import find_disputed
from headrace.tokenizers.parity import as_texts

YOUNG = "\u088f\u20c1\U0001faea\U000323b0\U00033479"


@given(
    texts=st.lists(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(YOUNG)), max_size=12)),
    chunk=st.sampled_from([1, 3, 7, 2**17]),
)
def test_as_many_as_a_character_at_a_time(texts: list[str], chunk: int) -> None:
    table = module._table()
    expected = [
        number for number, text in enumerate(texts) if any(table[ord(c)] for c in text if ord(c) >= 0x800)
    ]
    whole, module._CHUNK_BYTES = module._CHUNK_BYTES, chunk
    try:
        assert find_disputed(as_texts([text.encode() for text in texts])).tolist() == expected
    finally:
        module._CHUNK_BYTES = whole


def test_young_characters_are_unsettled_and_old_ones_are_not() -> None:
    texts = [*(f"x{c}y" for c in YOUNG), "naïve 你好 안녕 👩‍👩‍👧 𝕳", ""]
    assert find_disputed(as_texts([text.encode() for text in texts])).tolist() == list(range(len(YOUNG)))
