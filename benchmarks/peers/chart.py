"""Draws docs/peers.svg from results/peers.json and results/peers-remote.json: `python benchmarks/peers/chart.py`.

There is a panel for each question, and a bar for each peer. A peer that was measured with several numbers of workers is
shown with the better one, which its label names.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
HALO = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
"""Behind text, where a line passes through it."""
OURS, THEIRS, LIMIT, INK, FAINT = "#0b6bcb", "#a3abb5", "#c2410c", "#1f2328", "#59636e"
PANELS = {
    "tokens": (
        "Shuffled rows of 2,049 tokens, int64 tensors, 32 per batch",
        "million tokens per second",
        1e6,
    ),
    "packed": (
        "Documents packed into rows of 2,048",
        "million tokens per second, padding not counted",
        1e6,
    ),
    "images": ("JPEG files decoded and resized (2 cores)", "images per second", 1.0),
    "remote_tokens": (
        "Rows of 2,049 tokens read from S3, nothing cached",
        "million tokens per second",
        1e6,
    ),
    "remote_images": ("Images of 50 to 100 KB read from S3, not decoded", "images per second", 1.0),
}
BAR = 0.27
"""Inches of height for each bar."""
EDGE = 1.62
"""Where the text on the right ends, in widths of the longest bar."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    parser.add_argument("--remote", type=Path, default=ROOT / "benchmarks" / "results" / "peers-remote.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "peers.svg")
    options = parser.parse_args()
    # Reading from S3 is measured apart from the rest, and perhaps not yet.
    found = [path for path in (options.results, options.remote) if path.exists()]
    draw([json.loads(path.read_text()) for path in found], options.out)


def draw(measured: list[dict[str, Any]], out: Path) -> None:
    panels = [
        (name, bars(results[name]), limits(results[name]))
        for results in measured
        for name in PANELS
        if name in results
    ]
    heights = [BAR * (len(found) + 0.62 * len(edges)) + 0.5 for _, found, edges in panels]
    # Hashes and dates would make a new file of the same figures.
    settings = {"svg.hashsalt": "peers", "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(
            len(panels),
            figsize=(9, sum(heights) + 0.35),
            height_ratios=heights,
            facecolor="white",
            squeeze=False,
        )
        for (name, found, edges), axis in zip(panels, axes[:, 0], strict=True):
            _panel(axis, name, found, edges)
        caption = "\n".join(map(_caption, measured))
        figure.text(0.995, 0.004, caption, ha="right", va="bottom", fontsize=7, color=FAINT)
        figure.tight_layout(rect=(0, 0.01 + 0.01 * len(measured), 1, 1), h_pad=1.6)
        figure.savefig(
            out,
            facecolor="white",
            bbox_inches="tight",
            pad_inches=0.12,
            metadata={"Date": None} if out.suffix == ".svg" else None,
        )
        plt.close(figure)


def bars(answer: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The better of each peer's settings, the fastest first; limits are lines."""
    best: dict[str, tuple[str, dict[str, Any]]] = {}
    for label, figures in answer["peers"].items():
        peer, _, workers = label.rpartition(", ")
        key = peer if workers.endswith(" workers") else label
        if not figures["limit"] and (key not in best or rate(figures) > rate(best[key][1])):
            best[key] = (label, figures)
    return sorted(best.values(), key=lambda each: -rate(each[1]))


def limits(answer: dict[str, Any]) -> dict[str, float]:
    return {
        label.removeprefix("limit: "): rate(figures)
        for label, figures in answer["peers"].items()
        if figures["limit"]
    }


def rate(figures: dict[str, Any]) -> float:
    found: float = figures["tokens_per_second" if "tokens_per_second" in figures else "images_per_second"][
        "median"
    ]
    return found


def _panel(axis: Any, name: str, found: list[tuple[str, dict[str, Any]]], edges: dict[str, float]) -> None:
    title, unit, scale = PANELS[name]
    widest = max([rate(figures) for _, figures in found] + list(edges.values())) / scale
    for place, (label, figures) in enumerate(found):
        ours = label.startswith("Headrace")
        value = rate(figures) / scale
        axis.barh(place, value, height=0.72, color=OURS if ours else THEIRS)
        axis.text(
            value + widest * 0.008,
            place,
            _value(value),
            va="center",
            fontweight="bold" if ours else None,
            bbox=HALO,
        )
        axis.text(widest * EDGE, place, _aside(figures), va="center", ha="right", fontsize=8, color=FAINT)
    for line, (label, edge) in enumerate(sorted(edges.items(), key=lambda each: each[1])):
        axis.axvline(edge / scale, color=LIMIT, linestyle=(0, (4, 2)), linewidth=1.2)
        axis.text(
            edge / scale,
            len(found) - 0.45 + 0.62 * line,
            f"{label} {_value(edge / scale)} ",
            color=LIMIT,
            ha="right",
            va="top",
            fontsize=8,
            bbox=HALO,
        )
    axis.set_yticks(range(len(found)), [label for label, _ in found])
    for tick, (label, _) in zip(axis.get_yticklabels(), found, strict=True):
        tick.set_fontweight("bold" if label.startswith("Headrace") else "normal")
    axis.set_ylim(len(found) - 0.4 + 0.62 * len(edges), -0.6)
    axis.set_xlim(0, widest * (EDGE + 0.01))
    axis.set_title(f"{title}  ·  {unit}", loc="left", x=-0.46, fontsize=10, fontweight="bold")
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _value(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _aside(figures: dict[str, Any]) -> str:
    padding = figures["checked"].get("padding_percent")
    parts = [] if padding is None else [f"{padding:.2f} % padding"]
    parts.append(f"first batch {figures['first_batch_seconds']['median']:.1f} s")
    if "resume_seconds" in figures:
        parts.append(f"resume {figures['resume_seconds']['median']:.1f} s")
    return ",  ".join(parts)


def _caption(results: dict[str, Any]) -> str:
    machine = results["machine"]
    rounds = max(1, results["rounds"])
    quick = "a quick run: " if results["quick"] else ""
    if "network" in results:
        network = results["network"]
        latency, rate = 1000 * network["latency_seconds"], network["bytes_per_second"] / 1e6
        quick = f"S3 with {latency:.0f} ms a request and {rate:.0f} MB/s: {quick}"
    return (
        f"{quick}{machine['cores']} cores, {machine['cpu']}, Python {machine['python']}, {machine['date']}; median of "
        f"{rounds} round{'s' * (rounds > 1)}, each peer in a fresh process; the faster number of workers is shown"
    )


if __name__ == "__main__":
    main()
