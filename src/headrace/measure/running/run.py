"""One run: the loop of a training script, timed from outside.

    make | iter, first batch | wait step wait step wait step ...
    '----------------------' '--'  warm-up: not counted   '----' counted

The warm-up of remote data lasts until its beginning is over (`beginning.py`).

It works on anything that can be iterated over. When a loader comes to its end, a new iteration begins, as in the next
epoch, and the time that this takes counts as waiting, like that of any other batch.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, SettingsError, TargetError
from headrace.load.batch import Batch
from headrace.measure import clock
from headrace.measure.running.beginning import Beginning, beginning_of
from headrace.measure.running.contents import Contents, packing_of
from headrace.measure.running.quantiles import quantiles
from headrace.measure.running.resources import CpuSeconds, cpu_seconds
from headrace.measure.running.steps import Step
from headrace.observe import host
from headrace.observe.stats import LoaderStats, headroom_share, waiting_share

_SERIES = 240
"""How many points of a run are kept for charts."""
_CACHED_STEPS = 200
_REPORT_SECONDS = 0.5
_RECENT = 2000
"""How many of the latest waits a report during the run is about."""
_END = object()
"""Stands for a batch after the last."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure. The first `warmup` batches do not count."""

    seconds: float = 3.0
    batches: int | None = None
    warmup: int = 3
    beginning_seconds: float = 30.0
    """The most that the beginning of remote data may take before batches are counted all the same."""
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise SettingsError(f"seconds={self.seconds}: must be a finite number above 0")
        if self.batches is not None and self.batches < 1:
            raise SettingsError(f"batches={self.batches}: must be at least 1")
        if self.warmup < 1:
            raise SettingsError(f"warmup={self.warmup}: must be at least 1: the first batch is never counted")
        if self.beginning_seconds < 0:
            raise SettingsError(f"beginning_seconds={self.beginning_seconds}: must be at least 0")

    def is_carried_out(self, counted: int, now: float, deadline: float) -> bool:
        """Whether enough was measured, after `counted` batches that count."""
        if self.batches is not None:
            return counted >= self.batches
        return counted >= 1 and now >= deadline


@dataclass
class Run:
    """What was measured; `complete` says whether it came to its end."""

    first_batch_seconds: float | None = None
    """From before the loader was made until its first batch arrived."""
    beginning: dict[str, Any] | None = None
    """Of remote data: how long it took until counting began, and what was fetched until then; see `Beginning`."""
    seconds: float = 0.0
    """After the warm-up."""
    batches: int = 0
    samples: int | None = None
    """None if the batches do not say."""
    tokens: int | None = None
    bytes: int = 0
    padding: float | None = None
    """The share of tokens that are padding."""
    truncation: float | None = None
    """The share of the data's tokens that are cut off or dropped."""
    epochs: int = 0
    """How often the loader came to its end."""
    batch_samples: tuple[int, int] | None = None
    """The sizes of the smallest and the largest batch, if they differ."""
    wait_ms: dict[str, float] = field(default_factory=dict)
    step_ms: dict[str, float] = field(default_factory=dict)
    compute_seconds: float = 0.0
    utilisation: float | None = None
    headroom: float | None = None
    wait_share: float | None = None
    cpu_share: float | None = None
    """Of all cores of the machine."""
    cpu_cores: float | None = None
    main_cpu_cores: float | None = None
    """How many cores were busy: with all processes, and with the one that runs the loop."""
    machine_cpu_share: float | None = None
    """Of the cores that may be used, whoever used them."""
    series: dict[str, list[float]] = field(default_factory=dict)
    stats: dict[str, Any] | None = None
    """The loader's own statistics, if it counts its stages."""
    knobs: dict[str, Any] | None = None
    """Which settings could be tuned: `Knobs` as a dict."""
    accelerators: list[str] = field(default_factory=list)
    """Those that the target's process uses."""
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def batches_per_second(self) -> float | None:
        return self.batches / self.seconds if self.seconds else None


Tell = Callable[[Run], None]


def measure(make: Callable[[], Any], step: Step, plan: Plan, tell: Tell | None = None) -> Run:
    """Make a loader and run its loop. `tell` is called from time to time with what was measured so far, and so also
    knows it if the loop fails."""
    return _Measurement(make, step, plan, tell or (lambda run: None)).run()


class _Measurement:
    def __init__(self, make: Callable[[], Any], step: Step, plan: Plan, tell: Tell) -> None:
        self._make, self._step, self._plan, self._tell = make, step, plan, tell
        self._run = Run()
        self._waits: list[float] = []
        self._steps: list[float] = []
        self._contents = Contents(plan.pad_id)
        """Of the batches that count."""
        self._packing: tuple[float, float] | None = None
        self._begun = self._ended = 0.0
        self._loader: Any = None
        self._beginning: Beginning | None = None
        self._made_at = 0.0
        self._is_counting = False
        self._stats_before: LoaderStats | None = None
        self._cpu: CpuSeconds | None = None
        self._machine_cpu: host.CpuClock | None = None
        """What was used when counting began, by this loop and by the whole machine."""
        self._counted_from = 0.0
        self._told = 0.0

    def run(self) -> Run:
        step = self._step.start()
        self._made_at = clock.now()
        self._loader = self._make()
        batches = self._batches()
        batch = self._first(batches)
        self._run.first_batch_seconds = clock.now() - self._made_at
        self._beginning = beginning_of(self._loader, self._made_at)
        self._tell(self._run)
        try:
            self._loop(batches, batch, step)
        finally:
            self._summarise_whatever_comes()
        self._run.headroom = self._headroom(batches, step)
        self._run.complete = True
        return self._run

    def _batches(self) -> Iterator[Any]:
        """Epoch after epoch, until an epoch gives no batch."""
        for epoch in itertools.count():
            iterator = iter(self._loader)
            given = False
            for batch in iterator:
                given = True
                yield batch
            if not given or iterator is self._loader:
                return
            self._run.epochs = epoch + 1

    def _first(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches)
        except StopIteration:
            raise TargetError(
                "the loader gave no batch; is its dataset empty, or smaller than one batch?"
            ) from None
        except HeadraceError:
            raise
        except Exception as error:
            raise TargetError(f"the loader failed: {_described(error)}") from error

    def _loop(self, batches: Iterator[Any], batch: Any, step: Callable[[Any], None]) -> None:
        now, plan = clock.now, self._plan
        number, deadline = 1, float("inf")
        while True:
            stepped = now()
            step(batch)
            asked = now()
            if self._is_counting:
                asked = self._count_step(batch, stepped, asked)
            if plan.is_carried_out(len(self._steps), asked, deadline):
                return
            if asked - self._told > _REPORT_SECONDS:
                asked = self._report(asked)
            if not self._is_counting and self._is_warm(number, asked):
                asked = self._start_counting()
                deadline = asked + plan.seconds
            batch = self._next(batches, number)
            if batch is _END:
                return
            number += 1
            if self._is_counting:
                self._waits.append(now() - asked)
                if not isinstance(batch, Batch):
                    # Now, as a step may take things out of its batch.
                    self._see(batch)

    def _is_warm(self, batches: int, now: float) -> bool:
        """Whether counting may begin, after so many batches."""
        if batches < self._plan.warmup:
            return False
        stats = _stats_of(self._loader)
        if self._beginning is None or stats is None or self._beginning.is_over(stats):
            return True
        return now - self._made_at >= self._plan.beginning_seconds

    def _next(self, batches: Iterator[Any], number: int) -> Any:
        """The batch after `number` batches, or `_END`."""
        try:
            batch = next(batches, _END)
        except Exception as error:
            raise TargetError(f"the loader failed after {_batches(number)}: {_described(error)}") from error
        if batch is _END:
            self._run.notes.append(
                f"the loader ended after {_batches(number)}, and a new iteration of it gave none"
            )
        return batch

    def _count_step(self, batch: Any, begun: float, ended: float) -> float:
        """Returns the time from which the loop waits for the next batch."""
        self._steps.append(ended - begun)
        self._ended = ended
        if isinstance(batch, Batch):
            # A Loader's batch holds the fields that the step has used, which are known only now.
            self._see(batch)
            self._ended = clock.now()
        return self._ended

    def _see(self, batch: Any) -> None:
        self._contents.add(batch)
        if self._contents.wants_padding:
            # The time this takes is not part of the loop's.
            begun = clock.now()
            self._contents.add_padding(batch)
            self._begun += clock.now() - begun

    def _start_counting(self) -> float:
        self._packing = packing_of(self._loader)
        self._stats_before = _stats_of(self._loader)
        if self._beginning is not None and self._stats_before is not None:
            self._run.beginning = self._beginning.described(self._stats_before, clock.now())
            self._run.notes += self._beginning.notes(self._stats_before, clock.now())
        self._cpu = cpu_seconds()
        self._machine_cpu = host.read_cpu_clock()
        self._is_counting = True
        self._begun = self._ended = self._counted_from = clock.now()
        return self._begun

    def _report(self, asked: float) -> float:
        """Tell what was measured so far, without counting the time that this takes. Returns the time after it."""
        run, count = self._run, len(self._steps)
        if count:
            run.batches, run.seconds = count, self._ended - self._begun
            recent = np.array(self._waits[-_RECENT:])
            run.wait_ms = quantiles(recent * 1e3)
            run.wait_share = waiting_share(sum(self._waits), sum(self._steps))
            self._summarise_sizes()
            run.stats = self._stats()
        self._tell(run)
        self._told = clock.now()
        self._begun += self._told - asked
        return self._told

    def _summarise_whatever_comes(self) -> None:
        """PyTorch may raise the death of a worker anywhere in the main thread, and so may Ctrl-C: even in here."""
        try:
            self._summarise()
        except BaseException:
            self._summarise()
            raise

    def _summarise(self) -> None:
        run, count = self._run, len(self._steps)
        if not count:
            return
        if self._cpu is not None:
            self._summarise_cpu(self._cpu, cpu_seconds())
        waits, steps = np.array(self._waits[:count]), np.array(self._steps)
        run.batches, run.seconds = count, self._ended - self._begun
        self._summarise_sizes()
        run.wait_ms, run.step_ms = quantiles(waits * 1e3), quantiles((waits + steps) * 1e3)
        nominal = self._step.nominal_seconds
        run.compute_seconds = float(steps.sum()) if nominal is None else nominal * count
        run.utilisation = run.compute_seconds / run.seconds if run.compute_seconds else None
        run.wait_share = waiting_share(float(waits.sum()), float(steps.sum()))
        every = max(1, count // _SERIES)
        run.series = {"wait_ms": _thinned(waits, every), "step_ms": _thinned(waits + steps, every)}
        run.stats = self._stats()
        if run.batch_samples is not None:
            smallest, largest = run.batch_samples
            run.notes.append(
                f"batches hold {smallest} to {largest} samples: rates are by samples, not by batches"
            )
        if run.samples is None:
            run.notes.append("the number of samples in a batch is unknown: it has no arrays and no lists")

    def _stats(self) -> dict[str, Any] | None:
        stats = _stats_of(self._loader)
        if stats is None or self._stats_before is None:
            return None
        return stats.since(self._stats_before).to_json()

    def _summarise_sizes(self) -> None:
        run, contents = self._run, self._contents
        run.bytes = contents.bytes
        run.tokens = contents.tokens
        run.samples = contents.samples
        run.batch_samples = contents.batch_samples
        run.padding = contents.padding
        if self._packing is not None:
            run.padding, run.truncation = self._packing

    def _summarise_cpu(self, before: CpuSeconds, after: CpuSeconds) -> None:
        run = self._run
        # All of the time, including that of reports, which use the processor too.
        elapsed = clock.now() - self._counted_from
        run.cpu_cores = max(0.0, after.total - before.total) / elapsed
        run.main_cpu_cores = max(0.0, after.main - before.main) / elapsed
        run.cpu_share = run.cpu_cores / host.allowed_cores()
        if self._machine_cpu is not None:
            run.machine_cpu_share = host.read_cpu_clock().share_since(self._machine_cpu)

    def _headroom(self, batches: Iterator[Any], step: Callable[[Any], None]) -> float | None:
        """What a loader that costs nothing would save, by the same loop over one batch that is already there."""
        run = self._run
        if not run.compute_seconds or not run.batches:
            return None
        each = run.seconds / run.batches
        count = int(min(_CACHED_STEPS, max(3, 0.5 * self._plan.seconds / each)))
        spent = 0.0
        try:
            batch = next(batches)
            for _ in range(count):
                # A step may take things out of its batch.
                given = copy.copy(batch) if isinstance(batch, dict | list) else batch
                begun = clock.now()
                step(given)
                ended = clock.now()
                spent += ended - begun
                if ended - self._told > _REPORT_SECONDS:
                    self._tell(run)
                    self._told = ended
        except StopIteration:
            run.notes.append("headroom was not measured: the loader has no more batches")
            return None
        except Exception as error:
            run.notes.append(f"headroom was not measured: {error}")
            return None
        return headroom_share(run.wait_share or 0.0, each, spent / count)


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


def _described(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, ConnectionError | EOFError):
        # PyTorch fetches tensors from a worker over a connection, and may notice the worker's death only there.
        said += "; a worker process of the loader has probably died"
    return said


def _thinned(values: Any, every: int) -> list[float]:
    """The largest of each group of `every` values: peaks are what people look for."""
    return [round(float(values[i : i + every].max()) * 1e3, 4) for i in range(0, len(values), every)]


def _stats_of(loader: Any) -> LoaderStats | None:
    stats = getattr(loader, "stats", None)
    found = stats() if callable(stats) and hasattr(loader, "counters") else None
    return found if isinstance(found, LoaderStats) else None
