"""Penstock: raw data -> memory-mapped shards -> exactly resumable batches.

Names are imported when they are first used, so that `import penstock` is quick and loads no framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dataset.arrays import from_arrays as from_arrays
    from penstock.dataset.dataset import Dataset as Dataset
    from penstock.dataset.open import open_dataset as open
    from penstock.errors import PenstockError as PenstockError
    from penstock.format.fields import Field as Field
    from penstock.format.ragged import Ragged as Ragged
    from penstock.format.verify import verify as verify
    from penstock.ingest.build import build as build
    from penstock.ingest.writer import Writer as Writer
    from penstock.load.advice import silence as silence
    from penstock.load.batch import Batch as Batch
    from penstock.load.loader import Loader as Loader
    from penstock.load.mix import mix as mix
    from penstock.measure.monitor import monitor as monitor
    from penstock.measure.trace import trace as trace
    from penstock.measure.tune import tune as tune
    from penstock.order.shuffle import Shuffle as Shuffle
    from penstock.streams.open import stream as stream

__version__ = "0.1.0"

_HOMES = {
    "Batch": ("penstock.load.batch", "Batch"),
    "Dataset": ("penstock.dataset.dataset", "Dataset"),
    "Field": ("penstock.format.fields", "Field"),
    "Loader": ("penstock.load.loader", "Loader"),
    "PenstockError": ("penstock.errors", "PenstockError"),
    "Ragged": ("penstock.format.ragged", "Ragged"),
    "Shuffle": ("penstock.order.shuffle", "Shuffle"),
    "Writer": ("penstock.ingest.writer", "Writer"),
    "build": ("penstock.ingest.build", "build"),
    "from_arrays": ("penstock.dataset.arrays", "from_arrays"),
    "mix": ("penstock.load.mix", "mix"),
    "monitor": ("penstock.measure.monitor", "monitor"),
    "open": ("penstock.dataset.open", "open_dataset"),
    "trace": ("penstock.measure.trace", "trace"),
    "tune": ("penstock.measure.tune", "tune"),
    "silence": ("penstock.load.advice", "silence"),
    "stream": ("penstock.streams.open", "stream"),
    "verify": ("penstock.format.verify", "verify"),
}

__all__ = [
    "Batch",
    "Dataset",
    "Field",
    "Loader",
    "PenstockError",
    "Ragged",
    "Shuffle",
    "Writer",
    "build",
    "from_arrays",
    "mix",
    "monitor",
    "open",
    "silence",
    "stream",
    "trace",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("torch", "jax"):
        # Importing it makes it an attribute too.
        return importlib.import_module(f"penstock.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
