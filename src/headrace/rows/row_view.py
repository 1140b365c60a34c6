"""One row of an epoch in detail: which tokens of which documents it holds, and how much of it is padding."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.rows.recipe import Recipe, make_recipe
from headrace.rows.reference import TYPES, view
from headrace.rows.settings import RowSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class RowStretch:
    """Tokens `start` to `start + length` of a record, which begin at `place` in the row."""

    segment: int
    """The number in `segment_ids`: the first stretch of a row is 1."""
    place: int
    record: int | None
    """None with boundaries=False, where the documents of the tokens are not known."""
    record_length: int | None
    start: int
    length: int
    tokens: NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowView:
    position: int
    """The position of the row in its epoch."""
    epoch: int
    row: int
    """The number of the row before shuffling; the same as `position` if nothing is shuffled."""
    rows_per_epoch: int
    source: str
    """The source of the row, if the data is a mixture."""
    seq_len: int
    stretches: tuple[RowStretch, ...]

    @property
    def tokens(self) -> int:
        return sum(stretch.length for stretch in self.stretches)

    @property
    def padding(self) -> int:
        return self.seq_len - self.tokens

    @property
    def efficiency(self) -> float:
        return self.tokens / self.seq_len


def view_row(data: Any, settings: RowSettings, position: int, *, epoch: int = 0) -> RowView:
    """The row at a position of an epoch; -1 is the last one."""
    if settings.seq_len is None:
        raise SettingsError("seq_len is missing: it is needed to make rows of tokens")
    if epoch < 0:
        raise SettingsError(f"epoch={epoch}: must be at least 0")
    recipe = make_recipe(data, settings)
    rows = recipe.rows_per_epoch
    if not -rows <= position < rows:
        raise SettingsError(
            f"row {position}: an epoch has {rows:,} rows; give 0 to {rows - 1}, or -1 for the last"
        )
    position %= rows
    at = np.array([epoch * rows + position])
    places = recipe.stream.at(at)
    source = int(places.source[0])
    return RowView(
        position=position,
        epoch=epoch,
        row=int(places.row[0]),
        rows_per_epoch=rows,
        source=recipe.names[source],
        seq_len=settings.seq_len,
        stretches=_taken_apart(recipe, source, at),
    )


def _taken_apart(recipe: Recipe, source: int, at: NDArray[np.int64]) -> tuple[RowStretch, ...]:
    found = recipe.stretches(at)
    data = recipe.data[source]
    field = recipe.settings.token_field or data.token_field
    places = (np.cumsum(found.length) - found.length).tolist()
    columns = (found.record, found.start, found.length, found.address, found.type)
    listed = zip(places, *(column.tolist() for column in columns), strict=True)
    return tuple(
        RowStretch(
            segment=number + 1,
            place=place,
            record=record if record >= 0 else None,
            record_length=len(data[record][field]) if record >= 0 else None,
            start=start,
            length=length,
            # A copy, since the row may outlive the memory map.
            tokens=view(address, TYPES[kind], length).copy(),
        )
        for number, (place, record, start, length, address, kind) in enumerate(listed)
    )
