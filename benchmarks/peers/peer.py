"""What a peer is: how it is started, what it needs, and what its user should know about the data it gives."""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Start = Callable[[Path, int, bool], Iterable[Any]]
"""Folder of the data, number of workers, and whether one epoch is wanted -> what can be iterated: without an end
where the peer can, else again for each epoch."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    start: Start
    needs: tuple[str, ...]
    """Packages as pip names them."""
    modules: tuple[str, ...]
    """What a script of its user imports."""
    workers: tuple[int, ...] = (0, 2)
    """With which numbers of workers it is measured; a single number is not shown."""
    prepare: Callable[[Path], None] | None = None
    """Writes the data in the peer's own format."""
    note: str = ""
    """What it does not deliver, or how it was set up, where that matters for the comparison."""
    permutes: bool = True
    """Whether one epoch should give every row once."""
    quick: int | None = None
    """With how many workers it is part of a quick run, if it is."""
    limit: bool = False
    """No loader: what none can pass."""

    def missing(self) -> list[str]:
        return [package for package in self.needs if version_of(package) is None]


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def peers_of(question: str) -> dict[str, Peer]:
    """The peers of 'tokens', 'packed' or 'images'. Their packages are imported when they are started."""
    module = importlib.import_module(
        {"tokens": "token_peers", "packed": "packed_peers", "images": "image_peers"}[question]
    )
    found: dict[str, Peer] = module.PEERS
    return found


def shown(name: str, peer: Any, workers: int) -> str:
    """The label of a peer, which has `workers`, with one number of them."""
    return name if len(peer.workers) == 1 else f"{name}, {workers} workers"
