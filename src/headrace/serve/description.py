"""What a server says about the Loader that it computes: everything but the data and the functions themselves.

From it, a client knows the length of an epoch, the rows of each rank and the state at every step, without asking again.
Two servers with equal fingerprints give equal rows; where the fingerprints differ, `differences` says why.
"""

import dataclasses
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.format.checksum import checksum
from headrace.load.loader import Loader
from headrace.load.settings import LoaderSettings
from headrace.load.state import describe_stream
from headrace.order.mixture import Stages
from headrace.order.shuffle import Shuffle
from headrace.order.stream import RowStream
from headrace.rows.kernel import permute
from headrace.serve import code

VERSION = 1
MOST_BYTES = 64 * 2**20
_OWN = ("prefetch", "workers", "timeout_seconds")
"""Settings that change neither what a client gets nor in which order."""


class DamagedDescriptionError(HeadraceError, ValueError):
    pass


class Source(msgspec.Struct, frozen=True):
    name: str
    rows: int
    units: bytes | None = None
    """How many rows each unit has, if the order is by units: numbers of 8 bytes."""


class MapFunction(msgspec.Struct, frozen=True):
    """A function given to `map`."""

    name: str
    per: str
    parts: dict[str, str]


class Description(msgspec.Struct, frozen=True):
    version: int
    stream: dict[str, Any]
    """What a state says about the stream (`load/state.py`)."""
    sources: list[Source]
    stages: list[Any]
    stop: str
    rows_per_epoch: int
    settings: dict[str, Any]
    functions: list[MapFunction]
    stage: str
    row_bytes: int | None
    runs_user_code: bool
    known_by_content: bool

    @property
    def fingerprint(self) -> str:
        """The same for servers that give the same rows."""
        rows = {name: value for name, value in self.settings.items() if name not in _OWN}
        functions = [[each.name, each.per, each.parts] for each in self.functions]
        described = [self.version, self.stream, self.stages, self.rows_per_epoch, rows, functions]
        return checksum(json.dumps(described, sort_keys=True).encode())

    def units_of(self, source: Source) -> NDArray[np.int64] | None:
        if source.units is None:
            return None
        return np.frombuffer(source.units, dtype="<i8").astype(np.int64)

    def row_stream(self, stages: Stages | None = None) -> RowStream:
        """The stream of rows, without the rows: which row each position has, and in which lane."""
        return RowStream(
            rows=tuple(source.rows for source in self.sources),
            units=tuple(map(self.units_of, self.sources)),
            stages=Stages.from_json(self.stages) if stages is None else stages,
            shuffle=self.loader_settings().shuffle,
            seed=self.settings["seed"],
            permute=permute,
        )

    def loader_settings(self) -> LoaderSettings:
        return LoaderSettings(**{**self.settings, "shuffle": Shuffle(**self.settings["shuffle"])})


def describe(loader: Loader) -> Description:
    recipe = loader.rows.recipe
    stream = recipe.stream
    units = stream.units or (None,) * len(stream.rows)
    return Description(
        version=VERSION,
        stream=describe_stream(recipe),
        sources=[
            Source(name, rows, None if sizes is None else np.asarray(sizes).astype("<i8").tobytes())
            for name, rows, sizes in zip(recipe.names, stream.rows, units, strict=True)
        ],
        stages=recipe.stages.to_json_with_counts(),
        stop=str(recipe.stop),
        rows_per_epoch=recipe.rows_per_epoch,
        settings=plain_settings(loader.settings),
        functions=[
            MapFunction(transform.name, str(transform.per), code.describe_code(transform.function))
            for transform in recipe.transforms
        ],
        stage=recipe.stage,
        row_bytes=recipe.row_bytes,
        runs_user_code=recipe.runs_user_code,
        known_by_content=recipe.known_by_content,
    )


def plain_settings(settings: LoaderSettings) -> dict[str, Any]:
    """The settings as plain data."""
    named = {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}
    shuffle = {name: _plain(value) for name, value in dataclasses.asdict(settings.shuffle).items()}
    return {name: _plain(value) for name, value in named.items()} | {"shuffle": shuffle}


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def encode(description: Description) -> bytes:
    return msgspec.msgpack.encode(description)


def decode(sent: bytes) -> Description:
    """Checked in full, so that whatever uses it need not expect anything odd."""
    if len(sent) > MOST_BYTES:
        raise DamagedDescriptionError(f"a description of {len(sent):,} bytes")
    try:
        found = msgspec.msgpack.decode(sent, type=Description)
        if found.version != VERSION:
            raise DamagedDescriptionError(
                f"a server of version {found.version}, and this client knows version {VERSION}; install the same "
                "version of headrace on both"
            )
        found.loader_settings()
        stages = Stages.from_json(found.stages)
        _check_rows(found, stages)
    except DamagedDescriptionError:
        raise
    except (msgspec.MsgspecError, HeadraceError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise DamagedDescriptionError(
            f"what the server says about its data cannot be read: {error}"
        ) from None
    return found


def _check_rows(description: Description, stages: Stages) -> None:
    if not description.sources or stages.sources != len(description.sources):
        raise DamagedDescriptionError(f"{len(description.sources)} sources with weights for {stages.sources}")
    for source in description.sources:
        units = description.units_of(source)
        if not 0 < source.rows < 2**48 or (units is not None and int(units.sum()) != source.rows):
            raise DamagedDescriptionError(f"a source of {source.rows} rows, whose units have others")
    if not 0 < description.rows_per_epoch < 2**62:
        raise DamagedDescriptionError(f"an epoch of {description.rows_per_epoch} rows")


def differences(here: Description, there: Description) -> Iterator[str]:
    """Why two descriptions are not of the same rows, in words: `here` is what was expected."""
    if here.stream.get("data") != there.stream.get("data"):
        yield f"its data has the fingerprint {there.stream.get('data')} instead of {here.stream.get('data')}"
    names = sorted({*here.settings, *there.settings} - {*_OWN})
    for name in names:
        expected, found = here.settings.get(name), there.settings.get(name)
        if expected != found:
            yield f"{name} is {found!r} instead of {expected!r}"
    if here.stages != there.stages:
        yield "its mixture has other weights"
    yield from _other_functions(here, there)
    if here.rows_per_epoch != there.rows_per_epoch:
        yield f"its epoch has {there.rows_per_epoch:,} rows instead of {here.rows_per_epoch:,}"


def _other_functions(here: Description, there: Description) -> Iterator[str]:
    ours, theirs = ([(each.name, each.per) for each in each_one.functions] for each_one in (here, there))
    if ours != theirs:
        shown = [" -> ".join(f"{name} per {per}" for name, per in each) or "none" for each in (theirs, ours)]
        yield f"its functions are {shown[0]} instead of {shown[1]}"
        return
    for one, other in zip(here.functions, there.functions, strict=True):
        changed = code.differences(one.parts, other.parts)
        if changed:
            yield f"{one.name} has other code ({', '.join(changed[:5])})"
