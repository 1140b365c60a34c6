"""The settings of a Loader, checked once."""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.checks import check_boolean, optional_number, whole_number
from headrace.errors import SettingsError
from headrace.load.world import WorldOptions
from headrace.rows.settings import RowOptions, RowSettings


class LoaderOptions(RowOptions, total=False):
    """The keyword arguments of a Loader, except those that say which rank it is."""

    batch_size: int
    epochs: int | None
    restart: bool
    drop_last: bool
    prefetch: int | None
    workers: int | None
    timeout_seconds: float
    cu_seqlens: str


class LoaderArguments(LoaderOptions, WorldOptions, total=False):
    """All keyword arguments of a Loader, for subclasses."""


_OF_FRAMEWORKS = {"device": "headrace.torch.Loader", "sharding": "headrace.jax.Loader"}
"""Settings that only the Loader of a framework has."""
_OF_OPENING = ("cache", "cache_bytes", "in_memory", "verify", "dtype", "eos_id")
"""Settings of `headrace.open`."""
_NUMBERS = {
    "batch_size": (1, False, ""),
    "epochs": (1, True, ""),
    "prefetch": (0, True, ""),
    "workers": (
        1,
        True,
        "; use None to find out how many threads help, or prefetch=0 to use none",
    ),
}


@dataclass(frozen=True, kw_only=True)
class LoaderSettings(RowSettings):
    """What determines the rows, and how they are loaded."""

    batch_size: int
    """Rows of a batch, for each rank."""
    epochs: int | None = 1
    """Epochs of one iteration; None never ends."""
    restart: bool = False
    """Whether every iteration starts at the beginning of the stream."""
    drop_last: bool = True
    prefetch: int | None = None
    """Batches that are kept ready; 0 creates each when it is asked for, None chooses by their size."""
    workers: int | None = None
    """Threads that create batches; None finds out how many help."""
    timeout_seconds: float = 600.0
    """How long one batch may take."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, (least, optional, hint) in _NUMBERS.items():
            check = optional_number if optional else whole_number
            put(self, name, check(name, getattr(self, name), least, hint))
        check_boolean("restart", self.restart)
        check_boolean("drop_last", self.drop_last)
        put(self, "timeout_seconds", _seconds(self.timeout_seconds))
        super().__post_init__()


def check_names(options: Iterable[str]) -> None:
    """SettingsError if a Loader has no setting of that name."""
    known = {each.name for each in dataclasses.fields(LoaderSettings)}
    for name in options:
        if name not in known:
            raise SettingsError(f"{name}: a Loader has no such setting; {_hint(name)}")


def parse_settings(options: dict[str, Any]) -> LoaderSettings:
    check_names(options)
    if "batch_size" not in options:
        raise SettingsError("batch_size is missing: say how many rows a batch has on each rank")
    return LoaderSettings(**options)


def _hint(name: str) -> str:
    """What a user who gave this name may have meant."""
    if name in _OF_OPENING:
        return f"give it to headrace.open, and the dataset to the Loader: headrace.open(..., {name}=...)"
    if name in _OF_FRAMEWORKS:
        return f"{_OF_FRAMEWORKS[name]} has it"
    known = sorted(LoaderArguments.__annotations__)
    near = difflib.get_close_matches(name, [*known, *_OF_FRAMEWORKS], 1)
    return f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SettingsError(f"timeout_seconds={value!r}: must be a number of seconds above 0")
    return float(value)
