"""How long does it take to open a dataset in an object store, and to have the first batch of it?

The round trips that someone waits for, one after the other, show in what latency costs:

    latency 30 ms    0.15 s
    latency 130 ms   0.55 s        0.40 s more for 100 ms: four round trips
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import remote_reads as reads
from machine import interleave, print_table, spread
from remote_child import in_a_process
from remote_server import LATENCY_SECONDS, Endpoint, proxy

MORE_LATENCY_SECONDS = 0.1
SHARES = (0.0, 0.5, 0.99)


def starting(near: Endpoint, place: str, shares: Sequence[float], rounds: int) -> dict[str, Any]:
    """At these shares of an epoch."""
    with proxy(near, latency_seconds=0.0) as counting:
        in_a_process(counting.environment, reads.open_only, place)
    states = in_a_process(near.environment, reads.states, place, shares)
    slow = LATENCY_SECONDS + MORE_LATENCY_SECONDS
    with proxy(near, latency_seconds=LATENCY_SECONDS) as usual, proxy(near, latency_seconds=slow) as slower:
        names = [f"{share:.0%}" for share in shares]
        at = dict(zip(names, states, strict=True))
        reports = _in_turns({"usual": usual, "slower": slower}, place, at, rounds)
    first = {name: _compared(reports[f"{name}, usual"], reports[f"{name}, slower"]) for name in names}
    return {"open_requests": sum(counting.requests.values()), "first_batch": first}


def _in_turns(
    endpoints: Mapping[str, Endpoint], place: str, states: Mapping[str, dict[str, Any]], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    reports: dict[str, list[dict[str, Any]]] = {}
    turns: dict[str, Callable[[], float]] = {}
    for share, state in states.items():
        for speed, endpoint in endpoints.items():
            name = f"{share}, {speed}"

            def turn(name: str = name, endpoint: Endpoint = endpoint, state: dict[str, Any] = state) -> float:
                report = in_a_process(endpoint.environment, reads.first_batch, place, state)
                reports.setdefault(name, []).append(report)
                return float(report["seconds"])

            turns[name] = turn
    interleave(turns, rounds)
    return reports


def _compared(usual: list[dict[str, Any]], slower: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": spread([report["seconds"] for report in usual]),
        "open_seconds": spread([report["open_seconds"] for report in usual]),
        "batch_seconds": spread([report["batch_seconds"] for report in usual]),
        "batch_requests": [report["requests"] for report in usual],
        "round_trips": _round_trips(usual, slower, "seconds"),
        "open_round_trips": _round_trips(usual, slower, "open_seconds"),
        "batch_round_trips": _round_trips(usual, slower, "batch_seconds"),
    }


def _round_trips(usual: list[dict[str, Any]], slower: list[dict[str, Any]], name: str) -> float:
    """By the best rounds: what else the machine does only ever takes longer."""
    more = min(report[name] for report in slower)
    less = min(report[name] for report in usual)
    return (more - less) / MORE_LATENCY_SECONDS


def show_starting(found: Mapping[str, Any]) -> None:
    rows = []
    for share, each in found["first_batch"].items():
        seconds = [each[name]["median"] for name in ("open_seconds", "batch_seconds", "seconds")]
        requests = statistics.median(each["batch_requests"])
        rows.append([share, *seconds, each["open_round_trips"], each["round_trips"], requests])
    header = ["first batch at", "open, s", "batch, s", "both, s", "round trips to open", "of both"]
    header.append("requests of the batch")
    title = f"starting, {1000 * LATENCY_SECONDS:.0f} ms a request; opening makes {found['open_requests']} requests"
    print_table(title, header, rows)
