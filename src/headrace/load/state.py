"""A Loader's state: a position in the stream, and everything that determines the stream.

    {"headrace": 1, "position": 4096, "pass": 0, "data": "8f2a...", "seed": 0, "shuffle": "global",
     "seq_len": 2048, "packing": "best-fit", ...}

The pass follows from the position and is there for people to read; loading a state only checks that it is a number.
Rank, world size, batch size, workers and prefetch are left out, because they do not change the stream.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from headrace.errors import SettingsError, StateError
from headrace.order.mixture import Stages
from headrace.order.shuffle import Shuffle, ShuffleKind
from headrace.rows.recipe import Recipe
from headrace.rows.settings import PackWithin, RowSettings

VERSION = 1
_DIGITS = 8


@dataclass
class Place:
    """Where a Loader stands: the next row of the stream, over all ranks and epochs."""

    position: int
    loaded: bool = False
    """Whether it comes from a state, and no iteration has begun there yet."""


def describe_stream(recipe: Recipe) -> dict[str, Any]:
    """Everything in a state but the place. Equal descriptions mean equal streams."""
    shuffle = recipe.settings.shuffle
    described: dict[str, Any] = {
        "headrace": VERSION,
        "data": recipe.data_digest,
        "rows": sum(recipe.stream.rows),
        "seed": recipe.settings.seed,
        "shuffle": str(shuffle.kind),
        **recipe.settings.packing_settings,
    }
    if "token_field" in described:
        # Whether the user has named it or not.
        described["token_field"] = recipe.token_field
    if shuffle.kind is ShuffleKind.BLOCK:
        described |= {"block": shuffle.block, "window": shuffle.window}
    if shuffle.kind is ShuffleKind.UNITS:
        described |= {"lanes": shuffle.lanes, "units": recipe.stream.unit_count}
    if len(recipe.names) > 1:
        described["sources"] = "".join(each[:_DIGITS].ljust(_DIGITS) for each in recipe.fingerprints)
        described["mixture"] = recipe.stages.to_json()
    return described


_SHUFFLE_SIZES = ("block", "window", "lanes")


def chosen_in(settings: RowSettings) -> dict[str, Any]:
    """The settings that a Loader chooses by its data if the user does not."""
    return {"shuffle": settings.shuffle, "pack_within": settings.pack_within}


def choices_of(state: Any, given: RowSettings) -> dict[str, Any]:
    """What a state says about the settings that were left open. A damaged state says nothing; others check it."""
    choices: dict[str, Any] = {}
    if not isinstance(state, Mapping):
        return choices
    if given.shuffle.kind is ShuffleKind.AUTO and state.get("shuffle") in list(ShuffleKind):
        sizes = {name: state[name] for name in _SHUFFLE_SIZES if name in state}
        with contextlib.suppress(SettingsError):
            choices["shuffle"] = Shuffle(kind=state["shuffle"], **sizes)
    if given.pack_within is PackWithin.AUTO and given.seq_len is not None and given.group_shards is None:
        in_state = state.get("pack_within", PackWithin.DATASET)
        if in_state in list(PackWithin):
            choices["pack_within"] = PackWithin(in_state)
    return choices


def read_state(state: Any, recipe: Recipe) -> tuple[int, Stages]:
    """Check that a saved state belongs to this stream, and return its position and weights.

    `recipe` is what the Loader was created with; `reweighted` in a state holds weights that were changed later.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            f"state of type {type(state).__name__}: must be a dict from state_dict() of a Loader"
        )
    if "headrace" not in state:
        held = ", ".join(map(_short, list(state)[:5])) or "nothing"
        raise StateError(f"state that holds {held}: must be a dict from state_dict() of a Loader")
    if state["headrace"] != VERSION:
        raise StateError(f"state of version {state['headrace']!r}: this Headrace reads version {VERSION}")
    differences = list(_differences(state, recipe, describe_stream(recipe)))
    if differences:
        raise StateError(
            "this state belongs to another stream, so continuing from it would repeat or lose rows: "
            + "; ".join(differences)
        )
    position, passes = state.get("position"), state.get("pass")
    if not _is_count(position) or not _is_count(passes):
        raise StateError(
            f"state with position {_short(position)} and pass {_short(passes)}: must be whole numbers from 0 to 2^62"
        )
    stages = _read_weights(state["reweighted"], recipe) if "reweighted" in state else recipe.stages
    return position, stages


def _read_weights(value: Any, recipe: Recipe) -> Stages:
    try:
        stages = Stages.from_json(value)
    except SettingsError as error:
        raise StateError(f"state with damaged weights: {error}") from None
    if stages.sources != recipe.stages.sources or len(recipe.names) == 1:
        raise StateError(
            f"state with weights for {stages.sources} sources, but the data has {len(recipe.names)}"
        )
    return stages


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= 2**62


def _differences(state: Mapping[str, Any], recipe: Recipe, described: Mapping[str, Any]) -> Iterator[str]:
    changed = {name: value for name, value in described.items() if state.get(name) != value}
    if "sources" in changed:
        # The fingerprints of the single sources say more than the one of all data.
        changed.pop("data", None)
    if state.get("pack_within") != described.get("pack_within"):
        # How many units the rows have follows from it.
        changed.pop("units", None)
    for name, here in changed.items():
        saved = state.get(name)
        if name == "sources":
            yield from _changed_sources(saved, here, recipe)
        elif name == "mixture":
            yield (
                f"weights are {_short(here)} here and {_short(saved)} in the state (to change them from here on, "
                "create the Loader with the old weights, load the state and call reweight)"
            )
        elif name == "data":
            yield (
                f"the data has fingerprint {here} here and {saved} in the state: it was rebuilt, or it is other data"
            )
        elif name == "units":
            yield f"the rows are in {here!r} units here and in {saved!r} in the state"
        else:
            yield f"{name} is {here!r} here and {saved!r} in the state"
    for name in sorted(set(state) - set(described) - {"position", "pass", "reweighted"}, key=str):
        yield f"{name} is not set here and {_short(state[name])} in the state"


def _changed_sources(saved: Any, here: str, recipe: Recipe) -> Iterator[str]:
    if not isinstance(saved, str) or len(saved) != len(here):
        yield f"there are {len(recipe.names)} sources here and a different number in the state"
        return
    for number, name in enumerate(recipe.names):
        digits = slice(number * _DIGITS, (number + 1) * _DIGITS)
        if saved[digits] != here[digits]:
            yield f"source {name!r} has fingerprint {here[digits]}... here and {saved[digits]}... in the state"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
