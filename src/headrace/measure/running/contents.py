"""What the batches of a run held, added up: samples, tokens, bytes and padding."""

from collections.abc import Iterable
from typing import Any

from headrace.measure.running.sizes import BatchSize, Sizes, padding_share

_PADDING_SEEN = 16
"""Padding is counted in this many batches only: to count it, a batch must be read."""


class Contents:
    def __init__(self, pad_id: int | None) -> None:
        self._pad_id = pad_id
        self._sizes = Sizes()
        self._counts: dict[BatchSize, int] = {}
        """How many batches there were of each size."""
        self._padding: list[float | None] = []
        """Of the first batches; None where a batch does not say what is padding."""

    def add(self, batch: Any) -> None:
        size = self._sizes.of(batch)
        self._counts[size] = self._counts.get(size, 0) + 1

    @property
    def wants_padding(self) -> bool:
        return len(self._padding) < _PADDING_SEEN

    def add_padding(self, batch: Any) -> None:
        self._padding.append(padding_share(batch, self._pad_id))

    @property
    def samples(self) -> int | None:
        """None if any batch does not say."""
        return _total((size.samples, count) for size, count in self._counts.items())

    @property
    def tokens(self) -> int | None:
        """None if any batch does not say."""
        return _total((size.tokens, count) for size, count in self._counts.items())

    @property
    def bytes(self) -> int:
        return sum(size.bytes * count for size, count in self._counts.items())

    @property
    def padding(self) -> float | None:
        """The mean share over the batches that say what is padding; None if none does."""
        known = [share for share in self._padding if share is not None]
        return sum(known) / len(known) if known else None

    @property
    def batch_samples(self) -> tuple[int, int] | None:
        """The samples of the smallest and of the largest batch; None if all are the same."""
        samples = [size.samples for size in self._counts if size.samples is not None]
        if not samples:
            return None
        smallest, largest = min(samples), max(samples)
        return (smallest, largest) if smallest < largest else None


def _total(amounts: Iterable[tuple[int | None, int]]) -> int | None:
    """The sum of each amount times its count; None if an amount is unknown."""
    total = 0
    for amount, count in amounts:
        if amount is None:
            return None
        total += amount * count
    return total


def packing_of(loader: Any) -> tuple[float, float] | None:
    """Of a Headrace Loader of tokens: the shares of an epoch that are padding, and that are cut."""
    from headrace.load.loader import Loader

    if not isinstance(loader, Loader) or loader.settings.seq_len is None:
        return None
    reports = loader.report()
    listed = list(reports.values()) if isinstance(reports, dict) else [reports]
    used, padded = sum(r.tokens for r in listed), sum(r.padded for r in listed)
    cut = sum(r.cut for r in listed)
    return padded / max(1, used + padded), cut / max(1, used + cut)
