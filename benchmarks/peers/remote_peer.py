"""What a peer that reads from a bucket is: how it is started, what it reads, and whether it can go on from a state."""

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer import version_of

BATCH_SIZE = 32
QUESTIONS = {"remote_tokens": "remote_token_peers", "remote_images": "remote_image_peers"}
"""The module with the peers of each question."""


@dataclass(frozen=True)
class Place:
    """Where a peer finds its data, and where it may keep what it has fetched."""

    address: str
    cache: Path

    @property
    def endpoint(self) -> str:
        return os.environ["AWS_ENDPOINT_URL"]

    @property
    def region(self) -> str:
        return os.environ["AWS_REGION"]


class Batches:
    """The batches of a loader, with its state if it has one. A batch is (32, 2049) tokens, or images and labels."""

    def __init__(self, loader: Any, take: Callable[[Any], Any]) -> None:
        self._loader, self._take = loader, take

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield self._take(batch)

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class RemotePeer:
    start: Callable[[Place, int], Any]
    """The place of the data and the number of workers -> `Batches`, or for a limit an iterator of counts."""
    reads: str
    """The folder of its format, which is uploaded."""
    needs: tuple[str, ...]
    """Packages as pip names them."""
    modules: tuple[str, ...]
    """What a script of its user imports."""
    write: Callable[[Path], None] | None = None
    """Writes the data in the peer's own format."""
    workers: tuple[int, ...] = (0, 2)
    """With which numbers of workers it is measured; a single number is not shown."""
    resumes: bool = True
    """Whether it has a state. If not, going on in the middle means reading what comes before."""
    note: str = ""
    quick: int | None = None
    """With how many workers it is part of a quick run, if it is."""
    limit: bool = False
    """No loader: what none can pass."""

    def missing(self) -> list[str]:
        return [package for package in self.needs if version_of(package) is None]


def remote_peers_of(question: str) -> dict[str, RemotePeer]:
    """The peers of a question. Their packages are imported when they are started."""
    found: dict[str, RemotePeer] = importlib.import_module(QUESTIONS[question]).PEERS
    return found


def storage_options(place: Place) -> dict[str, str]:
    """What litdata's documentation asks for, for a server that is not Amazon's."""
    return {
        "endpoint_url": place.endpoint,
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        "region_name": place.region,
    }


def allow_http() -> None:
    """litdata reads chunks with obstore, which refuses servers without TLS, and has no setting for that."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def forget_connections(dataset: Any) -> None:
    """MosaicML's workers inherit the connection over which the index came, and take each other's answers: in 4 of 11
    runs one of them waited for 60 seconds. A worker that has no connection makes one of its own."""
    for stream in dataset.streams:
        stream._downloader.clean_up()


def raw_counts(place: Place, field: str) -> Iterator[float]:
    """Requests for ranges of 4 MB, eight at a time, of the bytes that an epoch of a field needs.

    Each counts as its share of the epoch: the shares add up to 1.
    """
    from concurrent.futures import ThreadPoolExecutor

    from remote_data import ranges_of
    from remote_reads import AT_ONCE, RANGE_BYTES

    import headrace

    dataset = headrace.open(place.address)
    fetch = dataset.source.store.fetch
    ranges = list(ranges_of(dataset, RANGE_BYTES, field))
    whole = sum(stop - start for _, start, stop in ranges)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for count in threads.map(lambda each: len(fetch(*each)), ranges):
            yield count / whole
