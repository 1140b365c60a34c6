"""Memory maps that are read into memory to be sent to worker processes."""

from collections.abc import Sequence

from headrace.observe.data_in_memory import DataKind, DataPiece
from headrace.observe.facts import Facts, Sent
from headrace.observe.findings import (
    Finding,
    Outcome,
    Rule,
    each_of,
    level_of_copies,
    listed,
    look_at_sent_data,
)

LARGE_MAP_BYTES = 10_000_000


def look(facts: Facts) -> Outcome | None:
    return look_at_sent_data(facts, pickled_maps)


RULE = Rule("pickled-maps", "no memory map is copied to workers", look)


def pickled_maps(held: Sequence[DataPiece], processes: int, sent: Sent) -> Finding | None:
    maps = [each for each in held if each.kind is DataKind.MAP and each.bytes >= LARGE_MAP_BYTES]
    if not maps or sent is Sent.FORK:
        return None
    copies = 1 if sent is Sent.ONCE else processes
    how = "once, for all workers" if sent is Sent.ONCE else f"for {each_of(processes, 'worker')}"
    return Finding(
        "pickled-maps",
        level_of_copies(copies, maps),
        f"Memory maps in the dataset ({listed(maps)}) are read into memory whole, {how}: a memory map is pickled with "
        "its content",
        "Keep the path instead, and open the map in the worker when it is first used; or use headrace.open, whose "
        "datasets reopen their files",
    )
