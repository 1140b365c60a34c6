"""What can be known about a loader of any kind without running it."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.dataset.dataset import Dataset
from headrace.load.loader import Loader
from headrace.measure.doctor.reads import UNKNOWN_FILES
from headrace.measure.running.rebuild import is_dataloader
from headrace.observe.advice import facts_of_loader
from headrace.observe.data_in_memory import DataKind, attributes_of, data_in_memory
from headrace.observe.facts import Facts
from headrace.streams.stream import Stream

_MOST_FILES = 10_000
_LONGEST_NAME = 1000


def facts_of(loader: Any) -> Facts:
    if isinstance(loader, Loader):
        files = [path for data in loader.rows.recipe.data for path in _read_files(data)]
        return replace(facts_of_loader(loader), files=files)
    if is_dataloader(loader):
        return _facts_of_dataloader(loader)
    if type(loader) is Stream:
        return Facts(streamed_bytes=sum(file.bytes for file in loader.inputs.files))
    loaded = sum(each.bytes for each in data_in_memory(loader) if each.kind is not DataKind.MAP)
    return Facts(loaded_bytes=loaded)


def _facts_of_dataloader(loader: Any) -> Facts:
    import torch.utils.data

    from headrace.torch.advice import facts_of_dataloader

    facts = replace(facts_of_dataloader(loader), files=_read_files(loader.dataset))
    dataset = loader.dataset
    if isinstance(dataset, torch.utils.data.IterableDataset) and type(dataset) is not Stream:
        sizes = [os.path.getsize(path) for path in _named_files(dataset)]
        facts = replace(facts, streamed_bytes=sum(sizes) if sizes else UNKNOWN_FILES)
    return facts


def _read_files(data: Any) -> list[str]:
    """The files that an epoch reads; none if the data is in memory."""
    if isinstance(data, Dataset):
        data = data.source
        if getattr(data, "in_memory", False):
            return []
    inner = getattr(data, "dataset", None)
    own = _named_files(data)
    return own if own or inner is None else _read_files(inner)


def _named_files(thing: Any) -> list[str]:
    """The files that attributes name: as paths, in lists or tuples of paths, as folders, or behind memory maps."""
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
    path = _path_of(value)
    if path is None:
        return
    if path.is_file():
        yield str(path.absolute())
    elif path.is_dir() and path.resolve() not in (Path.cwd(), Path.home(), Path("/")):
        for inside in path.rglob("*"):
            if inside.is_file():
                yield str(inside.absolute())


def _path_of(value: Any) -> Path | None:
    """A text or path, or the file behind a memory map, if it could be the name of a file."""
    name = value if isinstance(value, str | Path) else getattr(value, "filename", None)
    if not isinstance(name, str | Path):
        return None
    text = str(name)
    can_be_name = 0 < len(text) < _LONGEST_NAME and "\0" not in text
    return Path(name) if can_be_name else None
