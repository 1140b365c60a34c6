"""What the classroom experiments share: options, fair repetition, tables and plots. Run as a script, it runs them all.

    python examples/overlap.py --quick             # a few seconds: does it work?
    python examples/overlap.py                     # under a minute: prints a table, draws classroom/overlap.svg
    python examples/classroom.py --rounds 5        # all experiments; each figure is the median of five rounds

Tables are readable in the terminal and can be pasted into Markdown:

    | workers | theory, ms | torch, ms |
    | :------ | ---------: | --------: |
    | 0       |       65.0 |      65.4 |
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

EXPERIMENTS = (
    *("overlap", "workers", "handover", "mmap_or_ram", "reads"),
    *("padding", "pinning", "noisy_neighbour"),
)

BLUE, ORANGE, GREEN, GREY, RED, PALE = "#2563a8", "#d97706", "#2f855a", "#6b7280", "#b91c1c", "#e5e7eb"

_STYLE = {
    "svg.fonttype": "none",  # keep text as text: files stay small and searchable
    "svg.hashsalt": "classroom",  # the same plot gives the same file
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "legend.frameon": False,
    "lines.markersize": 4,
}

Key = TypeVar("Key", bound=Hashable)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="run for a few seconds, only to check that it works"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("classroom"), help="folder for the plot (default: classroom)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds, of which figures are medians (default: 1)"
    )
    parser.add_argument("--scratch", type=Path, help="folder for temporary files (default: the system's)")
    return parser


def medians(
    candidates: Mapping[Key, Callable[[], dict[str, float]]], rounds: int
) -> dict[Key, dict[str, float]]:
    """The median of each candidate's figures over all rounds.

    A shared machine has slow minutes, so the candidates take turns, and each round begins with a different one.
    """
    keys = list(candidates)
    runs: dict[Key, list[dict[str, float]]] = {key: [] for key in keys}
    for turn in range(rounds):
        shift = turn % len(keys)
        for key in keys[shift:] + keys[:shift]:
            runs[key].append(candidates[key]())
    return {
        key: {name: statistics.median(run[name] for run in each) for name in each[0]}
        for key, each in runs.items()
    }


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def need_linux(what: str) -> None:
    """Exit without an error on systems where the experiment has nothing to show."""
    if sys.platform != "linux":
        print(f"this experiment uses {what}, which only Linux has: nothing was measured")
        raise SystemExit(0)


def print_machine() -> None:
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    load = f"{os.getloadavg()[0]:.1f}"
    print(
        f"\n{cores()} cores, {system}, Python {platform.python_version()}, load average {load} at the start"
    )


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [list(header), *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(2, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    print(f"\n{title}\n")
    for row in [cells[0], rule, *cells[1:]]:
        first, *rest = row
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print(f"| {' | '.join(padded)} |")


def _shown(cell: Any) -> str:
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell)
    if abs(cell) >= 100 or cell == 0:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"


def save_plot(
    options: argparse.Namespace, name: str, size: tuple[float, float], paint: Callable[[Any], None]
) -> None:
    """Let `paint` draw on a figure of this size in inches, and write it to the folder given by --out."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print("\nno plot: matplotlib is not installed (pip install matplotlib)")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}.svg"
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.savefig(path, metadata={"Date": None})
    print(f"\nplot: {path}")


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    passed = ["--out", str(options.out), "--rounds", str(options.rounds)]
    passed += ["--quick"] if options.quick else []
    passed += ["--scratch", str(options.scratch)] if options.scratch else []
    for name in EXPERIMENTS:
        print(f"\n== {name} ==", flush=True)
        subprocess.run([sys.executable, Path(__file__).with_name(f"{name}.py"), *passed], check=True)


if __name__ == "__main__":
    main()
