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
    lines = [("mixing", _mixing(cost)), ("traffic", _traffic(cost)), ("memory", _memory(cost))]
    if cost.beginning_bytes:
        lines.append(("start", _start(cost)))
    return [*lines, ("price", _price(cost))]


def _mixing(cost: "RemoteCost") -> str:
    rows = "records" if cost.seq_len is None else f"rows of {cost.seq_len:,} tokens"
    return (
        f"shuffle={cost.order!r}: a batch of {cost.batch_rows:,.0f} {rows} comes from "
        f"{_rounded(cost.units_per_batch)} units in {_rounded(cost.shards_per_batch)} of {cost.shards:,} shards; "
        f"{_quality(cost.variance)}"
    )


def _traffic(cost: "RemoteCost") -> str:
    fetched = "whole units" if cost.whole_units else "single rows"
    rate = f"{fetched} are fetched: {cost.fetched_per_used:,.2f} bytes for each byte used"
    requests = counted(cost.requests_per_epoch, "request")
    if cost.stays_in_memory:
        return f"{rate}; all of it stays in memory after the first epoch: about {requests} once"
    return f"{rate}, {_rounded(cost.requests_per_batch)} requests a batch, {requests} an epoch"


def _memory(cost: "RemoteCost") -> str:
    if cost.stays_in_memory:
        return f"all {_megabytes(cost.data_bytes)} stay in memory, in each process that makes batches"
    return f"batches are drawn from {_megabytes(cost.working_set_bytes)} at a time"


def _start(cost: "RemoteCost") -> str:
    if not cost.whole_units:
        return (
            "at the beginning, and after a resume without a warm cache, every row waits for requests of its own until "
            f"all {_megabytes(cost.beginning_bytes)} have arrived"
        )
    return (
        f"at the beginning, and after a resume without a warm cache, about {_megabytes(cost.beginning_bytes)} must "
        "arrive before batches come at full speed"
    )


def _price(cost: "RemoteCost") -> str:
    once = "once" if cost.stays_in_memory else "an epoch"
    return (
        f"{_dollars(cost.dollars_per_epoch)} {once} for requests at $0.0004 per 1,000, without a cache; what leaves "
        "the region of a store costs extra"
    )


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
