"""Padding or packing: how much of a batch is padding.

Most documents are short, and a few fill many rows. There are four ways to make batches of 16 rows of 2,048 tokens:

padded to seq_len    one document in each row, and every row has the maximum length
padded to longest    one document in each row, and every row is as long as the longest of its batch; shuffled
sorted by length     the same, with batches of documents of similar length, from pools of 50 batches
packed               several documents in each row, by best fit: Headrace's default

    | batches           | steps | places, million | padding, % | worst batch, % | shapes |
    | padded to seq_len | 1,293 |            42.4 |       80.8 |           93.5 |      1 |
    | padded to longest | 1,293 |            33.1 |       75.4 |           89.0 |    599 |
    | sorted by length  | 1,293 |            8.53 |       4.65 |           42.4 |    608 |     many shapes
    | packed            |   248 |            8.13 |       0.01 |           2.99 |      1 |     a fifth of the steps

Nothing here is timed: the figures depend only on the documents. In all four, documents longer than a row are cut into
full rows and a remainder. The plot shows rows of each kind, with documents in colour and padding in grey.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from classroom import BLUE, GREEN, GREY, ORANGE, PALE, RED, arguments, print_table, save_plot
from numpy.typing import NDArray

import headrace

SEQ_LEN, ROWS, POOL = 2048, 16, 50

Lengths = NDArray[np.int64]
Row = list[int]
"""The lengths of its documents, in order; the rest, up to the width, is padding."""


@dataclass(frozen=True)
class Batch:
    width: int
    rows: list[Row]

    @property
    def places(self) -> int:
        return self.width * len(self.rows)

    @property
    def padding(self) -> float:
        return 1 - sum(map(sum, self.rows)) / self.places


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rng = np.random.default_rng(0)
    lengths = document_lengths(2_000 if options.quick else 20_000, rng)
    documents = [np.ones(length, dtype=np.uint16) for length in lengths]
    data = headrace.from_arrays({"tokens": documents})
    pieces = rng.permutation(cut(lengths))
    batches = {
        "padded to seq_len": list(loaded(data, "pad")),
        "padded to longest": list(in_turn(pieces)),
        "sorted by length": list(in_turn(sorted_in_pools(pieces, rng))),
        "packed": list(loaded(data, "best-fit")),
    }
    short = [int((lengths < limit).mean() * 100) for limit in (256, SEQ_LEN)]
    print(
        f"{len(lengths):,} documents, with a median of {int(np.median(lengths))} tokens and at most {lengths.max():,}; "
        f"{short[0]}% have fewer than 256 tokens, and {short[1]}% fit into a row"
    )
    show(options, batches)


def document_lengths(count: int, rng: np.random.Generator) -> Lengths:
    """A log-normal distribution, typical of texts: the mean is twice the median, and the longest a hundred times it."""
    return np.clip(rng.lognormal(np.log(200), 1.2, count), 4, 40_000).astype(np.int64)


def cut(lengths: Lengths) -> Lengths:
    """Cut documents that are longer than a row into full rows and a remainder."""
    full = np.full(int((lengths // SEQ_LEN).sum()), SEQ_LEN)
    rests = lengths % SEQ_LEN
    return np.concatenate([full, rests[rests > 0]])


def in_turn(pieces: Lengths) -> Iterator[Batch]:
    """One piece per row, in the given order; each batch is as wide as its longest piece."""
    for first in range(0, len(pieces) - ROWS + 1, ROWS):
        mine = [int(length) for length in pieces[first : first + ROWS]]
        yield Batch(max(mine), [[length] for length in mine])


def sorted_in_pools(pieces: Lengths, rng: np.random.Generator) -> Lengths:
    """Sort pools of batches, then shuffle the batches of each pool, so that a model does not see them in order."""
    pools = []
    for first in range(0, len(pieces), POOL * ROWS):
        pool = np.sort(pieces[first : first + POOL * ROWS])
        whole = pool[: len(pool) // ROWS * ROWS].reshape(-1, ROWS)
        pools.append(whole[rng.permutation(len(whole))].reshape(-1))
    return np.concatenate(pools)


def loaded(data: headrace.Dataset, packing: str) -> Iterator[Batch]:
    """Read the rows of Headrace's own batches: segment ids number the documents of a row, and are 0 in padding."""
    loader = headrace.Loader(
        data, seq_len=SEQ_LEN, batch_size=ROWS, packing=packing, fields=("segment_ids",), rank=0, world_size=1
    )
    for batch in loader:
        yield Batch(SEQ_LEN, [np.bincount(row)[1:].tolist() for row in batch.segment_ids])


def show(options: argparse.Namespace, batches: dict[str, list[Batch]]) -> None:
    rows = []
    for how, each in batches.items():
        places = sum(batch.places for batch in each)
        padding = sum(batch.padding * batch.places for batch in each) / places
        worst = max(batch.padding for batch in each)
        shapes = len({batch.width for batch in each})
        rows.append([how, len(each), places / 1e6, padding * 100, worst * 100, shapes])
    header = ["batches", "steps", "places, million", "padding, %", "worst batch, %", "shapes"]
    print_table(f"an epoch in batches of {ROWS} rows of up to {SEQ_LEN:,} tokens", header, rows)
    save_plot(options, "padding", (9, 5.6), lambda figure: paint(figure, batches))


def paint(figure: Any, batches: dict[str, list[Batch]]) -> None:
    above, below = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    panels = above.subplots(1, 4, sharey=True)
    for axes, (how, each) in zip(panels, batches.items(), strict=True):
        by_width = sorted(each, key=lambda batch: batch.width)
        paint_rows(axes, by_width[len(by_width) * 3 // 4])
        axes.set_title(how, fontsize=9)
    panels[0].set_ylabel(f"a batch: {ROWS} rows")
    axes = below.subplots()
    colours = (RED, ORANGE, BLUE, GREEN)
    for colour, (how, each) in zip(colours, batches.items(), strict=True):
        shares = np.sort([batch.padding * 100 for batch in each])
        at = np.linspace(0, 100, min(len(shares), 100))
        axes.plot(at, np.quantile(shares, at / 100), color=colour, label=how)
    axes.set(
        title="Padding of each batch, from the best to the worst", xlabel="batches, %", ylabel="padding, %"
    )
    axes.set(ylim=(-3, 103), xlim=(0, 100))
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.42))


def paint_rows(axes: Any, batch: Batch) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    boxes: dict[str, list[Any]] = {}
    shades = (BLUE, GREEN, ORANGE, GREY)
    for number, row in enumerate(batch.rows):
        ends = np.cumsum(row).tolist()
        spans = [*zip([0, *ends[:-1]], ends, strict=True), (ends[-1], batch.width)]
        colours = [*(shades[(number + turn) % len(shades)] for turn in range(len(row))), PALE]
        for (first, last), colour in zip(spans, colours, strict=True):
            top, bottom = number - 0.42, number + 0.42
            corners = [(first, top), (last, top), (last, bottom), (first, bottom), (first, top)]
            boxes.setdefault(colour, []).append(Path(corners, closed=True))
    for colour, paths in boxes.items():  # one patch per colour keeps the file small
        axes.add_patch(
            PathPatch(Path.make_compound_path(*paths), facecolor=colour, edgecolor="white", linewidth=0.3)
        )
    axes.set(xlim=(0, SEQ_LEN), ylim=(ROWS - 0.5, -0.5), yticks=[], xticks=[0, 1024, 2048], xlabel="tokens")
    axes.grid(visible=False)


if __name__ == "__main__":
    main()
