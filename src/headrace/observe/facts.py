"""What is known of a loader, of a run of it and of its storage: all that rules judge by.

None stands for what nobody knows, or what means nothing to this loader; a rule that needs it does not apply then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.observe import host
from headrace.observe.data_in_memory import DataPiece


class Sent(StrEnum):
    """How worker processes come by the data."""

    EACH = "a pickle for each"
    ONCE = "a pickle, mapped by all"
    FORK = "a fork"


@dataclass(frozen=True)
class WorkerFacts:
    count: int
    setting: str
    """What the user gives to have another number."""
    threads: bool
    harmless: int = 0
    """So many do no harm, even on a single core."""


@dataclass(frozen=True)
class DataFacts:
    """What is sent to worker processes."""

    held: Sequence[DataPiece]
    processes: int
    sent: Sent | None
    """None: there are no worker processes."""


@dataclass(frozen=True)
class RunFacts:
    """What was measured in some seconds of the loop."""

    wait_share: float | None
    busiest: str | None
    cpu_cores: float | None
    padding: float | None
    has_step: bool
    """Whether the loop did anything but ask for batches."""
    computes_here: bool
    """Whether the step computes on the processor itself."""


@dataclass(frozen=True)
class Reads:
    """How fast the storage is, at random reads and at reading on."""

    reads: int
    small_ms: float
    """The median of reading 4 KB from anywhere."""
    random_mb_per_second: float
    """Of 64 KB at a time, one after the other."""
    sequential_mb_per_second: float
    data_bytes: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    ranks: int = field(default_factory=lambda: host.local_ranks())
    """Of this machine."""
    accelerator: bool = field(default_factory=lambda: host.accelerator_available())
    batch_size: int | None = None
    """0: the loader does not decide it."""
    row_tokens: int = 1
    """Where all rows are as long."""
    workers: WorkerFacts | None = None
    data: DataFacts | None = None
    loaded_bytes: int | None = None
    """Of data in the memory of each rank."""
    pageable: bool | None = None
    """Whether batches are in memory that the system may move."""
    pin_remedy: str = ""
    """How this kind of loader comes to page-locked memory."""
    pins_memory: bool | None = None
    """Whether the user has asked for it."""
    taken_apart: tuple[str, str, int] | None = None
    """What data could be indexed once for a batch, how, and how many samples are taken from it instead."""
    takes_samples: bool = False
    streamed_bytes: int | str | None = None
    """Of raw files that are read in each epoch; a text says why nobody knows."""
    padding: float | None = None
    """The share of padding, where it is known without counting."""
    packing: str | None = None
    files: Sequence[str] = ()
    """Those that an epoch reads."""
    random_order: bool = False
    step: Callable[..., Any] | None = None
    """The function that takes a batch."""
    run: RunFacts | str | None = None
    """A text says why there is none."""
    reads: Reads | str | None = None
