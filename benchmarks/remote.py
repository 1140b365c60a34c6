"""How fast is data read from an object store, beside plain requests for the same bytes?

epochs    uncached, with an empty cache, from a full cache, and from the local disk; beside raw requests for ranges of
          4 MB, eight at a time, and for caching beside such requests that also write what they get
steps     a training loop whose steps need 70 % of the bytes that raw requests get: how often it waits for a batch
starting  the time and the round trips to open a dataset, and to the first batch at 0, 50 and 99 % of an epoch

The server is a real one on loopback, behind a proxy that adds 30 ms to each request and lets 300 MB through a second:
without a limit, two cores are too few for both sides, and what is measured is the machine. Those figures stand beside
the others as 'unlimited'. Every measurement is a process of its own, and all take turns, round after round. Round trips
are counted by what a latency of 100 ms more costs; connecting costs nothing on loopback and is not counted.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import remote_reads as reads
from machine import arguments, describe, interleave, print_table, ratio, spread, write_results
from remote_child import in_a_process
from remote_data import Made, make, upload
from remote_server import BUCKET, BYTES_PER_SECOND, LATENCY_SECONDS, Endpoint, proxy, server
from remote_start import SHARES, show_starting, starting

STEP_SHARE = 0.7
PLACE = f"s3://{BUCKET}/tokens"
QUESTIONS = ("epochs", "steps", "starting")
Reports = dict[str, list[dict[str, Any]]]
"""The reports of each measurement, one a round."""

RAW, OBSTORE, CHECKED = "raw GETs", "raw GETs by obstore", "fetching and checking"
UNCACHED, WRITTEN = "uncached epoch", "raw GETs and writes"
CACHING, CACHED, LOCAL = (
    "first epoch with caching",
    "second epoch from the cache",
    "epoch from the local disk",
)
UNLIMITED_TOO = (RAW, UNCACHED, OBSTORE, CHECKED)
RATIOS = {
    "uncached epoch to raw GETs": (UNCACHED, RAW),
    "uncached epoch to raw GETs by obstore": (UNCACHED, OBSTORE),
    "fetching and checking to raw GETs": (CHECKED, RAW),
    "first epoch with caching to raw GETs and writes": (CACHING, WRITTEN),
    "second epoch from the cache to the local disk": (CACHED, LOCAL),
}
"""Whose speed is compared with whose."""


@dataclass(frozen=True)
class Bench:
    """The data, where it is, and how often it is read."""

    made: Made
    local: Path
    scratch: Path
    near: Endpoint
    far: Endpoint
    rounds: int
    is_quick: bool


def main() -> None:
    parser = arguments(__doc__ or "", "remote")
    parser.add_argument("--megabytes", type=int, help="size of the tokens (3,000)")
    parser.add_argument("--rounds", type=int, help="rounds (5)")
    parser.add_argument("--only", choices=QUESTIONS, action="append", help="one question; may be repeated")
    options = parser.parse_args()
    body: dict[str, Any] = {"machine": describe()}
    with (
        tempfile.TemporaryDirectory(dir=options.scratch) as folder,
        _prepared(options, Path(folder)) as bench,
    ):
        body |= {"dataset": bench.made.to_json(), "network": _network(), "rounds": bench.rounds}
        asked = options.only or QUESTIONS
        if "epochs" in asked:
            body["epochs"] = epochs(bench)
        if "steps" in asked:
            body["steps"] = steps(bench)
        if "starting" in asked:
            shares = SHARES[1:2] if bench.is_quick else SHARES
            body["starting"] = starting(bench.near, PLACE, shares, bench.rounds)
            show_starting(body["starting"])
    body["targets"] = targets(body)
    write_results(options, "remote", body)
    for target, is_met in body["targets"].items():
        print(f"  {'met' if is_met else 'NOT MET'}: {target}")


@contextlib.contextmanager
def _prepared(options: argparse.Namespace, scratch: Path) -> Iterator[Bench]:
    local = scratch / "local"
    made = make(local, options.megabytes or (8 if options.quick else 3000))
    with server(scratch / "s3") as near:
        in_a_process(near.environment, upload, local, PLACE)
        with proxy(near) as far:
            rounds = options.rounds or (1 if options.quick else 5)
            yield Bench(made, local, scratch, near, far, rounds, options.quick)


def _network() -> dict[str, Any]:
    return {
        "latency_seconds": LATENCY_SECONDS,
        "bytes_per_second": BYTES_PER_SECOND,
        "raw_range_bytes": reads.RANGE_BYTES,
        "raw_requests_at_once": reads.AT_ONCE,
    }


# Epochs


def epochs(bench: Bench) -> dict[str, Any]:
    limited: Reports = {}
    unlimited: Reports = {}
    through_proxy = _turns(bench, bench.far, limited)
    directly = _turns(bench, bench.near, unlimited)
    turns = {f"limited, {name}": turn for name, turn in through_proxy.items()}
    turns |= {f"unlimited, {name}": directly[name] for name in UNLIMITED_TOO}
    interleave(turns, bench.rounds)
    found = {"limited": summary(limited, bench.made), "unlimited": summary(unlimited, bench.made)}
    for name, answer in found.items():
        _show_epochs(f"{name}: {bench.made.epoch_bytes / 1e6:,.0f} MB", answer)
    return found


def _turns(bench: Bench, endpoint: Endpoint, reports: Reports) -> dict[str, Callable[[], float]]:
    """Each measurement as a call that adds a report."""
    ranges = reads.Ranges.of(bench.local, PLACE)
    _settle(bench)
    written, cache = bench.scratch / "written", bench.scratch / "cache"

    def run(name: str, function: Callable[..., Any], *given: Any) -> float:
        report = in_a_process(endpoint.environment, function, *given)
        reports.setdefault(name, []).append(report)
        return float(report["seconds"])

    def run_cached() -> float:
        seconds = run(CACHING, reads.epoch, PLACE, cache)
        run(CACHED, reads.epoch, PLACE, cache)
        shutil.rmtree(cache)
        _settle(bench)
        return seconds

    def run_written() -> float:
        seconds = run(WRITTEN, reads.raw_and_write, ranges, written)
        shutil.rmtree(written)
        _settle(bench)
        return seconds

    return {
        RAW: lambda: run(RAW, reads.raw, ranges),
        UNCACHED: lambda: run(UNCACHED, reads.epoch, PLACE),
        OBSTORE: lambda: run(OBSTORE, reads.raw_by_obstore, ranges),
        CHECKED: lambda: run(CHECKED, reads.fetch_and_check, PLACE),
        WRITTEN: run_written,
        CACHING: run_cached,
        LOCAL: lambda: run(LOCAL, reads.epoch, bench.local),
    }


def _settle(bench: Bench) -> None:
    """What the disk still has to write would slow down whoever comes next."""
    if not bench.is_quick:
        os.sync()


def summary(reports: Reports, made: Made) -> dict[str, Any]:
    gigabytes = made.epoch_bytes / 1e9
    seconds = {name: [report["seconds"] for report in each] for name, each in reports.items()}
    cpu = {name: [report["cpu_seconds"] / gigabytes for report in each] for name, each in reports.items()}
    found: dict[str, Any] = {"measurements": {}, "ratios": {}}
    for name, each in reports.items():
        found["measurements"][name] = {
            "seconds": spread(seconds[name]),
            "megabytes_per_second": 1000 * gigabytes / statistics.median(seconds[name]),
            "cpu_seconds_per_gb": spread(cpu[name]),
            "bytes_fetched_to_needed": statistics.median(report["bytes"] for report in each)
            / made.epoch_bytes,
        }
    for name, (of, to) in RATIOS.items():
        if of in seconds and to in seconds:
            # Of speeds, so the other way round for seconds.
            found["ratios"][name] = ratio(seconds[to], seconds[of])
    batches = [whole - fetched for whole, fetched in zip(cpu[UNCACHED], cpu[CHECKED], strict=True)]
    found["cpu_seconds_per_gb"] = {CHECKED: spread(cpu[CHECKED]), "making batches": spread(batches)}
    return found


def _show_epochs(title: str, found: Mapping[str, Any]) -> None:
    rows = []
    for name, each in found["measurements"].items():
        cpu = each["cpu_seconds_per_gb"]["median"]
        rows.append([name, each["megabytes_per_second"], cpu, each["bytes_fetched_to_needed"]])
    print_table(title, ["", "MB/s", "CPU-seconds a GB", "fetched to needed"], rows)
    ratios = [[name, *each.values()] for name, each in found["ratios"].items()]
    print_table("speeds", ["", "median", "lowest", "highest"], ratios)


# Steps


def steps(bench: Bench) -> dict[str, Any]:
    """Raw requests and the loop, in turns. The length of a step is that of the raw requests before it."""
    ranges = reads.Ranges.of(bench.local, PLACE)
    most_seconds = 0.3 if bench.is_quick else 20.0
    reports = []
    for _ in range(bench.rounds):
        raw = in_a_process(bench.far.environment, reads.raw, ranges)
        needed = STEP_SHARE * raw["bytes"] / raw["seconds"]
        reports.append(in_a_process(bench.far.environment, reads.steps, PLACE, needed, most_seconds))
    found: dict[str, Any] = {
        name: spread([report[name] for report in reports]) for name in reports[0] if name != "steps"
    }
    found["steps"] = [report["steps"] for report in reports]
    print_table(
        f"steps that need {STEP_SHARE:.0%} of the network",
        ["", "median", "best", "worst"],
        [[name, *_three(each)] for name, each in found.items() if name != "steps"],
    )
    return found


def _three(found: Mapping[str, Any]) -> list[float]:
    return [found["median"], found["best"], found["worst"]]


# Targets


def targets(body: Mapping[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    if "epochs" in body:
        limited = body["epochs"]["limited"]
        ratios = {name: each["median"] for name, each in limited["ratios"].items()}
        cpu = limited["cpu_seconds_per_gb"][CHECKED]["median"]
        found["uncached epoch at least 0.85 of raw GETs"] = ratios["uncached epoch to raw GETs"] >= 0.85
        caching = ratios["first epoch with caching to raw GETs and writes"]
        found["first epoch with caching at least 0.85 of raw GETs and writes"] = caching >= 0.85
        cached = ratios["second epoch from the cache to the local disk"]
        found["second epoch from the cache at least 0.95 of a local dataset"] = cached >= 0.95
        found["fetching and checking at most 0.8 CPU-seconds a GB"] = cpu <= 0.8
    if "steps" in body:
        waited = body["steps"]["steps_that_waited"]["median"]
        found["no step waits more than 1 ms after the first batch"] = waited == 0
    if "starting" in body:
        found["opening takes at most three requests"] = body["starting"]["open_requests"] <= 3
        for share, each in body["starting"]["first_batch"].items():
            trips, seconds = each["round_trips"], each["seconds"]["median"]
            # What is measured by the clock is no whole number.
            is_near = trips < 4.5 and seconds <= 0.3
            found[f"first batch at {share} in at most four round trips and 0.3 s"] = is_near
    return found


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
