"""What is measured: a dataset with loader settings, or `module:function` that returns a loader.

    data                           headrace.Loader("data", **settings)
    s3://bucket/data               headrace.Loader("s3://bucket/data", **settings)
    train:make_loader              train.make_loader(**settings)

A function is called with the settings that it has parameters for. If it has no parameter for a setting and returns a
PyTorch DataLoader, another DataLoader is made from the parts of that one. Anything else is an error: otherwise a
setting without any effect would seem to be measured.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.dataset.dataset import Dataset
from headrace.errors import HeadraceError, SettingsError, TargetError
from headrace.measure.running.rebuild import is_dataloader, rebuilt
from headrace.measure.running.subset import first_share
from headrace.order.shuffle import Shuffle, ShuffleKind
from headrace.store.address import is_address, refuse_mistyped

DEFAULT_BATCH_SIZE = 32
DEFAULT_SEQ_LEN = 2048
_OF_OPENING = ("dtype", "eos_id", "cache", "cache_bytes")
"""Settings of `headrace.open`."""
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
        return self.function is None and not _names_function(self.name)

    def make(self, **changes: Any) -> Any:
        """Make the loader. TargetError if the user's code fails, SettingsError if the target lacks a setting."""
        settings = {**self.settings, **changes}
        if self.is_dataset:
            return make_dataset_loader(self.name, settings)
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


def _names_function(name: str) -> bool:
    module, colon, function = name.rpartition(":")
    if is_address(name) or os.path.exists(name):
        return False
    return bool(colon) and bool(module) and function.isidentifier()


def find_target(name: str, settings: Mapping[str, Any]) -> Target:
    """Check what can be checked before anything is imported or read."""
    refuse_mistyped(name)
    if not _names_function(name) and not is_address(name) and not os.path.exists(name):
        raise TargetError(
            f"{name}: no such dataset; give the directory or the address of a dataset, or a module:function that "
            "returns a loader (such as train:make_loader)"
        )
    return Target(name=name, settings=dict(settings))


def import_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules in the working directory are found too."""
    module_name, _, attribute = name.rpartition(":")
    home = os.getcwd()
    if module_name.endswith(".py"):
        # The path of a script: worker processes find it as a module, by its name.
        home, module_name = os.path.dirname(os.path.abspath(module_name)), Path(module_name).stem
    if home not in sys.path:
        sys.path.insert(0, home)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TargetError(f"{name}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if function is None:
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise TargetError(
            f"{name}: {module_name} has no {attribute!r}; it has {', '.join(known) or 'no functions'}"
        )
    if not callable(function):
        raise TargetError(
            f"{name} is a {type(function).__name__}; give the name of a function that returns a loader"
        )
    called: Callable[..., Any] = function
    return called


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


def takes(function: Callable[..., Any], parameter: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        each.kind is each.VAR_KEYWORD or (each.name == parameter and each.kind is not each.POSITIONAL_ONLY)
        for each in parameters
    )


def make_dataset_loader(path: str, settings: Mapping[str, Any]) -> Any:
    """A Loader over a dataset; with tensors if a device is given."""
    import headrace

    chosen = {_MORE.get(name, name): value for name, value in settings.items()}
    device = chosen.pop("device", None)
    dataset = _open_dataset(path, chosen)
    _complete(chosen, dataset)
    if device is None:
        return headrace.Loader(dataset, **chosen)
    import headrace.torch

    return headrace.torch.Loader(dataset, device=device, **chosen)


def _open_dataset(path: str, chosen: dict[str, Any]) -> Dataset:
    """Takes the settings that are about opening out of `chosen`."""
    import headrace

    opening = {name: chosen.pop(name) for name in _OF_OPENING if chosen.get(name) is not None}
    share = chosen.pop("dataset_size", None)
    dataset = headrace.open(path, **opening)
    return dataset if share is None else first_share(dataset, share)


def _complete(chosen: dict[str, Any], dataset: Dataset) -> None:
    """Adds defaults, and turns what a command line or a DataLoader would say into a Loader's settings."""
    chosen.setdefault("batch_size", DEFAULT_BATCH_SIZE)
    # A benchmark ends when it has measured enough.
    chosen.setdefault("epochs", None)
    if chosen.get("workers") == 0:
        # As with a DataLoader, batches are made in the loop.
        chosen |= {"workers": 1, "prefetch": 0}
    if isinstance(chosen.get("fields"), str):
        # From the command line: --set fields=tokens,labels.
        chosen["fields"] = tuple(name.strip() for name in chosen["fields"].split(","))
    if "lanes" in chosen:
        # From the command line: --set lanes=64.
        lanes, kind = chosen.pop("lanes"), chosen.get("shuffle", ShuffleKind.UNITS)
        if kind != ShuffleKind.UNITS:
            raise SettingsError(
                f"lanes={lanes}: only applies to shuffle='units', not to {kind!r}; leave one out"
            )
        chosen["shuffle"] = Shuffle(kind=kind, lanes=lanes)
    token_field = chosen.get("token_field") or "tokens"
    if "seq_len" not in chosen and token_field in dataset.fields:
        chosen["seq_len"] = DEFAULT_SEQ_LEN
