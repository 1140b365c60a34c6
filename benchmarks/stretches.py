"""The way not taken: each shard keeps its own by-length ordering, and a table of stretches joins them.

A stretch is 'the records of one length in one shard': its first place in the whole ordering, its shard, and its
position in that shard's ordering. `ordering.py` measures it beside what the format does.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.format.index import histogram, stable_order


def by_length(lengths: Any) -> dict[str, Any]:
    """A shard's ordering and histogram."""
    distinct, counts = histogram(lengths)
    return {"order": stable_order(lengths).astype("<u4"), "lengths": distinct, "counts": counts}


def merge_stretches(histograms: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """The table from each shard's (lengths, counts)."""
    shards = np.repeat(np.arange(len(histograms), dtype="<u4"), [len(lengths) for lengths, _ in histograms])
    lengths = np.concatenate([lengths for lengths, _ in histograms])
    counts = np.concatenate([counts for _, counts in histograms]).astype("<u8")
    within = [np.cumsum(counts, dtype=np.uint64) - counts for _, counts in histograms]
    position = np.concatenate(within).astype("<u4")
    ordered = np.argsort(lengths, kind="stable")
    counts, lengths = counts[ordered], lengths[ordered]
    ends = np.cumsum(counts, dtype="<u8")
    distinct, where = np.unique(lengths, return_index=True)
    first = ends - counts
    return {
        "lengths": distinct.astype("<u4"),
        "starts": np.append(first[where], ends[-1:]).astype("<u8"),
        "first": first.astype("<u8"),
        "shard": shards[ordered],
        "position": position[ordered],
    }
