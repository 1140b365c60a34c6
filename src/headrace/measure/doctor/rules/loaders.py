"""Which rules apply to a loader, whatever it is, and what else must be known of it to judge a measurement."""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.dataset.dataset import Dataset
from headrace.load.loader import Loader
from headrace.measure.running.rebuild import is_dataloader
from headrace.observe import host
from headrace.observe.advice import examine_loader
from headrace.observe.findings import NAMES, Finding, Level, NotLooked, Outcome, in_ram, some, streamed
from headrace.observe.held import HeldKind, attributes_of, held_by
from headrace.order.shuffle import ShuffleKind
from headrace.pack.packing import Packing
from headrace.streams.stream import Stream

_MOST_FILES = 10_000
_LONGEST_NAME = 1000


@dataclass(frozen=True)
class Facts:
    """Of a loader, for rules that judge what is measured."""

    files: tuple[str, ...] = ()
    random_order: bool = False
    packing: str | None = None
    accelerator: bool = False


def examine(loader: Any) -> dict[str, Outcome]:
    """Every rule that needs no measurement; those that mean nothing to this loader are left out."""
    ranks = host.local_ranks()
    if isinstance(loader, Loader):
        outcomes: dict[str, Outcome] = dict(examine_loader(loader))
    elif is_dataloader(loader):
        outcomes = _examine_dataloader(loader, ranks)
    elif type(loader) is Stream:
        outcomes = {"streamed": some(streamed(_stream_bytes(loader), ranks))}
    else:
        loaded = sum(each.bytes for each in held_by(loader) if each.kind is not HeldKind.MAP)
        outcomes = {"in-ram": some(in_ram(loaded, ranks))}
    sizes = outcomes.get("batch-size", ())
    if sizes and not isinstance(sizes, NotLooked) and not host.accelerator_available():
        outcomes["batch-size"] = [_as_note(each) for each in sizes]
    return {name: outcomes[name] for name in NAMES if name in outcomes}


def _as_note(finding: Finding) -> Finding:
    """It matters on an accelerator, which is not here."""
    return dataclasses.replace(finding, level=Level.NOTE)


def _examine_dataloader(loader: Any, ranks: int) -> dict[str, Outcome]:
    import torch.utils.data

    from headrace.torch.advice import examine_dataloader

    outcomes = examine_dataloader(loader)
    dataset = loader.dataset
    if isinstance(dataset, torch.utils.data.IterableDataset) and type(dataset) is not Stream:
        sizes = [os.path.getsize(path) for path in _named_files(dataset)]
        known = some(streamed(sum(sizes), ranks)) if sizes else NotLooked("nobody knows which files are read")
        outcomes["streamed"] = known
    return outcomes


def _stream_bytes(stream: Stream) -> int:
    return sum(file.bytes for file in stream._source.files)


def facts_of(loader: Any) -> Facts:
    accelerator = host.accelerator_available()
    if isinstance(loader, Loader):
        settings = loader.settings
        anywhere = settings.seq_len is not None and settings.packing is not Packing.WINDOWS
        scattered = anywhere and settings.group_shards is None
        return Facts(
            files=tuple(path for data in loader._recipe.data for path in _read_files(data)),
            random_order=scattered or settings.shuffle.kind is ShuffleKind.GLOBAL,
            packing=None if settings.seq_len is None else str(settings.packing),
            accelerator=accelerator,
        )
    if is_dataloader(loader):
        from headrace.torch.advice import takes_in_random_order

        files = tuple(_read_files(loader.dataset))
        return Facts(files=files, random_order=takes_in_random_order(loader), accelerator=accelerator)
    return Facts(accelerator=accelerator)


def _read_files(data: Any) -> list[str]:
    """Those that an epoch reads; none of data that is in memory."""
    if isinstance(data, Dataset):
        data = data.source
        if getattr(data, "_in_memory", False):
            return []
    inner = getattr(data, "dataset", None)
    own = _named_files(data)
    return own if own or inner is None else _read_files(inner)


def _named_files(thing: Any) -> list[str]:
    """Files that attributes name: as paths, in lists or tuples of paths, as folders, or behind memory maps."""
    found: dict[str, None] = {}
    for value in attributes_of(thing).values():
        for path in itertools.islice(_paths(value, 2), _MOST_FILES):
            found[path] = None
    return list(found)[:_MOST_FILES]


def _paths(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, list | tuple) and depth:
        for each in value:
            yield from _paths(each, depth - 1)
        return
    if not isinstance(value, str | Path):
        value = getattr(value, "filename", None)
    if not isinstance(value, str | Path) or not 0 < len(str(value)) < _LONGEST_NAME or "\0" in str(value):
        return
    path = Path(value)
    if path.is_file():
        yield str(path.absolute())
    elif path.is_dir() and path.resolve() not in (Path.cwd(), Path.home(), Path("/")):
        yield from (str(each.absolute()) for each in path.rglob("*") if each.is_file())
