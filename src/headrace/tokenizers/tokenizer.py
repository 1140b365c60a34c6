"""Documents -> the token column of a shard: encode, guard the boundaries, add BOS and EOS, narrow the dtype."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.format.ragged import Ragged
from headrace.readers.columns import Strings, Texts
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.encoders import Encoder


def tokenize(
    texts: Texts | Strings, definition: Definition, encoder: Encoder, report_bad: Callable[[int, str], None]
) -> Ragged:
    """`report_bad(i, reason)` is called for a document that cannot be kept."""
    encoded = encoder.encode(texts)
    tokens = _with_boundaries(encoded, definition)
    if _is_forged(tokens, definition):
        tokens = _with_boundaries(_drop_forged(encoded, definition, report_bad), definition)
    return tokens


def _is_forged(tokens: Ragged, definition: Definition) -> bool:
    """Whether a boundary token is anywhere but at a boundary: then there are more of them than boundaries."""
    if definition.allow_special:
        return False
    boundaries = {definition.eos_id, definition.bos_id} - {None}
    expected = 2 * len(tokens) if definition.eos_id == definition.bos_id else len(tokens)
    return any(np.count_nonzero(tokens.values == boundary) > expected for boundary in boundaries)


def _drop_forged(encoded: Ragged, definition: Definition, report_bad: Callable[[int, str], None]) -> Ragged:
    """No encoder should give a boundary token for plain text. If one does, the document is bad, and is not split."""
    keep = np.ones(len(encoded), dtype=bool)
    for boundary in (definition.eos_id, definition.bos_id):
        if boundary is None:
            continue
        found = np.flatnonzero(encoded.values == boundary)
        for document in np.unique(np.searchsorted(encoded.offsets, found, side="right") - 1):
            if keep[document]:
                report_bad(int(document), f"its text encodes to the boundary token {boundary}")
            keep[document] = False
    return Ragged.from_items([item for item, kept in zip(encoded, keep, strict=True) if kept], np.uint32)


def _with_boundaries(encoded: Ragged, definition: Definition) -> Ragged:
    dtype = np.dtype(definition.dtype).newbyteorder("<")
    count = len(encoded)
    before, after = int(definition.bos_id is not None), int(definition.eos_id is not None)
    if not before + after:
        return Ragged(encoded.values.astype(dtype), encoded.offsets)
    offsets = encoded.offsets + np.arange(count + 1, dtype=np.int64) * (before + after)
    values = np.empty(int(offsets[-1]), dtype=dtype)
    ordinary: NDArray[np.bool_] = np.ones(len(values), dtype=bool)
    if definition.bos_id is not None:
        ordinary[offsets[:-1]] = False
        values[offsets[:-1]] = definition.bos_id
    if definition.eos_id is not None:
        ordinary[offsets[1:] - 1] = False
        values[offsets[1:] - 1] = definition.eos_id
    values[ordinary] = encoded.values
    return Ragged(values, offsets)
