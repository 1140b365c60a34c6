"""What the loop does with a batch: nothing, a pause as long as a training step, or the user's own step."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import SettingsError, TargetError
from headrace.load.batch import Batch
from headrace.load.target import import_function
from headrace.measure import clock


@dataclass(frozen=True, kw_only=True)
class Step:
    """`compute_ms`: how long an accelerator would compute while the processor is free. `name`: a module:function."""

    compute_ms: float | None = None
    name: str | None = None
    function: Callable[[Any], Any] | None = None
    """Given by Python code."""

    def __post_init__(self) -> None:
        if self.compute_ms is not None and (self.name or self.function):
            raise SettingsError(
                "compute_ms and step: give only one of them; a real step is measured, not simulated"
            )
        if self.compute_ms is not None and not 0 <= self.compute_ms < float("inf"):
            raise SettingsError(f"compute_ms={self.compute_ms}: must be a finite number, at least 0")

    @property
    def described(self) -> str:
        if self.compute_ms is not None:
            return f"simulated, {self.compute_ms:g} ms"
        if self.name:
            return self.name
        return getattr(self.function, "__qualname__", "a function") if self.function else "none"

    @property
    def nominal_seconds(self) -> float | None:
        """How long a simulated step should take; None for a real one, which is measured."""
        return None if self.is_real else (self.compute_ms or 0.0) / 1e3

    @property
    def is_real(self) -> bool:
        return self.function is not None or self.name is not None

    def start(self) -> Callable[[Any], None]:
        """The function that takes a batch; imports the user's step."""
        if not self.is_real:
            return _pause(self.compute_ms or 0.0)
        function = self.function or import_function(str(self.name))
        said = self.described

        def step(batch: Any) -> None:
            try:
                function(batch)
                _finish_on_device()
            except Exception as error:
                raise TargetError(f"the step {said} failed: {type(error).__name__}: {error}") from error

        return step

    def to_json(self) -> dict[str, Any]:
        return {"compute_ms": self.compute_ms, "name": self.name}


def _pause(milliseconds: float) -> Callable[[Any], None]:
    seconds = milliseconds / 1e3

    def step(batch: Any) -> None:
        if isinstance(batch, Batch):
            # A Loader makes only the fields that are used. Which ones a real step would use is unknown, so use all.
            for name in batch:
                batch[name]
        if seconds:
            clock.sleep(seconds)

    return step


def _finish_on_device() -> None:
    """Kernels run asynchronously: without this, a step would seem to take no time."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
