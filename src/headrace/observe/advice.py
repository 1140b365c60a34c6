"""Findings, said once in a process while it trains, with what to do about them and how to silence them.

    12 workers for 4 cores: ... Give workers=4 or fewer. (To silence: headrace.silence("workers") or ...)

Loaders call this when an iteration begins. Only rules that cost nothing are asked then; nothing is ever decided by
a finding, and a rule that fails is no reason to stop a training run.
"""

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
from headrace.observe.rules import RULES, examine
from headrace.observe.rules.cpu_use import cpu_use
from headrace.order.shuffle import ShuffleKind
from headrace.pack.packing import Packing

if TYPE_CHECKING:
    from headrace.load.loader import Loader

_log = logging.getLogger("headrace.advice")

ALL = "all"
VARIABLE = "HEADRACE_SILENCE"
_FEW_WORKERS = 2
"""A Loader's own choice; on a single core they do no harm."""
LOOK_EVERY = 64
"""Batches, after which a loader lets the processor's use be looked at; most times that is one comparison."""
_LOOK_SECONDS = 30.0
_GIVE_DEVICE = (
    "Give device='cuda' (or yours): the Loader then page-locks its buffers and copies ahead of the step"
)


class _Said:
    """What this process has said, and what it shall not say."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.silenced: set[str] = set()
        self.unknown: set[str] = set()


_said = _Said()


def silence(*names: str) -> None:
    """Do not say these findings in this process, such as `silence("batch-size")`; `silence("all")` for none at all."""
    for name in names:
        if name != ALL and name not in RULES:
            raise SettingsError(
                f"silence({name!r}): there is no such finding; there are {', '.join(RULES)}, and {ALL}"
            )
    _said.silenced.update(names)


def is_silenced(name: str) -> bool:
    told = {each.strip() for each in os.environ.get(VARIABLE, "").split(",") if each.strip()}
    unknown = told - RULES.keys() - {ALL} - _said.unknown
    if unknown:
        _said.unknown |= unknown
        _log.warning(
            "%s names %s: there is no such finding; there are %s, and %s",
            *(VARIABLE, ", ".join(sorted(unknown)), ", ".join(RULES), ALL),
        )
    return not {name, ALL}.isdisjoint(told | _said.silenced)


def advise(finding: Finding | None) -> None:
    """Log it, once for each name in a process, on the machine's first rank. A note is of level INFO."""
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
    """Look at a loader that begins an iteration; once, as it does not change between its epochs."""
    try:
        watch_cpu.begin()
        if loader not in _looked_at:
            _looked_at.add(loader)
            advise_all(examine(loader))
    except Exception:
        _log.debug("could not look at %s", type(loader).__name__, exc_info=True)


def advise_loader(loader: "Loader") -> None:
    """Called when an iteration begins."""
    advise_on(loader, examine_loader)


def examine_loader(loader: "Loader") -> Outcomes:
    """All that can be known of a Loader without running it."""
    return examine(facts_of_loader(loader))


def facts_of_loader(loader: "Loader") -> Facts:
    settings, processes = loader.settings, loader.source.processes
    count = processes or settings.workers or 1
    held = [(data, data_in_memory(data)) for data in loader._recipe.data]
    together = [each for _, inside in held for each in inside]
    device = getattr(loader, "device", None)
    anywhere = settings.seq_len is not None and settings.packing is not Packing.WINDOWS
    scattered = anywhere and settings.group_shards is None
    return Facts(
        batch_size=settings.batch_size,
        row_tokens=settings.seq_len or 1,
        workers=WorkerFacts(count, "processes" if processes else "workers", not processes, _FEW_WORKERS),
        data=DataFacts(together, processes, Sent.EACH) if processes else None,
        loaded_bytes=sum(_loaded_bytes(data, inside) for data, inside in held),
        pageable=device.type == "cpu" if device is not None and host.accelerator_available() else None,
        pin_remedy=_GIVE_DEVICE,
        padding=_padding_of(loader),
        packing=None if settings.seq_len is None else str(settings.packing),
        random_order=scattered or settings.shuffle.kind is ShuffleKind.GLOBAL,
    )


def _padding_of(loader: "Loader") -> float:
    """Where it is known without counting: aligned windows would have to be looked up one by one."""
    settings = loader.settings
    if settings.seq_len is None or settings.packing is Packing.WINDOWS:
        return 0.0
    reports = loader._recipe.reports().values()
    places = sum(each.rows * each.seq_len for each in reports)
    return sum(each.padded for each in reports) / max(1, places)


def _loaded_bytes(data: Any, held: Sequence[DataPiece]) -> int:
    """What it holds in memory: arrays and objects, or files that were read whole."""
    if isinstance(data, Dataset) and data.manifest is not None:
        in_memory = getattr(data.source, "_in_memory", False)
        return sum(shard.stored.bytes for shard in data.manifest.shards) if in_memory else 0
    return sum(each.bytes for each in held if each.kind is not DataKind.MAP)


class WatchCpu:
    """Looks once, over half a minute of training that is under way; the first half minute may be compiling."""

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
        """Cheap enough for now and then; not for every batch."""
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
            _log.debug("could not look at the processor's use", exc_info=True)


watch_cpu = WatchCpu()
