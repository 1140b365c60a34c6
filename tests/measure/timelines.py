"""Reading timelines as the viewers do."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

Events = list[dict[str, Any]]


def read(path: Path, seconds: float | None = None) -> Events:
    """The events, after checking all that the viewers ask for. Times are compared in whole nanoseconds."""
    document = json.loads(path.read_text())
    assert set(document) <= {"traceEvents", "displayTimeUnit"}
    events: Events = document["traceEvents"]
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        lane = event["pid"], event["tid"]
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
                if event["name"] == "thread_name":
                    assert lane not in named
                    named.add(lane)
            case "X":
                begun, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
                assert begun >= 0
                assert length >= 0
                if seconds is not None:
                    assert begun + length <= seconds * 1e9
                assert 0 <= event["args"]["own_ms"] <= event["dur"] / 1e3 + 1e-9
                lanes[lane].append((begun, begun + length))
            case "C":
                assert event["ts"] >= 0
                assert all(type(each) is int and each >= 0 for each in event["args"].values())
            case other:
                pytest.fail(f"an event of kind {other!r}")
    assert set(lanes) <= named
    for spans in lanes.values():
        check_nested(spans)
    return events


def check_nested(spans: list[tuple[int, int]]) -> None:
    """One after the other, or one inside the other."""
    under_way: list[int] = []
    for begun, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while under_way and under_way[-1] <= begun:
            under_way.pop()
        assert not under_way or ended <= under_way[-1]
        under_way.append(ended)


def stages_by_lane(events: Events) -> dict[str, set[str]]:
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    stages: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            stages[names[event["tid"]]].add(event["name"])
    return dict(stages)


def count(events: Events, name: str) -> int:
    return sum(event["ph"] == "X" and event["name"] == name for event in events)
