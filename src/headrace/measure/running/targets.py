"""What is measured: a dataset with loader settings, `module:function` that returns a loader, or servers.

    data                           headrace.Loader("data", **settings)
    s3://bucket/data               headrace.Loader("s3://bucket/data", **settings)
    train:make_loader              train.make_loader(**settings)
    grpc://cpu-1:9000              headrace.RemoteLoader("grpc://cpu-1:9000", **settings), see `servers.py`

A function is called with the settings that it has parameters for. If it has no parameter for a setting and returns a
PyTorch DataLoader, another DataLoader is made from the parts of that one. Anything else is an error: otherwise a
setting without any effect would seem to be measured.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, SettingsError, TargetError
from headrace.load.target import complete_settings, import_function, names_function, open_for, takes
from headrace.measure.running.rebuild import is_dataloader, rebuilt
from headrace.measure.running.servers import make_served_loader, names_servers, parse_servers
from headrace.measure.running.subset import first_share
from headrace.store.address import is_address, refuse_mistyped

_MORE = {"num_workers": "workers", "prefetch_factor": "prefetch"}
"""What PyTorch calls a Loader's settings."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """How to make a loader, as often as needed, with other settings each time."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    """Given by Python code: such a target can only be measured in this process."""

    @property
    def is_dataset(self) -> bool:
        return self.function is None and not names_function(self.name) and not self.is_served

    @property
    def is_served(self) -> bool:
        """Whether servers make the batches."""
        return self.function is None and names_servers(self.name)

    def make(self, **changes: Any) -> Any:
        """Make the loader. TargetError if the user's code fails, SettingsError if the target lacks a setting."""
        settings = {**self.settings, **changes}
        if self.is_served:
            return make_served_loader(self.name, _as_loader_settings(settings))
        if self.is_dataset:
            return make_dataset_loader(self.name, _as_loader_settings(settings))
        function = self.function or import_function(self.name)
        loader = _called(function, self.name, settings)
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise TargetError(
                f"{self.name} returned {type(loader).__name__}, which cannot be iterated over; it must return a loader"
            )
        return loader

    def files(self) -> list[Path]:
        """The files of a dataset's directory; for a function they are unknown, and remote data has none here."""
        if not self.is_dataset or is_address(self.name):
            return []
        path = Path(self.name)
        return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "settings": dict(self.settings)}


def find_target(name: str, settings: Mapping[str, Any]) -> Target:
    """Check what can be checked before anything is imported or read."""
    refuse_mistyped(name)
    if names_servers(name):
        parse_servers(name)
    elif not names_function(name) and not is_address(name) and not os.path.exists(name):
        raise TargetError(
            f"{name}: no such dataset; give the directory or the address of a dataset, a module:function that "
            "returns a loader (such as train:make_loader), or the addresses of servers (such as grpc://cpu-1:9000)"
        )
    return Target(name=name, settings=dict(settings))


def _as_loader_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {_MORE.get(name, name): value for name, value in settings.items()}


def _called(function: Callable[..., Any], name: str, settings: Mapping[str, Any]) -> Any:
    taken = {key: value for key, value in settings.items() if takes(function, key)}
    left = {key: value for key, value in settings.items() if key not in taken}
    try:
        loader = function(**taken)
    except HeadraceError:
        raise
    except Exception as error:
        raise TargetError(f"{name} failed: {type(error).__name__}: {error}") from error
    if not left:
        return loader
    if is_dataloader(loader):
        return rebuilt(loader, left)
    unknown = ", ".join(left)
    raise SettingsError(
        f"{unknown}: {name} has no such parameter, and does not return a PyTorch DataLoader, which could be made again "
        "with other settings; add the parameter to the function"
    )


def make_dataset_loader(path: str, settings: Mapping[str, Any]) -> Any:
    """A Loader over a dataset; with tensors if a device is given."""
    import headrace

    chosen = dict(settings)
    device = chosen.pop("device", None)
    share = chosen.pop("dataset_size", None)
    dataset = open_for(path, chosen)
    if share is not None:
        dataset = first_share(dataset, share)
    complete_settings(chosen, dataset)
    # A benchmark ends when it has measured enough.
    chosen.setdefault("epochs", None)
    if device is None:
        return headrace.Loader(dataset, **chosen)
    import headrace.torch

    return headrace.torch.Loader(dataset, device=device, **chosen)
