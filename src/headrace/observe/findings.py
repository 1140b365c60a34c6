"""What is known to slow training down: one function a rule, from what was found to a `Finding`, or to nothing.

    workers(12, cores=4, ranks=1)  ->  Finding("workers", warning, "12 workers for 4 cores: ...", "Give 4 or fewer")

`advice.py` says some of them when an iteration begins; `headrace doctor` asks them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.observe import host
from headrace.observe.held import Held, HeldKind
from headrace.pack.packing import Packing

NAMES: Mapping[str, str] = {
    "waiting": "the step does not wait for data",
    "batch-size": "the batch fills the accelerator's tiles",
    "workers": "workers have a core each",
    "cpu-use": "the processor has time to launch kernels",
    "pageable-copies": "batches are copied from page-locked memory",
    "blocking-copies": "the step does not wait for its copies",
    "pinned-memory": "memory is page-locked only for an accelerator",
    "padding": "little is padded",
    "pickled-maps": "no memory map is copied to workers",
    "copied-data": "no large data is copied to workers",
    "random-reads": "storage is fast at the reads that the order asks for",
    "sample-by-sample": "batches are fetched at once where they can be",
    "streamed": "nothing is read again and again that fits in memory",
    "in-ram": "what is in memory leaves room for the rest",
}
"""All findings, and what is so without them."""

TILE, BETTER_TILE = 8, 32
CPU_NOTE, CPU_ALARM = 0.40, 0.75
PADDING_SHARE = 0.10
WAITING_SHARE = 0.10
"""MLPerf Storage asks for an accelerator that is used 90 % of the time."""
LARGE_BYTES = 100_000_000
"""Below that, a copy for each worker is not worth a word."""
LARGE_MAP_BYTES = 10_000_000
FITS_SHARE = 0.25
FULL_SHARE = 0.50


class Level(StrEnum):
    NOTE = "note"
    WARNING = "warning"
    ALARM = "alarm"


@dataclass(frozen=True)
class Finding:
    name: str
    level: Level
    found: str
    """What is so, with its numbers, and what it costs."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}. {self.remedy}."


@dataclass(frozen=True)
class NotLooked:
    reason: str


Outcome = Sequence[Finding] | NotLooked
Outcomes = Mapping[str, Outcome]
"""By a finding's name: what was found, nothing if all is well, or why nobody looked."""


def some(finding: Finding | None) -> list[Finding]:
    return [] if finding is None else [finding]


def batch_size(size: int, row: int = 1) -> Finding | None:
    """`row`: tokens of a row, where all rows are as long: then a matrix has so many lines for each."""
    if size % TILE == 0:
        return None
    whole = size * row % TILE == 0
    below, above = size // TILE * TILE, (size // TILE + 1) * TILE
    choice = f"{below} or {above}" if below else str(above)
    lines = f" of {row:,} tokens, {size * row:,} in all" if row > 1 else ""
    return Finding(
        "batch-size",
        # Of a small batch, something else is long: pixels, or tokens that nobody here has counted.
        Level.WARNING if size > TILE and not whole else Level.NOTE,
        f"Batches of {size}{lines}: no multiple of {TILE}, so that matrix units compute on padding"
        + (" wherever rows are not laid end to end" if whole else ""),
        f"Give batch_size={choice}, better a multiple of {BETTER_TILE}"
        + (f", or a seq_len that is a multiple of {TILE}" if row > 1 and not whole else ""),
    )


def waiting(share: float, busiest: str | None = None) -> Finding | None:
    if share <= WAITING_SHARE:
        return None
    what = f"; most of the making is {busiest!r}" if busiest else ""
    return Finding(
        "waiting",
        Level.WARNING,
        f"The loop waits for data {share:.0%} of its time{what}",
        "Run headrace tune on it, which finds workers and prefetch depth; if it finds nothing, make batches cheaper: "
        "move work into the build, or fetch batches at once",
    )


def workers(
    count: int, cores: float, ranks: int, setting: str = "workers", threads: bool = False
) -> Finding | None:
    each = max(1, int(cores / ranks))
    if count <= each:
        return None
    shared = f" shared by {ranks} ranks" if ranks > 1 else ""
    return Finding(
        "workers",
        # Threads may wait for a disk or a network: more of them than cores can make sense.
        Level.NOTE if threads else Level.WARNING,
        f"{count} workers for {cores:g} cores{shared}: they take turns, and take them from the training loop",
        f"Give {setting}={each} or fewer",
    )


def cpu_use(share: float) -> Finding | None:
    if share <= CPU_NOTE:
        return None
    alarm = share > CPU_ALARM
    return Finding(
        "cpu-use",
        Level.ALARM if alarm else Level.NOTE,
        f"The processor is {share:.0%} busy: the thread that launches kernels waits for a core, so stay below "
        f"{CPU_NOTE:.0%}" + (f", and never above {CPU_ALARM:.0%}" if alarm else ""),
        "Give fewer workers, move preprocessing into the build, or spread the job over more cores",
    )


def padding(share: float, packing: str | None = None) -> Finding | None:
    """`packing`: of a Headrace Loader; None if someone else pads."""
    if share <= PADDING_SHARE:
        return None
    remedies: dict[str, str] = {
        Packing.PAD: "Give packing='best-fit', which puts several documents into a row",
        Packing.BEST_FIT: "Give a larger seq_len, or packing='windows', which has no padding",
    }
    other = "Pack documents into rows (headrace.Loader with seq_len), or batch those of similar length"
    return Finding(
        "padding",
        Level.WARNING,
        f"{share:.0%} of the tokens are padding, and are computed all the same",
        remedies.get(packing or "", other),
    )


class Sent(StrEnum):
    """How worker processes come by the data."""

    EACH = "a pickle for each"
    ONCE = "a pickle, mapped by all"
    FORK = "a fork"


def pickled_maps(held: Sequence[Held], processes: int, sent: Sent) -> Finding | None:
    maps = [each for each in held if each.kind is HeldKind.MAP and each.bytes >= LARGE_MAP_BYTES]
    if not maps or sent is Sent.FORK:
        return None
    copies = 1 if sent is Sent.ONCE else processes
    how = "once, for all workers" if sent is Sent.ONCE else f"for each of {processes} workers"
    return Finding(
        "pickled-maps",
        _level_of_copies(copies, maps),
        f"Memory maps in the dataset ({_listed(maps)}) are read into memory whole, {how}: a map is pickled by its "
        "content",
        "Keep the path and open the map when it is first used, in the worker; or use headrace.open, whose datasets "
        "reopen their files",
    )


def copied_data(held: Sequence[Held], processes: int, sent: Sent) -> Finding | None:
    kinds = (HeldKind.ARRAY, HeldKind.OBJECTS) if sent is Sent.EACH else (HeldKind.OBJECTS,)
    data = [each for each in held if each.kind in kinds and each.bytes >= LARGE_BYTES]
    if not data:
        return None
    how = (
        "is copied for each"
        if sent is not Sent.FORK
        else "comes to be copied, as references are counted, for each"
    )
    return Finding(
        "copied-data",
        _level_of_copies(processes, data),
        f"Data in memory ({_listed(data)}) {how} of {processes} workers",
        "Write it to a file once and map it in the worker (headrace.build, np.load with mmap_mode), or use threads"
        + ("; arrays in place of lists are shared too" if sent is not Sent.EACH else ""),
    )


def _level_of_copies(copies: int, held: Sequence[Held]) -> Level:
    return (
        Level.ALARM if copies * sum(each.bytes for each in held) > host.available_bytes() else Level.WARNING
    )


def pageable_copies(remedy: str) -> Finding:
    """There is an accelerator, and batches are handed out in memory that the OS may move."""
    return Finding(
        "pageable-copies",
        Level.WARNING,
        "Batches are in pageable memory, and there is an accelerator: the driver copies them twice, and the loop waits",
        remedy,
    )


def in_ram(held_bytes: int, ranks: int) -> Finding | None:
    """Data that is loaded in each rank of a machine."""
    if held_bytes < LARGE_BYTES:
        return None
    whole, memory = held_bytes * ranks, host.memory_bytes()
    if whole <= FULL_SHARE * memory:
        return None
    each = f"{_gb(held_bytes)} in each of {ranks} ranks" if ranks > 1 else _gb(held_bytes)
    return Finding(
        "in-ram",
        Level.ALARM if whole > memory else Level.WARNING,
        f"Data in memory: {each}, of {_gb(memory)} that the machine has",
        "Map it instead (headrace.open without in_memory): ranks share the pages of a map",
    )


def streamed(file_bytes: int, ranks: int) -> Finding | None:
    """Raw files that are read and parsed again in every epoch."""
    if not file_bytes:
        return None
    available = host.available_bytes()
    if file_bytes * ranks > FITS_SHARE * available:
        return None
    return Finding(
        "streamed",
        Level.NOTE,
        f"Files of {_gb(file_bytes)} are read and parsed in every epoch, and {_gb(available)} of memory are available",
        "Build a dataset of them once (headrace build) and use headrace.Loader, or keep the parsed records in memory",
    )


def _listed(held: Sequence[Held]) -> str:
    return ", ".join(f"{each.name}: {each.bytes / 1e6:,.0f} MB" for each in held[:4])


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
