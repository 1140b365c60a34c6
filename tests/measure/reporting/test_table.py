"""Reports as text: what is said, and that it fits."""

from typing import Any

import pytest

from headrace.measure.reporting.amounts import amount
from headrace.measure.reporting.points import best, failures, grouped, stage_ms
from headrace.measure.reporting.report import METRICS, Point, Report
from headrace.measure.reporting.table import table
from headrace.measure.reporting.verdict import verdict, winners


def run(scale: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A run's figures; rates grow with `scale`."""
    found: dict[str, Any] = {
        "first_batch_warm_seconds": 0.0124,
        "batches_per_second": 100 * scale,
        "samples_per_second": 800 * scale,
        "tokens_per_second": None,
        "mb_per_second": 12.5 * scale,
        **{f"wait_ms_{q}": 4.0 / scale for q in ("p50", "p90", "p99", "max")},
        **{f"step_ms_{q}": 9.0 / scale for q in ("p50", "p90", "p99", "max")},
        "wait_share": 0.4,
        "utilisation": 0.5,
        "headroom": 0.45,
        "cpu_share": 0.1,
        "cpu_cores": 0.2,
        "main_cpu_cores": 0.1,
        "peak_pss_mb": 1300.0,
        "peak_uss_mb": 200.0,
        "batches": 100,
        "series": {"wait_ms": [4.0, 5.0, 3.0], "step_ms": [9.0, 10.0, 8.0]},
        "stats": None,
        "notes": [],
    }
    return found | changes


def stats(**stages: float) -> dict[str, Any]:
    listed = {name: {"count": 10, "seconds": seconds} for name, seconds in stages.items()}
    return {
        "batches": 10,
        "stages": listed,
        "queues": {"ready": {"mean": 1.0, "empty_share": 0.5, "capacity": 4}},
    }


def report(*points: Point, **changes: Any) -> Report:
    settings = {
        "target": "train:make",
        "settings": {},
        "step": "simulated, 5 ms",
        "environment": {"cores": 2},
    }
    return Report(**{**settings, "points": list(points), **changes})


def swept_report(**changes: Any) -> Report:
    points = [
        Point(
            {"num_workers": workers, "batch_size": size},
            runs=[run(1 + workers + size / 64 + i / 100) for i in range(3)],
        )
        for workers in (0, 2)
        for size in (8, 16)
    ]
    return report(*points, **changes)


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (1153.5, "/s", "1.15 k"),
        (999.7, "/s", "1.00 k"),
        (12_300_000, "/s", "12.3 M"),
        (0.25, "/s", "0.250"),
        (0, "/s", "0"),
        (12.345, "ms", "12.3 ms"),
        (9.996, "ms", "10.0 ms"),
        (1500, "ms", "1.50 s"),
        (0.0000001, "ms", "<0.001 ms"),
        (0.0124, "s", "12.4 ms"),
        (90_000, "s", "90,000 s"),
        (0.7214, "%", "72.1%"),
        (0.0001, "%", "<0.1%"),
        (0.0, "%", "0.0%"),
        (-0.012, "%", "-1.2%"),
        (228.4, "MB", "228 MB"),
        (80_056.0, "count", "80,056"),
        (1300, "MB", "1.30 GB"),
        (2500, "MB/s", "2.50 GB/s"),
        (0.348, "", "0.348"),
        (float("nan"), "ms", "unknown"),
    ],
)
def test_amounts_are_readable(value: float, unit: str, said: str) -> None:
    assert amount(value, unit) == said


def test_every_metric_has_a_group() -> None:
    point = Point({}, runs=[{metric.name: 0.5 for metric in METRICS}])
    groups = grouped([point])
    assert [*groups] == [
        *("start", "waiting", "throughput", "network", "servers", "the step", "processor and memory", "data")
    ]
    assert sorted(metric.name for group in groups.values() for metric in group) == sorted(
        m.name for m in METRICS
    )
    assert [metric.name for metric in groups["data"]] == ["padding", "truncation"]


def test_one_point_shows_medians_and_spread() -> None:
    lines = table(report(Point({"num_workers": 2}, runs=[run(1), run(1.5), run(2)])), 80)
    text = "\n".join(lines)
    assert "num_workers=2" in text
    assert any(line.split() == ["samples/s", "1.20", "k", "800", "-", "1.60", "k"] for line in lines)
    assert "lowest - highest of 3 runs" in text
    assert [line for line in lines if line in ("waiting", "throughput", "the step", "processor and memory")]


NETWORK = {
    "network_requests": 220,
    "network_mb": 96.0,
    "network_mb_per_second": 32.0,
    "network_cached_share": 0.25,
    "beginning_seconds": 4.5,
    "beginning_requests": 1_284,
    "beginning_mb": 512.0,
    "beginning_mb_per_second": 114.0,
    "beginning_cached_share": 0.0,
}


def test_the_network_is_shown_with_its_beginning_apart() -> None:
    lines = [" ".join(line.split()) for line in table(report(Point({}, runs=[run(**NETWORK)])))]
    begin = lines.index("network")
    assert lines[begin + 1 : begin + 10] == [
        "requests 220",
        "fetched 96.0 MB",
        "fetched, rate 32.0 MB/s",
        "from the cache 25.0%",
        "beginning 4.50 s",
        "beginning, requests 1,284",
        "beginning, fetched 512 MB",
        "beginning, rate 114 MB/s",
        "beginning, cached 0.0%",
    ]
    points = [Point({"workers": workers}, runs=[run(**NETWORK)]) for workers in (1, 2)]
    assert "fetched" in "\n".join(table(report(*points)))
    assert "network" not in lines[:begin]


def test_one_run_has_no_spread() -> None:
    text = "\n".join(table(report(Point({}, runs=[run()])), 80))
    assert "lowest" not in text
    assert "1.30 GB" in text


def test_several_points_have_a_row_each_and_the_best_is_named() -> None:
    found = swept_report()
    lines = table(found, 80)
    header = next(line for line in lines if "num_workers" in line)
    assert header.split()[:3] == ["num_workers", "batch_size", "samples/s"]
    marked = [line for line in lines if line.startswith("*")]
    assert [line.split()[1:3] for line in marked] == [["2", "16"]]
    assert any(line.startswith("Highest samples/s: num_workers=2, batch_size=16") for line in lines)
    assert best(found) is found.points[3]


def test_wider_shows_more() -> None:
    narrow, wide = (next(x for x in table(swept_report(), w) if "batch_size" in x) for w in (60, 160))
    assert len(narrow.split("  ")) < len(wide.split("  "))


def test_points_that_cannot_be_told_apart_are_named() -> None:
    near = report(
        Point({"workers": 1}, runs=[run(1.0), run(1.2)]),
        Point({"workers": 2}, runs=[run(1.1), run(1.3)]),
        Point({"workers": 3}, runs=[run(0.1), run(0.2)]),
    )
    (said,) = winners(near)
    assert said == "Highest samples/s: workers=2 (960). Its runs overlap with those of workers=1."


def test_the_busiest_accelerator_may_be_another_points() -> None:
    found = report(
        Point({"batch_size": 1}, runs=[run(1, utilisation=0.95)]),
        Point({"batch_size": 2}, runs=[run(2, utilisation=0.5)]),
    )
    assert winners(found)[1] == "The accelerator is used most with batch_size=1 (95.0%)."


def test_the_verdict_names_the_wait_its_cause_and_the_headroom() -> None:
    counted = stats(gather=0.1, transform=0.3, wait=5.0, step=5.0)
    waits, goal, rest, headroom = verdict(report(Point({}, runs=[run(stats=counted)])))
    assert waits == (
        "The accelerator waits for data 40.0% of the time; "
        "'transform' accounts for 75% of the work of making batches."
    )
    assert goal == "It computes 50.0% of the time; MLPerf Storage asks for 90%: not reached."
    assert rest.startswith("The other 10.0% is neither: ")
    assert headroom == (
        "With a loader that costs nothing, steps would take 45.0% less time (1.82 times as many per second)."
    )


@pytest.mark.parametrize(("used", "reached"), [(0.9, True), (0.8999, True), (0.899, False), (1.0, True)])
def test_the_goal_is_judged_as_it_is_shown(used: float, reached: bool) -> None:
    said = " ".join(verdict(report(Point({}, runs=[run(utilisation=used)]))))
    assert ("not reached" not in said) == reached


def test_a_good_loader_is_praised() -> None:
    said = " ".join(verdict(report(Point({}, runs=[run(wait_share=0.01, utilisation=0.97, headroom=-0.01)]))))
    assert "hardly waits" in said
    assert "90%: reached" in said
    assert "not make the steps noticeably faster" in said


def test_without_a_step_nothing_is_said_of_an_accelerators_wait() -> None:
    said = verdict(report(Point({}, runs=[run(utilisation=None, headroom=None)]), step="none"))
    assert said[0] == "No step was given, so the loop only loads: 800 samples/s is the maximum."
    assert "MLPerf" not in " ".join(said)


def test_stages_are_pooled_over_runs_without_the_loop() -> None:
    runs = [run(stats=stats(read=0.1, wait=1.0)), run(stats=stats(read=0.3, collate=0.5, step=1.0)), run()]
    assert stage_ms(Point({}, runs=runs)) == pytest.approx({"collate": 25.0, "read": 20.0})
    assert stage_ms(Point({}, runs=[run(stats=stats() | {"batches": 0})])) == {}


def test_errors_notes_and_interruptions_are_below() -> None:
    found = swept_report(notes=["a note"], interrupted=True)
    found.points[0].errors = found.points[1].errors = ["ValueError: boom\n  second line"]
    found.points[0].runs = []
    found.points[2].runs[0]["notes"] = ["batches of 3 to 8 samples"]
    lines = table(found, 80)
    assert "  num_workers=0, batch_size=8" not in lines
    assert any(line.split() == ["0", "8", "failed"] for line in lines)
    assert lines.count("  ValueError: boom") == 1
    assert failures(found) == {
        "ValueError: boom\n  second line": ["num_workers=0, batch_size=8", "num_workers=0, batch_size=16"]
    }
    assert "note: a note" in lines
    assert "note: num_workers=2, batch_size=8: batches of 3 to 8 samples" in lines
    assert any(line.startswith("Interrupted") for line in lines)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_lines_fit_whatever_the_names(width: int) -> None:
    odd = swept_report(target="x" * 300, notes=["word " * 80, "y" * 300], settings={"a": "b" * 200})
    for number, point in enumerate(odd.points):
        point.settings = {"a name\nof two lines": f"{number}" + "v" * 90, "other": number, "\x1b[31m": "\t"}
    odd.points[1].errors = ["e" * 500 + "\n" + "f " * 200]
    for each in (
        odd,
        swept_report(),
        report(),
        report(Point({}, runs=[run()])),
        report(Point({"k": "v" * 99})),
    ):
        for line in table(each, width):
            assert len(line) <= width
            assert line.isprintable()


def test_degenerate_reports_have_words() -> None:
    assert "Nothing was measured." in table(report(Point({}, errors=["boom"])), 80)
    assert "Nothing was measured." in table(report(), 80)
    only_start = report(Point({}, runs=[{"first_batch_warm_seconds": 0.5, "notes": []}]))
    assert "No batch was counted: only the start was measured." in table(only_start, 80)
    same = report(Point({"a": 1}, runs=[run()]), Point({"a": 1}, runs=[run()]))
    assert sum("a=1" in line for line in table(same, 80)) >= 2


def test_points_of_which_only_some_have_a_rate() -> None:
    start = {"first_batch_warm_seconds": 0.5, "notes": []}
    for rate in (0.0, 10.0):
        slow = Point({"a": 2}, runs=[{**start, "batches_per_second": rate, "wait_share": 0.5}])
        only_start = Point({"a": 1}, runs=[start])
        each = report(only_start, slow)
        assert best(each) is slow
        assert winners(each)[0].startswith("Highest batches/s: a=2")
        assert table(each, 80)
