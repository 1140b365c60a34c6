"""What a benchmark found: points (one setting each), their runs, and each figure's spread over the runs."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.measure.running.children import Measured
from headrace.measure.running.network import network_figures, network_notes
from headrace.measure.running.quantiles import spread
from headrace.measure.running.server_figures import server_figures

FORMAT = 1
_MB = 1e6


@dataclass(frozen=True)
class Metric:
    """A figure of a run: its name in JSON, what tables call it, its unit, and which way is better."""

    name: str
    label: str
    unit: str
    higher_is_better: bool | None


METRICS = (
    Metric("first_batch_cold_seconds", "first batch, cold", "s", False),
    Metric("first_batch_warm_seconds", "first batch, warm", "s", False),
    Metric("batches_per_second", "batches", "/s", True),
    Metric("samples_per_second", "samples", "/s", True),
    Metric("tokens_per_second", "tokens", "/s", True),
    Metric("mb_per_second", "data", "MB/s", True),
    Metric("network_requests", "requests", "count", None),
    Metric("network_mb", "fetched", "MB", None),
    Metric("network_mb_per_second", "fetched, rate", "MB/s", None),
    Metric("network_cached_share", "from the cache", "%", None),
    Metric("beginning_seconds", "beginning", "s", False),
    Metric("beginning_requests", "beginning, requests", "count", None),
    Metric("beginning_mb", "beginning, fetched", "MB", None),
    Metric("beginning_mb_per_second", "beginning, rate", "MB/s", None),
    Metric("beginning_cached_share", "beginning, cached", "%", None),
    Metric("server_queue_ms", "server, queue", "ms", False),
    Metric("server_making_ms", "server, making", "ms", False),
    Metric("server_network_ms", "network, a batch", "ms", False),
    Metric("server_late", "late answers", "count", False),
    Metric("server_faults", "faults", "count", False),
    *(Metric(f"wait_ms_{q}", f"wait, {q}", "ms", False) for q in ("p50", "p90", "p99", "max")),
    *(Metric(f"step_ms_{q}", f"step, {q}", "ms", False) for q in ("p50", "p90", "p99", "max")),
    Metric("wait_share", "waiting", "%", False),
    Metric("utilisation", "accelerator used", "%", True),
    Metric("headroom", "headroom", "%", False),
    Metric("cpu_share", "CPU, of all cores", "%", False),
    Metric("cpu_cores", "CPU, cores", "", False),
    Metric("main_cpu_cores", "CPU, main process", "", False),
    Metric("peak_pss_mb", "memory, PSS", "MB", False),
    Metric("peak_uss_mb", "memory, USS", "MB", False),
    Metric("peak_rss_mb", "memory, RSS", "MB", False),
    Metric("padding", "padding", "%", False),
    Metric("truncation", "cut off", "%", False),
)


@dataclass
class Point:
    """One setting, measured once or several times."""

    settings: Mapping[str, Any]
    ranks: int = 1
    runs: list[dict[str, Any]] = field(default_factory=list)
    """The figures of each run, by metric; with `series`, `stats` and `notes`."""
    cold_seconds: float | None = None
    """The time until the first batch with a cold page cache, measured once."""
    errors: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        ranks = {"ranks": self.ranks} if self.ranks > 1 else {}
        return ", ".join(f"{key}={value}" for key, value in {**self.settings, **ranks}.items()) or "as given"

    @property
    def summary(self) -> dict[str, dict[str, float]]:
        """Each figure's median, lowest and highest over the runs that have it."""
        found = {}
        for metric in METRICS:
            values = [run[metric.name] for run in self.runs if run.get(metric.name) is not None]
            if metric.name == "first_batch_cold_seconds" and self.cold_seconds is not None:
                values = [self.cold_seconds]
            if values:
                found[metric.name] = spread(values)
        return found

    def median(self, metric: str) -> float | None:
        values = self.summary.get(metric)
        return values["median"] if values else None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "name": self.name, "summary": self.summary}


@dataclass
class Report:
    target: str
    settings: Mapping[str, Any]
    step: str
    environment: dict[str, Any]
    plan: dict[str, Any] = field(default_factory=dict)
    """How long each run was measured, and how many runs there were."""
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def to_json(self) -> dict[str, Any]:
        points = [point.to_json() for point in self.points]
        own = {
            each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "points"
        }
        return {"format": FORMAT, **own, "points": points}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def figures(ranks: Sequence[Measured]) -> dict[str, Any]:
    """The figures of one run from what its ranks measured: rates are added up, and the slowest rank's times count."""
    runs = [rank.run for rank in ranks]
    found: dict[str, Any] = {}
    first_batch = _highest([run.first_batch_seconds for run in runs])
    if first_batch is not None:
        found["first_batch_warm_seconds"] = first_batch
    counted = [run for run in runs if run.batches]
    if counted:
        found |= _rates(counted) | _times(counted) | network_figures(counted)
        found |= server_figures(counted)
    return found | _peaks(ranks) | _totals(runs)


def _peaks(ranks: Sequence[Measured]) -> dict[str, float | None]:
    kinds = ("pss", "uss", "rss")
    found = {f"peak_{kind}_mb": _sum([getattr(rank.memory, kind) for rank in ranks]) for kind in kinds}
    if found["peak_pss_mb"] is not None:
        # PSS counts shared memory once, so RSS, which counts it again and again, has nothing to add.
        del found["peak_rss_mb"]
    return found


def _rates(runs: Sequence[Any]) -> dict[str, Any]:
    def rate(amounts: Sequence[float | None]) -> float | None:
        return _sum([None if a is None else a / run.seconds for a, run in zip(amounts, runs, strict=True)])

    return {
        "batches_per_second": rate([run.batches for run in runs]),
        "samples_per_second": rate([run.samples for run in runs]),
        "tokens_per_second": rate([run.tokens for run in runs]),
        "mb_per_second": rate([run.bytes / _MB for run in runs]),
        "cpu_cores": _sum([run.cpu_cores for run in runs]),
        "cpu_share": _sum([run.cpu_share for run in runs]),
        "main_cpu_cores": _highest([run.main_cpu_cores for run in runs]),
    }


def _times(runs: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("wait_ms", "step_ms"):
        for q in ("p50", "p90", "p99", "max"):
            found[f"{kind}_{q}"] = _highest([getattr(run, kind).get(q) for run in runs])
    for name in ("wait_share", "headroom", "padding", "truncation"):
        found[name] = _highest([getattr(run, name) for run in runs])
    utilisations = [run.utilisation for run in runs if run.utilisation is not None]
    found["utilisation"] = min(utilisations) if utilisations else None
    return found | {"series": runs[0].series, "stats": runs[0].stats}


def _totals(runs: Sequence[Any]) -> dict[str, Any]:
    return {
        "batches": sum(run.batches for run in runs),
        "complete": all(run.complete for run in runs),
        "notes": sorted({note for run in runs for note in (*run.notes, *network_notes(run))}),
    }


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _highest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
