"""What the order of remote data costs, in a few lines."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.cli.terminal import counted

if TYPE_CHECKING:
    from headrace.measure.doctor.remote_cost import RemoteCost


def cost_lines(costs: "Mapping[str, RemoteCost]") -> list[tuple[str, str]]:
    """Pairs of a short label and what it says; each source of a mixture has its own."""
    lines = []
    for name, cost in costs.items():
        source = f"{name}: " if name else ""
        lines += [(label, source + text) for label, text in _lines_of(cost)]
    return lines


def _lines_of(cost: "RemoteCost") -> list[tuple[str, str]]:
    requests = _rounded(cost.requests_per_batch)
    rows = "records" if cost.seq_len is None else f"rows of {cost.seq_len:,} tokens"
    fetched = "whole units" if cost.whole_units else "single rows"
    return [
        (
            "mixing",
            f"shuffle={cost.order!r}: a batch of {cost.batch_rows:,.0f} {rows} comes from "
            f"{_rounded(cost.units_per_batch)} units in {_rounded(cost.shards_per_batch)} of {cost.shards:,} shards; "
            f"{_quality(cost.variance)}",
        ),
        (
            "traffic",
            f"{fetched} are fetched: {cost.fetched_per_used:,.2f} bytes for each byte used, {requests} requests a "
            f"batch, {counted(cost.requests_per_epoch, 'request')} an epoch",
        ),
        ("memory", f"batches are drawn from {_megabytes(cost.working_set_bytes)} at a time"),
        (
            "price",
            f"{_dollars(cost.dollars_per_epoch)} an epoch for requests at $0.0004 per 1,000, without a cache; what "
            "leaves the region of a store costs extra",
        ),
    ]


def _quality(variance: float) -> str:
    if variance <= 1:
        return "it is at least as well mixed as by a perfect shuffle"
    return f"the variance of its mean is at worst {_rounded(variance)} times that of a perfect shuffle"


def _rounded(number: float) -> str:
    if number >= 10:
        return f"{number:,.0f}"
    return f"{number:.1f}".removesuffix(".0") if number >= 1 else f"{number:.2g}"


def _dollars(price: float) -> str:
    return f"${price:,.2f}" if price >= 0.01 else "less than $0.01"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} KB"
