"""Reports as a page: well formed, self-contained, escaped, and complete."""

import copy
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from headrace.measure.reporting.amounts import amount, heading
from headrace.measure.reporting.html import html
from headrace.measure.reporting.html_charts import nice_ticks
from headrace.measure.reporting.report import METRICS, Point, Report

_VOID = {"meta", "br", "img", "link", "hr", "input"}


def run(scale: float = 1.0, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {metric.name: 0.25 * scale for metric in METRICS if metric.unit == "%"}
    for number, metric in enumerate(metric for metric in METRICS if metric.unit != "%"):
        found[metric.name] = (7.0 + 13 * number) * scale
    more = {"batches": 30, "series": {"wait_ms": [1.0, 5.0, 2.0], "step_ms": [2.0, 6.0, 3.0]}, "notes": []}
    return {**found, **more, "stats": None, "complete": True, **changes}


def counted(**stages: float) -> dict[str, Any]:
    listed = {name: {"count": 10, "seconds": seconds} for name, seconds in stages.items()}
    queues = {"ready": {"mean": 1.0, "empty_share": 0.44, "capacity": 4}}
    return {"batches": 10, "stages": listed, "queues": queues}


def report(*points: Point, **changes: Any) -> Report:
    environment = {
        "cores": 2,
        "cpu": "AMD EPYC",
        "accelerators": [],
        "packages": {"numpy": "2.4"},
        "date": "2026-11-16",
    }
    settings = {"target": "train:make", "settings": {"seq_len": 512}, "step": "simulated, 5 ms"}
    return Report(**{**settings, "environment": environment, "points": list(points), **changes})


def sweep(*keys: str, values: tuple[Any, ...] = (1, 2, 4), runs: int = 3) -> Report:
    settings: list[dict[str, Any]] = [{}]
    for key in keys:
        settings = [{**each, key: value} for each in settings for value in values]
    return report(
        *(
            Point(each, runs=[run(0.5 + n / 8 + r / 50) for r in range(runs)])
            for n, each in enumerate(settings)
        )
    )


class _Checker(HTMLParser):
    """Collects the text, and fails if tags do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def check(page: str) -> _Checker:
    """The page is well formed and needs nothing from outside; pictures say what they show."""
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert not re.search(r"https?://|<link|<script|\bsrc=|@import|url\((?!#)", page)
    pictures = _pictures(page)
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        if root.get("aria-hidden") != "true":
            assert root.get("role") == "img"
            assert [child.tag for child in root][:2] == ["title", "desc"]
            assert all((root.findtext(part) or "").strip() for part in ("title", "desc"))
        for element in root.iter():
            assert not any("nan" in value or "inf" in value for value in element.attrib.values())
    page.encode()
    return checker


def _pictures(page: str) -> list[str]:
    """The outermost <svg> elements."""
    found, depth, begun = [], 0, 0
    for match in re.finditer(r"<svg\b|</svg>", page):
        if match[0] == "</svg>":
            depth -= 1
            if depth == 0:
                found.append(page[begun : match.end()])
        else:
            begun = match.start() if depth == 0 else begun
            depth += 1
    assert depth == 0
    return found


def words(page: str) -> str:
    return " ".join(check(page).text)


@pytest.mark.parametrize(
    "found",
    [
        sweep("num_workers"),
        sweep("num_workers", "batch_size"),
        sweep("a", "b", "c"),
        sweep("store", values=("mmap", "a much longer name of something")),
        sweep("flag", values=(True, False)),
        sweep("ratio", values=(1e-9, 0.5, 1e12), runs=1),
        sweep("n", values=tuple(range(13))),
        sweep("n", values=tuple(range(60))),
        sweep("same", values=(1, 1)),
        report(Point({}, ranks=4, runs=[run(), run(2)])),
    ],
    ids=["one sweep", "two", "three", "names", "flags", "extremes", "many", "most", "same", "single"],
)
def test_pages_are_well_formed_and_need_nothing_else(found: Report) -> None:
    said = words(html(found))
    assert "What the figures mean" in said
    assert "MLPerf Storage" in said


def test_every_figure_is_there_with_its_spread() -> None:
    for found in (report(Point({}, runs=[run(), run(1.5), run(2)])), sweep("num_workers", "batch_size")):
        said = words(html(found))
        for metric in METRICS:
            assert heading(metric) in said
            for point in found.points:
                for value in point.summary[metric.name].values():
                    assert amount(value, metric.unit) in said


def test_lines_for_numbers_and_bars_for_names() -> None:
    assert html(sweep("num_workers")).count('class="stretch"') == 4 * 2
    both = html(sweep("num_workers", "batch_size"))
    assert both.count('class="stretch"') == 4 * 3 * 2 + 3  # and three in the legend
    assert 'class="stretch"' not in html(sweep("store", values=("mmap", "ram")))
    assert 'class="stretch"' not in html(sweep("a", "b", "c"))


def test_places_are_in_order_whatever_the_sweeps() -> None:
    page = html(sweep("num_workers", values=(16, 2, 4)))
    described = re.search(r"<desc>(2: .*?)</desc>", page)
    assert described
    assert re.findall(r"(\d+): ", described[1]) == ["2", "4", "16"]


def test_whiskers_are_drawn_where_runs_differ() -> None:
    wide = report(*(Point({"n": n}, runs=[run(0.5), run(n)]) for n in (2, 3)))
    assert 'class="whisker"' in html(wide)
    assert 'class="whisker"' not in html(sweep("n", runs=1))


def test_stages_and_queues_of_headraces_loaders_are_shown() -> None:
    stats = counted(gather=0.1, transform=0.3, wait=1.0, step=1.0)
    page = html(report(Point({"workers": 2}, runs=[run(stats=stats, wait_share=0.4)])))
    said = words(page)
    assert "What making a batch takes" in said
    assert "40.0 ms per batch; queue 'ready' empty 44.0% of the time" in said
    assert "transform: 30.0 ms; gather: 10.0 ms" in said
    assert "'transform' accounts for 75% of the work" in said
    assert "What making a batch takes" not in words(html(sweep("workers")))


def test_a_turn_of_the_loop_is_split_into_waiting_computing_and_the_rest() -> None:
    turn = {"batches_per_second": 200.0, "wait_share": 0.3, "utilisation": 0.6}
    two_ranks = Point({}, ranks=2, runs=[run(**turn)])
    assert "waiting: 3.00 ms; step: 6.00 ms; the rest: 1.00 ms" in words(html(report(two_ranks)))
    no_step = Point({}, runs=[run(**turn | {"utilisation": None})])
    assert "waiting: 1.50 ms; step: 3.50 ms" in words(html(report(no_step)))


def test_the_goal_is_drawn_with_utilisation() -> None:
    assert "MLPerf Storage: 90%" in words(html(sweep("workers")))
    without = sweep("workers")
    for point in without.points:
        point.runs = [each | {"utilisation": None, "headroom": None} for each in point.runs]
    said = words(html(without))
    assert "MLPerf Storage: 90%" not in said
    assert "No step was given" in said


def test_failed_points_are_crosses_and_their_errors_are_told() -> None:
    found = sweep("num_workers", "batch_size")
    found.points[4].runs, found.points[4].errors = [], ["ValueError: <boom>"]
    found.interrupted = True
    page = html(found)
    said = words(page)
    assert 'class="missing"' in page
    assert "1 of 9 points failed." in said
    assert "ValueError: <boom>" in said
    assert "Interrupted." in said


HOSTILE = "</title></style></svg><script>alert(1)</script>\"'&\x00\x1b[31m\ud800\u202e"


def test_what_users_name_is_escaped() -> None:
    found = sweep(HOSTILE, f"other {HOSTILE}")
    found.target, found.step, found.settings = HOSTILE, HOSTILE, {HOSTILE: HOSTILE}
    found.environment = {
        HOSTILE: HOSTILE,
        "packages": {HOSTILE: HOSTILE},
        "accelerators": [HOSTILE],
        "date": HOSTILE,
    }
    found.notes, found.points[0].errors = [HOSTILE], [HOSTILE]
    stats = counted(**{HOSTILE: 0.1}) | {"queues": {HOSTILE: {"mean": 1, "empty_share": 0.5, "capacity": 2}}}
    for each in found.points[1].runs:
        each |= {"stats": stats, "notes": [HOSTILE]}
    named = copy.deepcopy(found)
    for number, point in enumerate(named.points):
        point.settings = {HOSTILE: f"{HOSTILE}{number}"}
    for each in (found, named):
        page = html(each)
        checker = check(page)
        assert "script" not in {tag for tag, _ in checker.tags}
        assert "alert(1)" in " ".join(checker.text)
        assert not re.search(r"[\x00\x1b\ud800\u202e]", page)


def test_no_directories_are_passed_on() -> None:
    found = sweep("cache", values=("/home/someone/fast disk/a", "/home/someone/fast disk/b"))
    found.target = "/home/someone/my data/books"
    found.settings = {
        "dir": "/home/someone/x",
        "more": ["/home/someone/y"],
        "bucket": "s3://bucket/books/part",
    }
    found.notes = [
        "/home/someone/my data/books: read slowly",
        "see file:///home/someone/z.bin or 1/2 and a/b/c",
    ]
    found.points[0].errors = [
        "OSError: '/home/someone/my files/x.bin' is gone\n"
        '  File "/home/someone/train.py", line 3, in (/home/someone/q)'
    ]
    page = html(found)
    said = words(page)
    assert "someone" not in page
    assert "cache=a" in said
    assert "s3://bucket/books/part" in said
    assert "1/2 and a/b/c" in said
    assert "File train.py, line 3, in (q)" in said
    assert found.target == "/home/someone/my data/books"


def test_degenerate_reports_have_pages() -> None:
    failed = sweep("num_workers")
    for point in failed.points:
        point.runs, point.errors = [], ["boom"]
    one_batch = run(batches=1, series={"wait_ms": [0.0], "step_ms": [5.0]})
    nothing = {metric.name: None for metric in METRICS}
    zeros = {metric.name: 0.0 for metric in METRICS}
    only_start = {"first_batch_warm_seconds": 0.5, "notes": []}
    assert "Nothing was measured." in words(html(failed))
    assert "Nothing was measured." in words(html(report()))
    assert "Nothing was measured." in words(html(report(Point({}, runs=[nothing | {"notes": []}]))))
    assert "step 1" in words(html(report(Point({}, runs=[one_batch]))))
    assert "only the start" in words(html(report(Point({}, runs=[only_start]))))
    words(html(report(Point({}, runs=[only_start]), Point({"a": 1}, runs=[run()]), environment={})))
    for count in (1, 2):
        words(html(report(*(Point({"a": n}, runs=[run(**zeros)]) for n in range(count)))))


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (1153, [0, 500, 1000, 1500]),
        (4, [0, 1, 2, 3, 4]),
        (0.03, [0, 0.01, 0.02, 0.03]),
        (0, [0, 1]),
        (7, [0, 2, 4, 6, 8]),
    ],
)
def test_ticks_are_round_and_reach_the_highest(highest: float, ticks: list[float]) -> None:
    assert nice_ticks(highest) == pytest.approx(ticks)
