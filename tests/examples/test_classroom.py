"""The classroom experiments run, small, each in a process of its own, and show what their docstrings promise.

Times are not asserted, only what holds on any machine at any load.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.scripts import PLOTS, scripts_with, skip_without

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "classroom.md"
SHARED = {"classroom", "page_cache", "demo", "serve_images"}
EXPERIMENTS = sorted({path.stem for path in EXAMPLES.glob("*.py")} - SHARED)

Table = list[dict[str, str]]


HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def run(name: str, folder: Path, *modules: str) -> str:
    """What an experiment prints; `modules` are those that it takes long to import."""
    skip_without(*modules)
    if HAS_MATPLOTLIB and not modules:
        modules = PLOTS
    script = EXAMPLES / f"{name}.py"
    ran = scripts_with(*modules).run(script, "--quick", "--out", folder / "out", "--scratch", folder)
    assert ran.returncode == 0, ran.stderr
    assert {path.name for path in folder.iterdir()} <= {"out"}, "temporary files stay behind"
    return ran.stdout


def tables(printed: str) -> list[Table]:
    """Every table that was printed: a dict for each row, by the words of the header."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", printed, re.MULTILINE):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append([dict(zip(cells[0], row, strict=True)) for row in cells[2:]])
    return found


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def has_plot(folder: Path, name: str) -> bool:
    """If there can be one: without matplotlib there is a table all the same."""
    path = folder / "out" / f"{name}.svg"
    if not HAS_MATPLOTLIB:
        return not path.exists()
    return path.exists() and "</svg>" in path.read_text()


def test_overlap(tmp_path: Path) -> None:
    (table,) = tables(run("overlap", tmp_path))
    assert [row["compute, ms"] for row in table] == ["5", "10", "16"]
    for row in table:
        # Sleeping takes at least as long as it was asked for: these are the least that a step can take.
        assert number(row["made when asked, ms"]) >= 0.99 * number(row["sum"])
        assert number(row["made ahead, ms"]) >= 0.99 * number(row["compute, ms"])
    assert has_plot(tmp_path, "overlap")


def test_workers(tmp_path: Path) -> None:
    waiting, counting = tables(run("workers", tmp_path, "torch"))
    assert [row["workers"] for row in waiting] == [row["workers"] for row in counting] == ["0", "2"]
    for name in ("torch, processes", "headrace, processes", "headrace, threads"):
        assert number(waiting[0][name]) >= 64.9, "without workers a step takes the sum of both"
    assert [number(row["theory"]) for row in waiting] == [65, 25]
    assert has_plot(tmp_path, "workers")


@pytest.mark.skipif(sys.platform != "linux", reason="memfd_create")
def test_handover(tmp_path: Path) -> None:
    (table,) = tables(run("handover", tmp_path))
    assert [row["batch"] for row in table] == ["4 KB", "1 MB"]
    assert all(number(cell) > 0 for row in table for name, cell in row.items() if name != "batch")
    assert has_plot(tmp_path, "handover")


@pytest.mark.skipif(sys.platform != "linux", reason="smaps_rollup")
def test_two_processes_share_the_pages_of_a_map(tmp_path: Path) -> None:
    (table,) = tables(run("mmap_or_ram", tmp_path))
    figures = {row[""]: row for row in table}
    for which in ("alone", "one of two"):
        assert number(figures[f"RSS, {which}, MB"]["map"]) > 12
        assert number(figures[f"USS, {which}, MB"]["in memory"]) > 12, "memory of one's own is not shared"
    assert number(figures["USS, one of two, MB"]["map"]) < 5
    assert number(figures["PSS, one of two, MB"]["map"]) < 12
    assert has_plot(tmp_path, "mmap_or_ram")


@pytest.mark.skipif(sys.platform != "linux", reason="posix_fadvise and mincore")
def test_reads(tmp_path: Path) -> None:
    printed = run("reads", tmp_path)
    reads, touches = tables(printed)
    assert [row["read"] for row in reads] == ["4 KB", "256 KB"]
    assert [row["advice"] for row in touches] == ["normal", "sequential", "random"] * 2
    assert all(number(row["read, MB"]) >= number(row["touched, MB"]) * 0.99 for row in touches)
    if "100% of the file" in printed:
        at_random = {row["advice"]: row for row in touches if "at random" in row["touched"]}
        assert number(at_random["random"]["major"]) > 0, "a cold page has to be read"
        assert number(at_random["random"]["read, MB"]) <= number(at_random["normal"]["read, MB"])
    else:
        assert "nothing here is cold" in printed
    assert has_plot(tmp_path, "reads")


def test_packed_batches_hold_less_padding(tmp_path: Path) -> None:
    (table,) = tables(run("padding", tmp_path))
    padding = {row["batches"]: number(row["padding, %"]) for row in table}
    assert list(padding) == ["padded to seq_len", "padded to longest", "sorted by length", "packed"]
    assert list(padding.values()) == sorted(padding.values(), reverse=True)
    assert padding["packed"] < 1 < padding["sorted by length"] < 20 < padding["padded to longest"]
    steps = {row["batches"]: number(row["steps"]) for row in table}
    assert 3 * steps["packed"] < steps["padded to seq_len"]
    assert has_plot(tmp_path, "padding")


def test_pinning_says_that_there_is_no_device(tmp_path: Path) -> None:
    printed = run("pinning", tmp_path, "torch")
    if "there is no CUDA device here" in printed:
        assert not (tmp_path / "out").exists()
        return
    copies, beside = tables(printed)
    assert len(copies) == 12
    assert len(beside) == 3
    assert has_plot(tmp_path, "pinning")


def test_noisy_neighbour(tmp_path: Path) -> None:
    (table,) = tables(run("noisy_neighbour", tmp_path))
    assert [(row["machine"], row["batches ready"]) for row in table] == [
        (machine, ready) for machine in ("quiet", "neighbour") for ready in ("0", "4")
    ]
    for row in table:
        assert number(row["step, p99"]) >= number(row["step, p50"]) >= 12
        assert number(row["wait, p99"]) >= number(row["wait, p50"]) >= 0
    assert has_plot(tmp_path, "noisy_neighbour")


def test_without_matplotlib_the_table_is_still_there(tmp_path: Path) -> None:
    hidden = "import runpy, sys; sys.modules['matplotlib'] = None; sys.path.insert(0, sys.argv[1]); "
    hidden += "sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [EXAMPLES, EXAMPLES / "padding.py", "--quick", "--out", tmp_path / "out"]
    ran = scripts_with().run("-c", *words, code=hidden)
    assert ran.returncode == 0, ran.stderr
    assert len(tables(ran.stdout)) == 1
    assert "matplotlib is not installed" in ran.stdout
    assert not (tmp_path / "out").exists()


def test_every_experiment_is_tried_and_taught() -> None:
    declared = ast.parse((EXAMPLES / "classroom.py").read_text())
    listed = next(
        ast.unparse(node.value)
        for node in declared.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPERIMENTS"
    )
    page = PAGE.read_text()
    for name in EXPERIMENTS:
        assert f"'{name}'" in listed
        assert f"examples/{name}.py" in page
        assert f'run("{name}"' in Path(__file__).read_text()


def test_the_page_shows_plots_that_exist_and_are_small() -> None:
    shown = re.findall(r"!\[[^\]]+\]\((classroom/\w+\.svg)\)", PAGE.read_text())
    assert sorted(shown) == sorted(
        f"classroom/{path.name}" for path in (PAGE.parent / "classroom").glob("*.svg")
    )
    assert set(shown) == {f"classroom/{name}.svg" for name in EXPERIMENTS if name != "pinning"}
    for name in shown:
        assert (PAGE.parent / name).stat().st_size < 60_000
