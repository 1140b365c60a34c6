"""What was fetched of remote data, added up over the sources of a Loader.

A dataset counts what it reads, so Loaders that use the same `Dataset` at the same time count each other's reads too.
"""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from headrace.dataset.dataset import Dataset
from headrace.dataset.reads import FetchedReads
from headrace.dataset.units import UnitSource
from headrace.observe.stats import FetchStats


def fetched_from(sources: Sequence[Any]) -> FetchStats:
    """What this process has fetched of some data since it was opened."""
    fetched = FetchStats()
    for data in sources:
        if not isinstance(data, Dataset) or not isinstance(data.source, UnitSource):
            continue
        reads = data.source.reads
        if isinstance(reads, FetchedReads):
            fetched = fetched.plus(FetchStats(*astuple(reads.traffic)))
    return fetched
