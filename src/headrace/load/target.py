"""How a name becomes a Loader: that of a dataset, or `module:function` of a function that returns one.

data                           headrace.Loader("data", **settings)
s3://bucket/data               headrace.Loader("s3://bucket/data", **settings)
train:make_loader              train.make_loader(**settings)
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.dataset.dataset import Dataset
from headrace.dataset.open import open_dataset
from headrace.errors import HeadraceError, SettingsError, TargetError
from headrace.load.loader import Loader
from headrace.order.shuffle import Shuffle, ShuffleKind
from headrace.store.address import is_address, refuse_mistyped

DEFAULT_BATCH_SIZE = 32
DEFAULT_SEQ_LEN = 2048
_OF_OPENING = ("dtype", "eos_id", "cache", "cache_bytes")
"""Settings of `headrace.open`."""


def names_function(name: str) -> bool:
    module, colon, function = name.rpartition(":")
    if is_address(name) or os.path.exists(name):
        return False
    return bool(colon) and bool(module) and function.isidentifier()


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
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise _cannot_import(name, module_name, error) from error
        raise TargetError(
            f"{name}: there is no module {module_name!r} in {home}, and none is installed{_near(module_name, home)}"
        ) from None
    except Exception as error:
        raise _cannot_import(name, module_name, error) from error
    function = getattr(module, attribute, None)
    if function is None:
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise TargetError(
            f"{name}: {module_name} has no {attribute!r}; it has {', '.join(known) or 'no functions'}"
        )
    if not callable(function):
        raise TargetError(
            f"{name} is of the type {type(function).__name__}; give the name of a function that returns a loader"
        )
    called: Callable[..., Any] = function
    return called


def _cannot_import(name: str, module: str, error: Exception) -> TargetError:
    return TargetError(f"{name}: cannot import {module}: {type(error).__name__}: {error}")


def _near(module: str, home: str) -> str:
    """A module of a similar name, as a question."""
    import difflib  # only now: nobody should wait for it who makes no mistake

    known = [path.stem for path in Path(home).glob("*.py")]
    near = difflib.get_close_matches(module, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def takes(function: Callable[..., Any], parameter: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        each.kind is each.VAR_KEYWORD or (each.name == parameter and each.kind is not each.POSITIONAL_ONLY)
        for each in parameters
    )


def make_loader(name: str, settings: Mapping[str, Any]) -> Loader:
    """The Loader of a dataset, or the one that a function returns."""
    if not names_function(name):
        refuse_mistyped(name)
        if not is_address(name) and not os.path.exists(name):
            raise TargetError(
                f"{name}: no such dataset; give the directory or the address of a dataset, or a module:function that "
                "returns a Loader (such as train:make_loader)"
            )
        chosen = dict(settings)
        dataset = open_for(name, chosen)
        complete_settings(chosen, dataset)
        return Loader(dataset, **chosen)
    function = import_function(name)
    for setting in settings:
        if not takes(function, setting):
            raise SettingsError(f"{setting}: {name} has no such parameter; add it to the function")
    try:
        loader = function(**settings)
    except HeadraceError:
        raise
    except Exception as error:
        raise TargetError(f"{name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(loader, Loader):
        raise TargetError(f"{name} returned {type(loader).__name__}; it must return a headrace.Loader")
    return loader


def open_for(path: str, chosen: dict[str, Any]) -> Dataset:
    """Takes the settings that are about opening out of `chosen`."""
    opening = {name: chosen.pop(name) for name in _OF_OPENING if chosen.get(name) is not None}
    return open_dataset(path, **opening)


def complete_settings(chosen: dict[str, Any], dataset: Dataset) -> None:
    """Adds defaults, and turns what a command line or a DataLoader would say into a Loader's settings."""
    chosen.setdefault("batch_size", DEFAULT_BATCH_SIZE)
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
