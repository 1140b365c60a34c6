"""What trainers do with a loader that cannot be seen from the loader itself."""

import sys

_COUNT_BATCHES = ("pytorch_lightning", "lightning")
_OURS = "headrace"


def caller_counts_batches() -> bool:
    """Whether the code that called us is PyTorch Lightning.

    Lightning takes `len(loader)` batches and never asks for the one after the last, so it never sees an epoch end. When
    it loads a state that was saved after the last batch, it goes on with the next epoch. A loop that is written as
    `for batch in loader` would still be inside the old epoch, and nothing but the caller tells the two apart.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame.f_globals) == _OURS:
        frame = frame.f_back
    return _package_of(frame.f_globals) in _COUNT_BATCHES


def _package_of(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
