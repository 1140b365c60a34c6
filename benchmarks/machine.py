"""What every benchmark shares: the machine's description, fair repetition, memory, and where results go.

A shared machine speeds up and slows down while one candidate runs. So candidates take turns, round after
round, and are compared by the median of the ratios within a round, not by figures from different minutes:

    round 1: a b c    round 2: b c a    round 3: c a b
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("headrace", "numpy", "pyarrow", "xxhash", "gigatoken", "tokenizers", "datasets")


def describe() -> dict[str, Any]:
    """Enough to judge the figures by; nothing that names this machine or its users."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_value(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def interleave(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each candidate's figures, one a round. Each round starts with another candidate."""
    names = list(candidates)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            figures[name].append(candidates[name]())
    return figures


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Seconds of several rounds: the middle one, the best, the worst, and all of them."""
    return {
        "median": statistics.median(seconds),
        "best": min(seconds),
        "worst": max(seconds),
        "rounds": [round(value, 6) for value in seconds],
    }


def ratio(of: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    """How many times `of` is `to`, round by round: a slow minute slows both and falls out."""
    each = [a / b for a, b in zip(of, to, strict=True)]
    return {"median": statistics.median(each), "lowest": min(each), "highest": max(each)}


def memory_of(pid: int | str = "self") -> dict[str, float]:
    """MB of one process. `uss` counts pages that no other process has mapped, `pss` adds a share of those
    that several have. Both count clean file pages, which the kernel drops when it wants; the `anonymous`
    ones it cannot drop."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kilobytes: dict[str, int] = {}
    for line in rollup.splitlines()[1:]:
        name, _, rest = line.partition(":")
        kilobytes[name] = int(rest.split()[0])
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    sizes = {"uss": private, "pss": kilobytes["Pss"], "anonymous": kilobytes["Anonymous"]}
    return {name: round(value * 1024 / 1e6, 1) for name, value in sizes.items()}


class PeakMemory:
    """The highest sum over a process and all its descendants, sampled while it runs."""

    def __init__(self, pid: int, seconds_between_samples: float = 0.1) -> None:
        self._pid, self._pause = pid, seconds_between_samples
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.mb: dict[str, float] = {"uss": 0.0, "pss": 0.0, "anonymous": 0.0}

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._pause):
            total = dict.fromkeys(self.mb, 0.0)
            for pid in _tree(self._pid):
                # A process may end between being listed and being read.
                with contextlib.suppress(OSError, KeyError):
                    for name, value in memory_of(pid).items():
                        total[name] += value
            self.mb = {name: round(max(self.mb[name], total[name]), 1) for name in total}


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def cpu_seconds() -> float:
    """Of this process, all below it, and those that have ended; to a hundredth of a second."""
    fields = (_stat(pid) for pid in _tree(os.getpid()))
    return sum(sum(each[11:15]) for each in fields) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_each() -> dict[int, float]:
    """Of this process and each below it by its id, without those that have ended."""
    ticks = {pid: sum(_stat(pid)[11:13]) for pid in _tree(os.getpid())}
    return {pid: each / os.sysconf("SC_CLK_TCK") for pid, each in ticks.items()}


def _stat(pid: int) -> list[int]:
    """What the kernel counts of a process; nothing if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    # The first is a letter: what the process is doing.
    return [0, *map(int, fields[1:])]


def processes_below(text: str) -> list[int]:
    """The processes below this one whose command line has a text in it."""
    found = []
    for pid in _tree(os.getpid()):
        # A process may end between being listed and being read.
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if text.encode() in words:
                found.append(pid)
    return found


def arguments(description: str, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that it works")
    parser.add_argument("--out", type=Path, help=f"where the JSON goes (results/{name}.json)")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files (the system's)")
    return parser


def write_results(options: argparse.Namespace, name: str, body: Mapping[str, Any]) -> None:
    path = options.out or RESULTS / f"{name}.json"
    if options.quick and not options.out:
        print("a quick run keeps no results without --out")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": name, "quick": options.quick, **body}, indent=1) + "\n")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [list(header), *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        first, *rest = [
            cell.ljust(w) if c == 0 else cell.rjust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join([first, *rest]))
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))


def _shown(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


if __name__ == "__main__":
    print(json.dumps(describe(), indent=1))
