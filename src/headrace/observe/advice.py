"""Findings, logged once per process while it trains, with a remedy and how to silence them.

    12 workers for 4 cores: ... Give workers=4 or fewer. (To silence: headrace.silence("workers") or ...)

Loaders call this when an iteration begins. Only rules that cost nothing are checked then. A finding never changes what
a loader does, and a rule that fails does not stop a training run.
"""

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.dataset.dataset import Dataset
from headrace.errors import SettingsError
from headrace.observe import host
from headrace.observe.data_in_memory import DataKind, DataPiece, data_in_memory
from headrace.observe.facts import DataFacts, Facts, Sent, WorkerFacts
from headrace.observe.findings import Finding, Level, NotLooked, Outcomes
from headrace.observe.remote import remote_facts, remote_sources
from headrace.observe.rules import RULES, examine
from headrace.observe.rules.cpu_use import cpu_use
from headrace.order.shuffle import ShuffleKind
from headrace.pack.overlong import Overlong
from headrace.pack.packing import Packing

if TYPE_CHECKING:
    from headrace.load.loader import Loader
    from headrace.load.settings import LoaderSettings

_log = logging.getLogger("headrace.advice")

ALL = "all"
VARIABLE = "HEADRACE_SILENCE"
_FEW_WORKERS = 2
"""What a Loader chooses by itself; even on a single core they do no harm."""
LOOK_EVERY = 64
"""After this many batches a loader checks the use of the processor; most of the time that is one comparison."""
_LOOK_SECONDS = 30.0
_GIVE_DEVICE = (
    "Give device='cuda' (or your device): the Loader then page-locks its buffers and copies ahead of the step"
)


class _Said:
    """What this process has logged, and what it must not log."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.silenced: set[str] = set()
        self.unknown: set[str] = set()


_said = _Said()


def silence(*names: str) -> None:
    """Do not log these findings in this process, for example `silence("batch-size")`; `silence("all")` silences all."""
    for name in names:
        if name != ALL and name not in RULES:
            raise SettingsError(
                f"silence({name!r}): there is no such finding; choose from {', '.join(RULES)}, or {ALL}"
            )
    _said.silenced.update(names)


def is_silenced(name: str) -> bool:
    check_variable()
    return not {name, ALL}.isdisjoint(_named_in_variable() | _said.silenced)


def check_variable() -> None:
    """Warn once about names in the variable that no finding has: they were meant to silence something."""
    unknown = _named_in_variable() - RULES.keys() - {ALL} - _said.unknown
    if unknown:
        _said.unknown |= unknown
        _log.warning(
            "%s names %s: there is no such finding; choose from %s, or %s",
            *(VARIABLE, ", ".join(sorted(unknown)), ", ".join(RULES), ALL),
        )


def _named_in_variable() -> set[str]:
    return {each.strip() for each in os.environ.get(VARIABLE, "").split(",") if each.strip()}


def advise(finding: Finding | None) -> None:
    """Log a finding, once for each name in a process, on the machine's first rank. A note has the level INFO."""
    if finding is None or finding.name in _said.names:
        return
    if is_silenced(finding.name) or not host.is_first_rank():
        return
    _said.names.add(finding.name)
    level = logging.INFO if finding.level is Level.NOTE else logging.WARNING
    _log.log(
        *(level, '%s (To silence: headrace.silence("%s") or %s=%s)'),
        *(finding, finding.name, VARIABLE, finding.name),
    )


def advise_all(outcomes: Outcomes) -> None:
    accelerator = host.accelerator_available()
    for name, outcome in outcomes.items():
        rule = RULES[name]
        if isinstance(outcome, NotLooked) or rule.said_by_others:
            continue
        if rule.needs_accelerator and not accelerator:
            continue
        for finding in outcome:
            advise(finding)


# At the beginning of an iteration

_looked_at: "weakref.WeakSet[Any]" = weakref.WeakSet()


def advise_on(loader: Any, examine: Callable[[Any], Outcomes]) -> None:
    """Examine a loader that begins an iteration, the first time only, as it does not change between epochs."""
    try:
        watch_cpu.begin()
        check_variable()
        if loader not in _looked_at:
            _looked_at.add(loader)
            advise_all(examine(loader))
    except Exception:
        _log.debug("could not examine %s", type(loader).__name__, exc_info=True)


def advise_loader(loader: "Loader") -> None:
    """Called when an iteration begins."""
    advise_on(loader, examine_loader)


def examine_loader(loader: "Loader") -> Outcomes:
    """All that can be known about a Loader without running it."""
    return examine(facts_of_loader(loader))


def facts_of_loader(loader: "Loader") -> Facts:
    settings, processes = loader.settings, loader.source.processes
    sources = loader.rows.recipe.data
    held = [data_in_memory(data) for data in sources]
    loaded = [_loaded_bytes(data, inside) for data, inside in zip(sources, held, strict=True)]
    sent = list(itertools.chain.from_iterable(held))
    servers = len(loader.stats().servers) or None
    return Facts(
        batch_size=settings.batch_size,
        row_tokens=settings.seq_len or 1,
        workers=None if servers else _workers_of(loader),
        data=DataFacts(sent, processes, Sent.EACH) if processes else None,
        loaded_bytes=sum(loaded),
        pageable=_is_pageable(loader),
        pin_remedy=_GIVE_DEVICE,
        # A server would have to be asked for it.
        padding=None if servers else _padding_of(loader),
        packing=None if settings.seq_len is None else str(settings.packing),
        random_order=not servers and _has_random_order(settings),
        remote=remote_facts(loader),
        servers=servers,
    )


def _workers_of(loader: "Loader") -> WorkerFacts:
    processes = loader.source.processes
    if processes:
        return WorkerFacts(processes, "processes", threads=False, harmless=_FEW_WORKERS)
    return WorkerFacts(loader.settings.workers or 1, "workers", threads=True, harmless=_FEW_WORKERS)


def _is_pageable(loader: "Loader") -> bool | None:
    device = getattr(loader, "device", None)
    if device is None or not host.accelerator_available():
        return None
    return bool(device.type == "cpu")


def _has_random_order(settings: "LoaderSettings") -> bool:
    if settings.shuffle.kind is ShuffleKind.GLOBAL:
        return True
    # Packed rows take documents from anywhere, unless they stay within a unit or a group of shards.
    packs_documents = settings.seq_len is not None and settings.packing is not Packing.WINDOWS
    return packs_documents and settings.group_shards is None and settings.pack_within != "units"


def _padding_of(loader: "Loader") -> float | None:
    """The share of padding where it is known without counting: for aligned windows each would have to be looked up."""
    settings = loader.settings
    if settings.overlong is not Overlong.SPLIT and remote_sources(loader.rows.recipe.data):
        return None  # the lengths of all documents would have to be fetched
    if settings.seq_len is None or settings.packing is Packing.WINDOWS:
        return 0.0
    reports = loader.rows.recipe.reports().values()
    places = sum(report.rows * report.seq_len for report in reports)
    padded = sum(report.padded for report in reports)
    return padded / max(1, places)


def _loaded_bytes(data: Any, held: Sequence[DataPiece]) -> int:
    """What the data holds in memory: arrays and objects, or files that were read whole."""
    if isinstance(data, Dataset) and data.manifest is not None:
        in_memory = getattr(data.source, "in_memory", False)
        return sum(shard.stored.bytes for shard in data.manifest.shards) if in_memory else 0
    return sum(each.bytes for each in held if each.kind is not DataKind.MAP)


class WatchCpu:
    """Looks once, over half a minute of training, after a first half minute that may be spent compiling."""

    def __init__(self) -> None:
        self._begun: host.CpuClock | float | None = None
        self._over = False

    def begin(self) -> None:
        """An iteration begins."""
        if self._begun is None:
            self._begun = host.read_time()
            self._over = not host.accelerator_available()
        self.look()

    def look(self) -> None:
        """Cheap enough for every few batches, but not for every batch."""
        if self._over or self._begun is None:
            return
        begun, now = self._begun, host.read_time()
        try:
            if isinstance(begun, float):
                if now - begun >= _LOOK_SECONDS:
                    self._begun = host.read_cpu_clock()
            elif now - begun.at >= _LOOK_SECONDS:
                self._over = True
                advise(cpu_use(host.read_cpu_clock().share_since(begun)))
        except Exception:
            self._over = True
            _log.debug("could not measure the use of the processor", exc_info=True)


watch_cpu = WatchCpu()
