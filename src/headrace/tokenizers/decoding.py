"""Token ids -> text, from the definition that is stored beside the shards."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import CorruptError, MissingExtraError, how_to_install
from headrace.store.store import Store
from headrace.tokenizers.encoders import ranks_of

Decoder = Callable[[Sequence[int]], str]


def decoder_for(store: Store, tokenizer: Mapping[str, Any]) -> Decoder:
    """`tokenizer` is the entry in the manifest of the dataset in `store`.

    Special tokens are written out; invalid UTF-8 becomes U+FFFD.
    """
    kind = tokenizer.get("kind")
    if kind == "bytes":
        return _from_vocabulary({i: bytes([i]) for i in range(256)}, tokenizer.get("special_tokens") or {})
    content = store.read(str(tokenizer["stored"]["file"]))
    if kind == "tiktoken":
        parsed = json.loads(content)
        vocabulary = {rank: token for token, rank in ranks_of(parsed).items()}
        return _from_vocabulary(vocabulary, parsed["special_tokens"])
    if kind == "huggingface":
        try:
            import tokenizers
        except ImportError:
            raise MissingExtraError(f"decoding needs tokenizers: {how_to_install('tokenizers')}") from None
        loaded = tokenizers.Tokenizer.from_buffer(content)
        return lambda ids: str(loaded.decode([int(i) for i in ids], skip_special_tokens=False))
    raise CorruptError(f"{store.name}: the manifest names a tokenizer of the unknown kind {kind!r}")


def _from_vocabulary(vocabulary: dict[int, bytes], special: Mapping[str, int]) -> Decoder:
    vocabulary |= {int(i): name.encode() for name, i in special.items()}
    unknown = "\ufffd".encode()
    return lambda ids: b"".join(vocabulary.get(int(i), unknown) for i in ids).decode(errors="replace")
