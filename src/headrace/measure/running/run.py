"""One run: the loop of a training script, timed from outside.

    make | iter, first batch | wait step wait step wait step ...
    '----------------------' '--'  warm-up: not counted   '----' counted

It works on anything that can be iterated over. A loader that comes to its end is begun again, as the next epoch would
be, and what that takes is waited for like any other batch.
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
from headrace.measure.running.quantiles import quantiles
from headrace.measure.running.resources import CpuSeconds, cpu_seconds
from headrace.measure.running.sizes import BatchSize, Sizes, padding_share
from headrace.measure.running.steps import Step
from headrace.observe.host import allowed_cores
from headrace.observe.stats import LoaderStats

_SERIES = 240
"""So many points of a run are kept for pictures."""
_CACHED_STEPS = 200
_REPORT_SECONDS = 0.5
_RECENT = 2000
"""Waits that a report on the way is about."""
_PADDING_SEEN = 16
"""Padding is counted in so many batches: it means reading them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure. The first `warmup` batches do not count."""

    seconds: float = 3.0
    batches: int | None = None
    warmup: int = 3
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise SettingsError(f"seconds={self.seconds}: must be more than 0, and come to an end")
        if self.batches is not None and self.batches < 1:
            raise SettingsError(f"batches={self.batches}: must be at least 1")
        if self.warmup < 1:
            raise SettingsError(f"warmup={self.warmup}: must be at least 1: the first batch is never counted")


@dataclass
class Run:
    """What was measured; `complete` says whether it came to its end."""

    first_batch_seconds: float | None = None
    """From before the loader was made until its first batch was there."""
    seconds: float = 0.0
    """Counted: after the warm-up."""
    batches: int = 0
    samples: int | None = None
    """None: batches do not tell."""
    tokens: int | None = None
    bytes: int = 0
    padding: float | None = None
    """The share of tokens that are padding."""
    truncation: float | None = None
    """The share of the data's tokens that are cut off or left out."""
    epochs: int = 0
    """How often the loader came to its end."""
    batch_samples: tuple[int, int] | None = None
    """The smallest and the largest batch."""
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
    """So many cores were busy: of all processes, and of the one with the loop."""
    series: dict[str, list[float]] = field(default_factory=dict)
    stats: dict[str, Any] | None = None
    """Of the loader itself, if it counts its stages."""
    knobs: dict[str, Any] | None = None
    """Which settings could be tuned: `Knobs` as a dict."""
    accelerators: list[str] = field(default_factory=list)
    """Those that the target's process has begun to use."""
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def batches_per_second(self) -> float | None:
        return self.batches / self.seconds if self.seconds else None


Tell = Callable[[Run], None]


def measure(make: Callable[[], Any], step: Step, plan: Plan, tell: Tell | None = None) -> Run:
    """Make a loader and run its loop. `tell` gets what was measured so far, now and then; also when it fails."""
    return _Measurement(make, step, plan, tell or (lambda run: None)).run()


class _Measurement:
    def __init__(self, make: Callable[[], Any], step: Step, plan: Plan, tell: Tell) -> None:
        self._make, self._step, self._plan, self._tell = make, step, plan, tell
        self._run = Run()
        self._waits: list[float] = []
        self._steps: list[float] = []
        self._sizes = Sizes()
        self._batch_sizes: dict[BatchSize, int] = {}
        """How many batches were of each size."""
        self._padding: list[float | None] = []
        """Of the first batches that count; None: it does not tell."""
        self._packing: tuple[float, float] | None = None
        self._begun = self._ended = 0.0
        self._loader: Any = None
        self._stats_before: LoaderStats | None = None
        self._cpu: CpuSeconds | None = None
        """Used when counting began."""
        self._counted_from = 0.0
        self._told = 0.0

    def run(self) -> Run:
        step = self._step.start()
        begun = clock.now()
        self._loader = self._make()
        batches = self._batches()
        batch = self._first(batches)
        self._run.first_batch_seconds = clock.now() - begun
        self._tell(self._run)
        try:
            self._loop(batches, batch, step)
        finally:
            self._summarise_whatever_comes()
        self._run.headroom = self._headroom(batches, step)
        self._run.complete = True
        return self._run

    def _batches(self) -> Iterator[Any]:
        """Epoch after epoch; ends if an epoch gives nothing."""
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
                "the loader gave no batch: is its dataset empty, or smaller than one batch?"
            ) from None
        except HeadraceError:
            raise
        except Exception as error:
            raise TargetError(f"the loader failed: {type(error).__name__}: {error}") from error

    def _loop(self, batches: Iterator[Any], batch: Any, step: Callable[[Any], None]) -> None:
        now, plan = clock.now, self._plan
        number, deadline = 1, now() + plan.seconds
        while True:
            stepped = now()
            step(batch)
            asked = now()
            if number > plan.warmup:
                self._steps.append(asked - stepped)
                self._ended = asked
                if isinstance(batch, Batch):
                    # A Loader's batch holds what the step has used: now it is known what that is.
                    self._see(batch)
                    asked = self._ended = now()
            done = number - plan.warmup
            if done >= (plan.batches or float("inf")) or (
                plan.batches is None and done >= 1 and asked >= deadline
            ):
                return
            if asked - self._told > _REPORT_SECONDS:
                asked = self._report(asked)
            if number == plan.warmup:
                asked = self._start_counting()
                deadline = asked + plan.seconds
            try:
                batch = next(batches)
            except StopIteration:
                self._run.notes.append(
                    f"the loader ended after {number} batches, and gave none when begun again"
                )
                return
            except Exception as error:
                raise TargetError(
                    f"the loader failed after {number} batches: {type(error).__name__}: {error}"
                ) from error
            number += 1
            if number > plan.warmup:
                self._waits.append(now() - asked)
                if not isinstance(batch, Batch):
                    # A step may take things out of its batch.
                    self._see(batch)

    def _see(self, batch: Any) -> None:
        size = self._sizes.of(batch)
        self._batch_sizes[size] = self._batch_sizes.get(size, 0) + 1
        if len(self._padding) < _PADDING_SEEN:
            # The time this takes is no part of the loop's.
            begun = clock.now()
            self._padding.append(padding_share(batch, self._plan.pad_id))
            self._begun += clock.now() - begun

    def _start_counting(self) -> float:
        self._packing = _packing_of(self._loader)
        self._stats_before = _stats_of(self._loader)
        self._cpu = cpu_seconds()
        self._begun = self._ended = self._counted_from = clock.now()
        return self._begun

    def _report(self, asked: float) -> float:
        """Tell what was measured so far; what that takes is no part of the loop's time. Gives the time after it."""
        run, count = self._run, len(self._steps)
        if count:
            run.batches, run.seconds = count, self._ended - self._begun
            recent = np.array(self._waits[-_RECENT:])
            run.wait_ms, run.wait_share = quantiles(recent * 1e3), float(np.sum(self._waits)) / run.seconds
            self._summarise_sizes()
            run.stats = self._stats()
        self._tell(run)
        self._told = clock.now()
        self._begun += self._told - asked
        return self._told

    def _summarise_whatever_comes(self) -> None:
        """PyTorch raises the death of a worker wherever the main thread is, and so does Ctrl-C: here too."""
        try:
            self._summarise()
        except BaseException:
            self._summarise()
            raise

    def _summarise(self) -> None:
        run, count = self._run, len(self._steps)
        if not count:
            if not run.notes:
                run.notes.append(
                    f"fewer batches than the warm-up of {self._plan.warmup}: nothing was counted"
                )
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
        run.wait_share = float(waits.sum()) / run.seconds
        every = max(1, count // _SERIES)
        run.series = {"wait_ms": _thinned(waits, every), "step_ms": _thinned(waits + steps, every)}
        run.stats = self._stats()
        if run.batch_samples is not None:
            smallest, largest = run.batch_samples
            run.notes.append(
                f"batches of {smallest} to {largest} samples: rates are by samples, not by batches"
            )
        if run.samples is None:
            run.notes.append("how many samples a batch holds is not known: it has no arrays and no lists")

    def _stats(self) -> dict[str, Any] | None:
        stats = _stats_of(self._loader)
        if stats is None or self._stats_before is None:
            return None
        return stats.since(self._stats_before).to_json()

    def _summarise_sizes(self) -> None:
        run, sizes = self._run, self._batch_sizes
        run.bytes = sum(size.bytes * count for size, count in sizes.items())
        tokens = [None if size.tokens is None else size.tokens * count for size, count in sizes.items()]
        run.tokens = _sum(tokens)
        run.samples = _sum([None if s.samples is None else s.samples * count for s, count in sizes.items()])
        samples = [size.samples for size in sizes if size.samples is not None]
        differ = bool(samples) and min(samples) != max(samples)
        run.batch_samples = (min(samples), max(samples)) if differ else None
        padding = [share for share in self._padding if share is not None]
        if padding:
            run.padding = sum(padding) / len(padding)
        if self._packing is not None:
            run.padding, run.truncation = self._packing

    def _summarise_cpu(self, before: CpuSeconds, after: CpuSeconds) -> None:
        run = self._run
        # By the clock, reports and all: they cost the processor too.
        elapsed = clock.now() - self._counted_from
        run.cpu_cores = max(0.0, after.total - before.total) / elapsed
        run.main_cpu_cores = max(0.0, after.main - before.main) / elapsed
        run.cpu_share = run.cpu_cores / allowed_cores()

    def _headroom(self, batches: Iterator[Any], step: Callable[[Any], None]) -> float | None:
        """What a loader that costs nothing would save: the same loop on one batch that is there already."""
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
            run.notes.append("headroom: not measured: the loader has no more batches")
            return None
        except Exception as error:
            run.notes.append(f"headroom: not measured: {error}")
            return None
        return 1.0 - spent / count / each


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _thinned(values: Any, every: int) -> list[float]:
    """The largest of every so many: peaks are what people look for."""
    return [round(float(values[i : i + every].max()) * 1e3, 4) for i in range(0, len(values), every)]


def _stats_of(loader: Any) -> LoaderStats | None:
    stats = getattr(loader, "stats", None)
    found = stats() if callable(stats) and hasattr(loader, "counters") else None
    return found if isinstance(found, LoaderStats) else None


def _packing_of(loader: Any) -> tuple[float, float] | None:
    """Of a Headrace Loader of tokens: the shares of padding and of what is cut, over an epoch."""
    from headrace.load.loader import Loader

    if not isinstance(loader, Loader) or loader.settings.seq_len is None:
        return None
    reports = loader.report()
    listed = list(reports.values()) if isinstance(reports, dict) else [reports]
    used, padded = sum(r.tokens for r in listed), sum(r.padded for r in listed)
    cut = sum(r.cut for r in listed)
    return padded / max(1, used + padded), cut / max(1, used + cut)
