"""What the servers of `serve.py` serve."""

import time
from typing import Any

import numpy as np

import headrace


class Blocks:
    """Records of one array each, which exists once."""

    def __init__(self, rows: int, size: int) -> None:
        self._rows, self._block = rows, np.random.default_rng(0).integers(0, 255, size).astype(np.uint8)
        self.fingerprint = f"blocks-{rows}-{size}"

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": self._block}


def ready(rows: int = 64, size: int = 2**19) -> headrace.Loader:
    """Batches that cost nothing but their copy."""
    return headrace.Loader(Blocks(rows, size), batch_size=1, shuffle=False)


def burn(batch: dict[str, Any]) -> dict[str, Any]:
    """10 ms of processor time."""
    begun = time.thread_time()
    while time.thread_time() - begun < 0.010:
        pass
    return batch


def burning() -> headrace.Loader:
    return headrace.Loader(Blocks(10_000, 2**17), batch_size=4, epochs=None).map(burn, per="batch")


def wait(batch: dict[str, Any]) -> dict[str, Any]:
    """100 ms, as for another service."""
    time.sleep(0.100)
    return batch


def waiting() -> headrace.Loader:
    return headrace.Loader(Blocks(10_000, 2**17), batch_size=4, epochs=None).map(wait, per="batch")
