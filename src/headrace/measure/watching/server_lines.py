"""Servers at a glance: one line for each, those that are not in use first.

grpc://10.0.0.9:9000  silent     0/s  41.0 ms  12 late  2 faults    0.0 MB/s
grpc://10.0.0.7:9000  up      52.3/s  38.0 ms   3 late  0 faults    6.4 MB/s
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.observe.stats import ServerStats

_MOST_LINES = 8
_SHORTEST_NAME = 12


@dataclass(frozen=True, kw_only=True)
class ServerRow:
    """A server: how fast it was lately, and what went wrong in all the time that it was watched."""

    name: str
    state: str
    batches_per_second: float
    mb_per_second: float
    latency_ms: float
    """From the request to the answer."""
    late: int
    """Its late answers: another server was asked as well."""
    faults: int


def server_rows(
    recent: Mapping[str, ServerStats], seconds: float, total: Mapping[str, ServerStats]
) -> list[ServerRow]:
    """Rates are those of the last `seconds`. Servers that need a look come first: not in use, then the slowest."""
    rows = []
    for name, server in recent.items():
        whole = total.get(name, server)
        # A server that did not answer lately is shown with what it took before.
        latency = server.latency if server.answers else whole.latency
        rows.append(
            ServerRow(
                name="".join(each if each.isprintable() else "?" for each in name),
                state=server.state,
                batches_per_second=server.answers / seconds if seconds > 0 else 0.0,
                mb_per_second=server.bytes / seconds / 1e6 if seconds > 0 else 0.0,
                latency_ms=1e3 * latency,
                late=whole.late,
                faults=whole.faults,
            )
        )
    return sorted(rows, key=lambda row: (row.state == "up", -row.latency_ms))


def server_words(row: ServerRow) -> str:
    """All about it but its name."""
    return " ".join(_cells(row))


def _cells(row: ServerRow) -> tuple[str, ...]:
    """The most important ones first: a narrow terminal may not have room for the last."""
    return (
        row.state,
        f"{row.batches_per_second:,.1f}/s",
        f"{row.latency_ms:,.1f} ms",
        f"{row.late:,} late",
        f"{row.faults:,} {'fault' if row.faults == 1 else 'faults'}",
        f"{row.mb_per_second:,.1f} MB/s",
    )


def server_lines(rows: Sequence[ServerRow], width: int) -> Iterator[Any]:
    """As rich text, with figures below each other; of many servers only the first are shown."""
    from rich.text import Text

    shown = rows[:_MOST_LINES]
    if not shown:
        return
    cells = [_cells(row) for row in shown]
    rooms = [max(map(len, column)) for column in zip(*cells, strict=True)]
    figures = sum(room + 2 for room in rooms)
    longest = max(len(row.name) for row in shown)
    name_room = max(_SHORTEST_NAME, min(longest, width - 2 - figures))
    for row, (state, *others) in zip(shown, cells, strict=True):
        line = Text(f"  {_shortened(row.name, name_room):<{name_room}}  ")
        line.append(f"{state:<{rooms[0]}}", "green" if state == "up" else "bold red")
        for cell, room in zip(others, rooms[1:], strict=True):
            line.append(f"  {cell:>{room}}")
        yield line
    if len(rows) > len(shown):
        yield Text(f"  and {len(rows) - len(shown)} more servers, which answer faster")


def _shortened(name: str, room: int) -> str:
    """Servers often differ only at the end of their addresses."""
    return name if len(name) <= room else ".." + name[2 - room :]
