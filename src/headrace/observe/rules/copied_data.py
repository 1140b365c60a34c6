"""Large data that is copied for each worker process."""

from collections.abc import Sequence

from headrace.observe.data_in_memory import DataKind, DataPiece
from headrace.observe.facts import Facts, Sent
from headrace.observe.findings import (
    LARGE_BYTES,
    Finding,
    Outcome,
    Rule,
    each_of,
    level_of_copies,
    listed,
    look_at_sent_data,
)


def look(facts: Facts) -> Outcome | None:
    return look_at_sent_data(facts, copied_data)


RULE = Rule("copied-data", "no large data is copied to workers", look)


def copied_data(held: Sequence[DataPiece], processes: int, sent: Sent) -> Finding | None:
    kinds = (DataKind.ARRAY, DataKind.OBJECTS) if sent is Sent.EACH else (DataKind.OBJECTS,)
    data = [each for each in held if each.kind in kinds and each.bytes >= LARGE_BYTES]
    if not data:
        return None
    found = f"Data in memory ({listed(data)}) is copied for {each_of(processes, 'worker')}"
    if sent is Sent.FORK:
        found += " little by little, as references are counted"
    remedy = "Write it to a file once and map it in the worker (headrace.build, np.load with mmap_mode), or use threads"
    if sent is not Sent.EACH:
        remedy += "; arrays are shared too, unlike lists"
    return Finding("copied-data", level_of_copies(processes, data), found, remedy)
