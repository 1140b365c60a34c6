"""What is known about a loader, a run of it, and its storage: everything that rules judge by.

None stands for what is unknown, or does not apply to this loader; a rule that needs it then does not apply either.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.observe import host
from headrace.observe.data_in_memory import DataPiece
from headrace.observe.serving import ServingTimes
from headrace.observe.stats import FetchStats, ServerStats


class Sent(StrEnum):
    """How worker processes get the data."""

    EACH = "a pickle for each"
    ONCE = "a pickle, mapped by all"
    FORK = "a fork"


@dataclass(frozen=True)
class WorkerFacts:
    count: int
    setting: str
    """The name of the setting that changes the number."""
    threads: bool
    harmless: int = 0
    """A number that does no harm, even on a single core."""


@dataclass(frozen=True)
class DataFacts:
    """What is sent to worker processes."""

    held: Sequence[DataPiece]
    processes: int
    sent: Sent | None
    """None if there are no worker processes."""


@dataclass(frozen=True)
class RunFacts:
    """What was measured in a few seconds of the loop."""

    wait_share: float | None
    busiest: str | None
    cpu_cores: float | None
    machine_cpu_share: float | None
    """How much of the cores was in use, by this loop and by everything else."""
    padding: float | None
    has_step: bool
    """Whether the loop did anything besides asking for batches."""
    computes_here: bool
    """Whether the step computes on the processor itself."""
    seconds: float = 0.0
    fetched: FetchStats = field(default_factory=FetchStats)
    """What came over the network."""
    servers: Mapping[str, ServerStats] = field(default_factory=dict)
    """What each server has done, if servers make the batches."""
    serving: ServingTimes | None = None
    """What a batch has taken on its way from a server; None if no batch came from one."""
    in_flight: int | None = None
    """How many batches were asked for ahead, if that is known."""


@dataclass(frozen=True)
class RemoteFacts:
    """Data that is fetched over a network."""

    data_bytes: int
    units: int
    """Of the source that has the most."""
    working_set_bytes: int
    """The units that batches are drawn from at a time."""
    cache_bytes: int
    """How large the cache may become; 0 if there is none."""
    shuffle: str
    packs_within_units: bool
    """False if the documents of a row may be from different units."""
    processes: int
    """How many worker processes fetch the same units; 0 if batches are made in the process of the loop."""


@dataclass(frozen=True)
class MixingFacts:
    """How well an order of remote data mixes, for the source that it mixes worst."""

    shuffle: str
    variance: float
    """Of a batch's mean, against that of an independent draw; in the worst case."""
    batch_rows: int
    """Rows of the source in a batch, over all ranks."""


@dataclass(frozen=True)
class Reads:
    """How fast the storage is, at random and at sequential reads."""

    reads: int
    small_ms: float
    """The median time to read 4 KB from a random place."""
    random_mb_per_second: float
    """With 64 KB at a time, one read after the other."""
    sequential_mb_per_second: float
    data_bytes: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    ranks: int = field(default_factory=lambda: host.local_ranks())
    """The number of ranks on this machine."""
    accelerator: bool = field(default_factory=lambda: host.accelerator_available())
    batch_size: int | None = None
    """0 if the loader does not decide it."""
    row_tokens: int = 1
    """The length of a row, where all rows have the same."""
    workers: WorkerFacts | None = None
    worker_processes: int = 0
    torch_threads: int | None = None
    """With which PyTorch computes on the processor, in the process of the loop."""
    data: DataFacts | None = None
    loaded_bytes: int | None = None
    """The size of the data that each rank holds in memory."""
    pageable: bool | None = None
    """Whether batches are in memory that the OS may move."""
    pin_remedy: str = ""
    """How to get page-locked memory from this kind of loader."""
    pins_memory: bool | None = None
    """Whether the user has asked for page-locked memory."""
    taken_apart: tuple[str, str, int] | None = None
    """The kind of data that could be indexed once per batch, how to do it, and how many samples are taken instead."""
    takes_samples: bool = False
    streamed_bytes: int | str | None = None
    """The size of the raw files that are read in each epoch; a text says why it is unknown."""
    padding: float | None = None
    """The share of padding, where it is known without counting."""
    packing: str | None = None
    files: Sequence[str] = ()
    """The files that an epoch reads."""
    random_order: bool = False
    remote: RemoteFacts | None = None
    """None if all data is on this machine."""
    servers: int | None = None
    """How many servers make the batches; None if they are made on this machine."""
    mixing: MixingFacts | None = None
    """None if it was not worked out, which takes a while, or if all data is on this machine."""
    step: Callable[..., Any] | None = None
    """The function that takes a batch."""
    run: RunFacts | str | None = None
    """A text says why there was no run."""
    reads: Reads | str | None = None
