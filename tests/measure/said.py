"""What the tests of watched loops share."""

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import headrace
from headrace.measure.watching import monitor as monitor_module
from headrace.measure.watching.monitor import monitor

DEADLINE_SECONDS = 100.0

Said = Callable[[], str]
"""All that was written to standard error so far."""


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def small_loader(**options: Any) -> headrace.Loader:
    """16 batches of 4 rows."""
    data = headrace.from_arrays({"x": np.arange(640.0).reshape(64, 10)})
    return headrace.Loader(data, batch_size=4, **options)


def check_lines(loader: Any, making: set[str], said: Said) -> None:
    """Two epochs of 16 batches are told in lines, with the stages that make them, and in a summary."""
    with monitor(loader, every_seconds=monitor_module._LEAST_SECONDS) as watched:
        assert len(watched) == 16
        for _ in range(2):
            assert len([batch for batch in watched]) == 16  # noqa: C416 - the loop of a script
        wait_for(lambda: ", 32 batches in" in said())
    lines = said().splitlines()
    assert watched.stats().batches == 32
    assert set(watched.stats().stages) == {"start", "wait", "step"} | making
    assert re.match(
        rf"headrace: {type(loader).__name__}, (1 batch|\d+ batches) in [\d.]+ s, [\d.,]+ batches/s", lines[0]
    )
    assert all(f" {stage} " in lines[-2] for stage in ("wait", "step", *making))
    assert re.match(r"headrace: 32 batches in [\d.]+ s, [\d.,]+/s: the loop waits \d+%", lines[-1])
