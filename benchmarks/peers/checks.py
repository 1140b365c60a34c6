"""Does a peer give what was asked for: every row (document, image) once, in the right shape and type?

Each check reads one epoch of a small dataset and says what it found; `run.py` puts it beside the figures.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import image_peers
import numpy as np
import packed_peers
import token_data
from peer import Peer

Check = Callable[[Peer, Iterable[Any], Path], dict[str, Any]]
MULTIPLIERS = np.random.default_rng(7).integers(1, 2**62, 4096, dtype=np.int64)


def touch(batch: Any) -> None:
    """Read something of a batch, so that one which is made only when it is looked at is made."""
    if isinstance(batch, tuple | list):
        batch = batch[0]
    elif not hasattr(batch, "shape"):
        batch = batch["tokens"] if "tokens" in batch else batch["input_ids"]
    # As an array: indexing a tensor costs as much as making one, and would be counted as the loader's time.
    np.asarray(batch)[-1, -1].max()


def _key(tokens: Any) -> int:
    """A number for a row of tokens; wrapping around is intended."""
    values = np.asarray(tokens).astype(np.int64)
    return int((values * MULTIPLIERS[: len(values)]).sum()) ^ len(values)


def check_tokens(peer: Peer, loader: Iterable[Any], folder: Path) -> dict[str, Any]:
    rows = token_data.rows_of(folder)
    keys: list[int] = []
    dtype, shape = "", list[int]()
    for batch in loader:
        first = batch[0] if isinstance(batch, tuple) else batch
        dtype, shape = str(first.dtype).removeprefix("torch."), list(first.shape)
        if not peer.permutes:
            if isinstance(batch, tuple) and not bool((batch[0][:, 1:] == batch[1][:, :-1]).all()):
                raise ValueError("y is not x one token on")
            break
        keys.extend(map(_key, np.asarray(first)))
    found = {"dtype": dtype, "shape": shape}
    if not peer.permutes:
        return found
    return {**found, "rows": len(keys), **_compared(keys, list(map(_key, rows)))}


def _compared(got: list[int], expected: list[int]) -> dict[str, Any]:
    distinct = set(got)
    return {
        "every_one_once": sorted(got) == sorted(expected),
        "in_stored_order": got == expected,
        "missing": len(set(expected) - distinct),
        "twice": len(got) - len(distinct),
        "unknown": len(distinct - set(expected)),
    }


def check_packed(peer: Peer, loader: Iterable[Any], folder: Path) -> dict[str, Any]:
    """The padding is that of one epoch, the last, incomplete batch included."""
    documents = packed_peers.Documents(folder)
    keys, tokens, rows, dtype = list[int](), 0, 0, ""
    for batch in loader:
        pieces = list(packed_peers.segments(batch))
        keys.extend(map(_key, pieces))
        tokens += sum(map(len, pieces))
        count, dtype = packed_peers.rows_and_dtype(batch)
        rows += count
    rows = rows or len(loader.dataset)  # type: ignore[attr-defined]
    return {
        "dtype": dtype.removeprefix("torch."),
        "documents": len(keys),
        "rows": rows,
        "tokens": tokens,
        "tokens_per_row": tokens / rows,
        "padding_percent": 100 * (1 - tokens / (rows * packed_peers.SEQ_LEN)),
        **_compared(keys, [_key(documents[number]) for number in range(len(documents))]),
    }


def check_images(peer: Peer, loader: Iterable[Any], folder: Path) -> dict[str, Any]:
    paths = image_peers.paths_of(folder)
    labels: list[int] = []
    most, dtype, shape = 0, "", []
    for images, numbers in loader:
        dtype, shape = str(images.dtype).removeprefix("torch."), list(images.shape)
        if not peer.permutes:
            return {"dtype": dtype, "shape": shape}
        for image, number in zip(images, numbers.tolist(), strict=True):
            expected = image_peers.decode(Path(paths[number]).read_bytes())
            most = max(most, int(np.abs(np.asarray(image).astype(int) - expected).max()))
            labels.append(number)
    found = {"dtype": dtype, "shape": shape, "largest_difference_to_pillow": most}
    return {**found, "images": len(labels), **_compared(labels, list(range(len(paths))))}


CHECKS: dict[str, Check] = {"tokens": check_tokens, "packed": check_packed, "images": check_images}
