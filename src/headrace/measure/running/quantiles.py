"""Many numbers summarised in a few: p50, p90, p99 and the maximum; and the spread of repeated runs."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np


def quantiles(values: Any) -> dict[str, float]:
    """Of measured times. Each is one of the values, without interpolation, even the p99 of a few."""
    if not len(values):
        return {}
    points = np.percentile(values, [50, 90, 99], method="higher")
    return {
        **{name: float(point) for name, point in zip(("p50", "p90", "p99"), points, strict=True)},
        "max": float(np.max(values)),
        "mean": float(np.mean(values)),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the lowest and the highest of several runs."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
