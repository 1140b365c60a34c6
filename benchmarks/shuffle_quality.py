"""How well orders of remote data mix: `python benchmarks/shuffle_quality.py` draws docs/shuffle_quality.svg.

Two million rows of 4 KB in shards of 64 MB that each hold one kind of rows, in batches of 256. For each order: the
variance of a batch's mean against that of an independent draw, and what must be in memory at the same time.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from headrace.order.keys import derive
from headrace.order.lanes import UnitOrder
from headrace.order.permutation import permute

ROOT = Path(__file__).parents[1]
ROW_BYTES, BATCH = 4096, 256
UNIT = 2**22 // ROW_BYTES
SHARD = 2**26 // ROW_BYTES
BUFFER = 10_000
_SHOWN_BATCHES = 40
INK, FAINT = "#1f2328", "#59636e"
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    name: str
    working_set: str
    make: Callable[[int], Numbers]
    """The rows in the order of an epoch."""


def by_units(lanes: int) -> Callable[[int], Numbers]:
    def make(rows: int) -> Numbers:
        order = UnitOrder(np.full(rows // UNIT, UNIT), lanes, np.uint64(1))
        parts = [np.arange(first, min(first + 2**16, rows)) for first in range(0, rows, 2**16)]
        return np.concatenate([order.rows_at(part) for part in parts])

    return make


def at_random(rows: int) -> Numbers:
    return permute(np.arange(rows), rows, np.uint64(1))


def in_order(rows: int) -> Numbers:
    return np.arange(rows)


def with_a_buffer(rows: int) -> Numbers:
    """Shards in random order, then a buffer: each row that comes takes the place of one that goes, at random."""
    shards = permute(np.arange(rows // SHARD), rows // SHARD, np.uint64(1))
    coming = (shards[:, None] * SHARD + np.arange(SHARD)).ravel()
    places = np.asarray(derive(np.uint64(2), np.arange(rows)) % np.uint64(BUFFER), dtype=np.int64)
    buffer, order = coming[:BUFFER].copy(), np.empty(rows, dtype=np.int64)
    for number in range(rows - BUFFER):
        place = places[number]
        order[number] = buffer[place]
        buffer[place] = coming[number + BUFFER]
    order[rows - BUFFER :] = buffer
    return order


ORDERS = [
    Order("global shuffle", "every row from another place", at_random),
    Order("units, 256 lanes", "1,024 MB", by_units(256)),
    Order("units, 128 lanes (the default)", "512 MB", by_units(128)),
    Order("units, 32 lanes", "128 MB", by_units(32)),
    Order("shuffled shards and a buffer of 10,000 rows", "41 MB", with_a_buffer),
    Order("no shuffle", "4 MB", in_order),
]


def variance(order: Numbers) -> float:
    """Of the mean of a batch, against an independent draw, if all rows of a shard are alike and shards are not."""
    shard = order // SHARD
    batches, kinds = len(order) // BATCH, int(shard.max()) + 1
    cell = np.arange(batches)[:, None] * kinds + shard[: batches * BATCH].reshape(batches, BATCH)
    share = np.bincount(cell.ravel(), minlength=batches * kinds).reshape(batches, kinds) / BATCH
    of_a_draw = (1 - 1 / kinds) / BATCH
    return float(((share - 1 / kinds) ** 2).sum(axis=1).mean() / of_a_draw)


def draw(found: list[tuple[Order, Numbers, float]], out: Path) -> None:
    settings = {"svg.hashsalt": "shuffle", "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(len(found), figsize=(9, 0.95 * len(found) + 0.6), facecolor="white")
        for (order, rows, worse), axis in zip(found, axes, strict=True):
            middle = len(rows) // 2 // BATCH * BATCH
            shown = rows[middle : middle + _SHOWN_BATCHES * BATCH].reshape(_SHOWN_BATCHES, BATCH)
            shards = np.sort(shown // SHARD, axis=1)
            last = len(rows) // SHARD - 1
            axis.imshow(shards, aspect="auto", cmap="turbo", interpolation="nearest", vmin=0, vmax=last)
            axis.set_xticks([])
            axis.set_yticks([])
            for side in axis.spines.values():
                side.set_visible(False)
            axis.set_title(order.name, loc="left", fontsize=9, color=INK, pad=3)
            said = f"variance {worse:.1f}" if worse < 100 else f"variance {worse:.0f}"
            axis.set_title(
                f"{said}   needed at once: {order.working_set}", loc="right", fontsize=9, color=FAINT, pad=3
            )
        figure.text(
            0.01,
            0.008,
            f"Each line is a batch of {BATCH} rows, sorted by shard; each colour is a shard. A good shuffle has all "
            "colours in every line.",
            color=FAINT,
        )
        figure.tight_layout(rect=(0, 0.03, 1, 1), h_pad=0.9)
        figure.savefig(out, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128 * SHARD)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "shuffle_quality.svg")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "shuffle_quality.json")
    options = parser.parse_args()
    found = []
    for order in ORDERS:
        rows = order.make(options.rows)
        found.append((order, rows, variance(rows)))
        print(f"{order.name:45} variance {found[-1][2]:7.2f}   needed at once: {order.working_set}")
    draw(found, options.out)
    options.json.write_text(
        json.dumps({order.name: round(worse, 2) for order, _, worse in found}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
