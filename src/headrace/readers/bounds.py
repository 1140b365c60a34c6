"""The bound on one record: a longer one is a bad record, so that a damaged or hostile file cannot fill the memory."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.readers.columns import ReportBad

MAX_RECORD_BYTES = 128 * 2**20
"""The default: far more than a document has, and little enough that a few of them fit into memory."""


def too_long(size: int, most: int) -> str:
    return (
        f"a record of {size:,} bytes, and max_record_bytes is {most:,}; if it is one record, allow it with "
        f"max_record_bytes={size}"
    )


@dataclass(frozen=True)
class Bound:
    """How many bytes a record may have. `tell` is called with the position and the size of each longer one."""

    most: int
    tell: Callable[[int, int], None]


def bound_on_rows(most: int, report_bad: ReportBad, first_row: Callable[[], int]) -> Bound:
    """A bound for rows that are counted from `first_row`, which only messages need."""
    return Bound(most, lambda row, size: report_bad(f"row {first_row() + row}", too_long(size, most)))
