"""The rows that servers make batches of, and what is done to a batch: the same for Headrace and for its peers.

A row is its number and an array of 128 KB, which exists once. The numbers ascend, so that the consumer can tell what is
missing, what comes twice, and what is out of order.
"""

import time
from typing import Any

import numpy as np

BATCH_SIZE = 4
ROW_BYTES = 2**17
BURN_SECONDS = 0.010
WAIT_SECONDS = 0.100
BLOCK = np.random.default_rng(0).integers(0, 255, ROW_BYTES).astype(np.uint8)


def make(numbers: Any) -> dict[str, Any]:
    """The batch of these rows."""
    return {"row": np.asarray(numbers, np.int64), "x": np.stack([BLOCK] * len(numbers))}


def burn(batch: dict[str, Any]) -> dict[str, Any]:
    """10 ms of processor time."""
    begun = time.thread_time()
    while time.thread_time() - begun < BURN_SECONDS:
        pass
    return batch


def wait(batch: dict[str, Any]) -> dict[str, Any]:
    """100 ms, as for another service."""
    time.sleep(WAIT_SECONDS)
    return batch
