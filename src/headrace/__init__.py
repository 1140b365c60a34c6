"""Headrace: raw data -> memory-mapped shards -> exactly resumable batches.

Names are imported on first use, so that `import headrace` is fast and loads no framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.dataset.arrays import from_arrays as from_arrays
    from headrace.dataset.copy import copy as copy
    from headrace.dataset.dataset import Dataset as Dataset
    from headrace.dataset.open import open_dataset as open
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.format.fields import Field as Field
    from headrace.format.ragged import Ragged as Ragged
    from headrace.format.verify import verify as verify
    from headrace.ingest.build import build as build
    from headrace.ingest.writer import Writer as Writer
    from headrace.load.batch import Batch as Batch
    from headrace.load.loader import Loader as Loader
    from headrace.measure.tuning.tune import tune as tune
    from headrace.measure.watching.monitor import monitor as monitor
    from headrace.measure.watching.trace import trace as trace
    from headrace.observe.advice import silence as silence
    from headrace.order.shuffle import Shuffle as Shuffle
    from headrace.rows.mix import mix as mix
    from headrace.serve.remote_loader import RemoteLoader as RemoteLoader
    from headrace.streams.open import stream as stream

__version__ = "0.1.0"

_HOMES = {
    "Batch": ("headrace.load.batch", "Batch"),
    "Dataset": ("headrace.dataset.dataset", "Dataset"),
    "Field": ("headrace.format.fields", "Field"),
    "Loader": ("headrace.load.loader", "Loader"),
    "HeadraceError": ("headrace.errors", "HeadraceError"),
    "Ragged": ("headrace.format.ragged", "Ragged"),
    "RemoteLoader": ("headrace.serve.remote_loader", "RemoteLoader"),
    "Shuffle": ("headrace.order.shuffle", "Shuffle"),
    "Writer": ("headrace.ingest.writer", "Writer"),
    "build": ("headrace.ingest.build", "build"),
    "copy": ("headrace.dataset.copy", "copy"),
    "from_arrays": ("headrace.dataset.arrays", "from_arrays"),
    "mix": ("headrace.rows.mix", "mix"),
    "monitor": ("headrace.measure.watching.monitor", "monitor"),
    "open": ("headrace.dataset.open", "open_dataset"),
    "trace": ("headrace.measure.watching.trace", "trace"),
    "tune": ("headrace.measure.tuning.tune", "tune"),
    "silence": ("headrace.observe.advice", "silence"),
    "stream": ("headrace.streams.open", "stream"),
    "verify": ("headrace.format.verify", "verify"),
}

__all__ = [
    "Batch",
    "Dataset",
    "Field",
    "HeadraceError",
    "Loader",
    "Ragged",
    "RemoteLoader",
    "Shuffle",
    "Writer",
    "build",
    "copy",
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
        # The import also sets the attribute.
        return importlib.import_module(f"headrace.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}{_hint(name)}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """What a user who misspelt a name may have meant."""
    if name.startswith("_"):
        # Other libraries look for such names.
        return ""
    import difflib  # only now: nobody should wait for it who makes no mistake

    public = {each.lower(): each for each in __all__}
    public |= {each.lower(): f"headrace.torch.{each}" for each in ("DataLoader", "RowDataset")}
    near = difflib.get_close_matches(name.lower(), public, 1)
    return f"; did you mean {public[near[0]]}?" if near else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
