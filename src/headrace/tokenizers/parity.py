"""Whether the fast encoder may replace the reference: only if it follows all that the definition asks for
(`fast_support.py`), and gives the same tokens for a sample.

The sample is a fixed set of difficult strings (spaces, digits, scripts, emoji, control characters, special tokens that
are written out) and some of the user's own documents.
"""

import functools
import importlib.util
import logging
from collections.abc import Sequence

import numpy as np

from headrace.readers.columns import Texts
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.encoders import Encoder, GigatokenEncoder, reference_encoder
from headrace.tokenizers.fast_support import why_not_fast

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 2**18
_AWKWARD = (
    *(
        "",
        " ",
        "  ",
        "   x",
        "\n",
        "\n\n \n",
        "\t\tif x:\n\t\t\treturn\r\n",
        "a" * 300,
        "1234567890 3.14159 1e-10",
    ),
    *(
        "don't I'LL we've it's",
        "naïve café Zürich",
        "Привет, мир!",
        "こんにちは世界",
        "你好，世界",
        "안녕하세요",
        "مرحبا بالعالم",
    ),
    *(
        "👩‍👩‍👧‍👦 🇩🇪 ❤️ 🏳️‍🌈",
        "e\u0301 \u00e9 \ufb01 \u1e9b\u0323",
        "\u200b\u200d\ufeff\u00a0\u2028",
        "\x00\x01\x7f",
        "ſ K ǆ İ ß",
    ),
    *(
        "<|endoftext|>",
        "a<|endoftext|>b",
        "<s></s>[SEP][CLS]<pad>",
        "def f(x):\n    return x**2  # ²\n",
        "http://a.b/c?d=e&f=%20",
    ),
    *(
        "{'a': [1, 2, {\"b\": null}]}",
        "$\\frac{1}{2}$ \\n \\t",
        "ＦＵＬＬ ｗｉｄｔｈ",
        "𝕳𝖊𝖑𝖑𝖔 𐍈",
        "       trailing       ",
        "\u3000\u2003x\u2003",
    ),
)


def choose_encoder(definition: Definition, documents: Sequence[bytes]) -> tuple[Encoder, str]:
    """The fastest encoder that is exact, and its name: 'gigatoken', or the kind of the reference."""
    reference = reference_encoder(definition)
    if definition.kind == "bytes" or importlib.util.find_spec("gigatoken") is None:
        return reference, definition.kind
    fast, reason = _fast_encoder(definition, reference, documents)
    if fast is None:
        _say_why_slow(definition.name, definition.kind, reason)
        return reference, definition.kind
    return fast, "gigatoken"


def _fast_encoder(
    definition: Definition, reference: Encoder, documents: Sequence[bytes]
) -> tuple[Encoder | None, str]:
    """The fast encoder, or None and the reason."""
    reason = why_not_fast(definition)
    if reason is not None:
        return None, reason
    try:
        fast = GigatokenEncoder(definition)
    except Exception as error:  # it refuses tokenizers in many ways
        return None, str(error)
    difference = first_difference(reference, fast, [*(text.encode() for text in _AWKWARD), *documents])
    if difference is not None:
        return None, f"it gives other tokens for {difference[:80]!r}"
    return fast, ""


@functools.cache
def _say_why_slow(name: str, kind: str, reason: str) -> None:
    """Once in a process, since each thread of a stream makes an encoder of its own."""
    logger.warning("%s is encoded by %s, not by the faster gigatoken: %s", name, kind, reason)


def load_encoder(definition: Definition, name: str) -> Encoder:
    """The encoder that `choose_encoder` named, in another process."""
    return GigatokenEncoder(definition) if name == "gigatoken" else reference_encoder(definition)


def first_difference(reference: Encoder, other: Encoder, documents: Sequence[bytes]) -> bytes | None:
    """The first document that the two encode differently."""
    texts = as_texts(documents)
    expected, got = reference.encode(texts), other.encode(texts)
    for number, (right, wrong) in enumerate(zip(expected, got, strict=True)):
        if not np.array_equal(right, wrong):
            return documents[number]
    return None


def as_texts(documents: Sequence[bytes]) -> Texts:
    stops = np.cumsum([len(document) for document in documents], dtype=np.int64)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    return Texts(np.frombuffer(b"".join(documents), dtype=np.uint8), stops - lengths, stops)
