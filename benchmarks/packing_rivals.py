"""Packers for `packing.py`; each runs in a process of its own, as `python packing_rivals.py NAME LENGTHS.npy SEQ_LEN`.

All get the same lengths, none longer than a row, and must say which documents make each row. Those that pack
tokens and not lengths get tokens of one byte, the least they can be asked to move. Imports and, for numba,
compiling are not counted.
"""

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from machine import memory_of

Packer = Callable[[Any, int], tuple[float, int]]
"""Lengths and seq_len -> seconds and rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(PACKERS))
    parser.add_argument("lengths")
    parser.add_argument("seq_len", type=int)
    options = parser.parse_args()
    lengths, before = np.load(options.lengths), memory_of()
    seconds, rows = PACKERS[options.name].pack(lengths, options.seq_len)
    after = memory_of()
    report = {
        "pieces": len(lengths),
        "seconds": seconds,
        "rows": rows,
        "efficiency": int(lengths.sum()) / (rows * options.seq_len),
        "memory_mb": {"before": before["uss"], "after": after["uss"]},
    }
    print(json.dumps(report))


def headrace_plan(lengths: Any, seq_len: int) -> tuple[float, int]:
    """The histogram and the plan, from which any row can be asked for."""
    from headrace.pack.best_fit import plan_best_fit

    started = time.perf_counter()
    plan = plan_best_fit(*np.unique(lengths, return_counts=True), seq_len)
    return time.perf_counter() - started, plan.rows


def headrace_rows(lengths: Any, seq_len: int) -> tuple[float, int]:
    """The plan and then every document of every row, in batches of 1,024 rows."""
    from headrace.pack.best_fit import plan_best_fit

    started = time.perf_counter()
    distinct, counts = np.unique(lengths, return_counts=True)
    starts = np.cumsum(counts) - counts
    order = np.argsort(lengths, kind="stable")
    plan = plan_best_fit(distinct, counts, seq_len)
    seen = 0
    for first in range(0, plan.rows, 1024):
        packed = plan.documents_of(np.arange(first, min(first + 1024, plan.rows)))
        seen += len(order[starts[np.searchsorted(distinct, packed.length)] + packed.position])
    seconds = time.perf_counter() - started
    if seen != len(lengths):
        raise SystemExit(f"{seen:,} documents in the rows, {len(lengths):,} were given")
    return seconds, plan.rows


def trl_whole(lengths: Any, seq_len: int) -> tuple[float, int]:
    return _trl(lengths, seq_len, len(lengths))


def trl_default(lengths: Any, seq_len: int) -> tuple[float, int]:
    return _trl(lengths, seq_len, 1000)


def _trl(lengths: Any, seq_len: int, at_once: int) -> tuple[float, int]:
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1], np.uint8)))
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))
    started = time.perf_counter()
    packed = pack_dataset(dataset, seq_len, strategy="bfd", map_kwargs={"batch_size": at_once})
    return time.perf_counter() - started, len(packed)


class _Zeros:
    """Documents of the given lengths for grain."""

    def __init__(self, lengths: Any) -> None:
        self._lengths, self._zeros = lengths, np.zeros(int(lengths.max()), np.uint8)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, document: int) -> Any:
        return {"tokens": self._zeros[: self._lengths[document]]}


def grain_best_fit(lengths: Any, seq_len: int) -> tuple[float, int]:
    import grain
    from grain.experimental import BestFitPackIterDataset

    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    documents = grain.MapDataset.source(_Zeros(lengths)).to_iter_dataset(reading)
    packed = BestFitPackIterDataset(documents, length_struct={"tokens": seq_len}, num_packing_bins=128)
    started = time.perf_counter()
    rows = sum(1 for _ in packed)
    return time.perf_counter() - started, rows


def axolotl_multipack(lengths: Any, seq_len: int) -> tuple[float, int]:
    """Its sampler's packer with the sizes it has by default, on all cores."""
    from axolotl.utils.samplers.multipack import pack_parallel

    settings: dict[str, Any] = {"bin_capacity": seq_len, "group_size": 100_000, "bin_size": 200}
    lengths = lengths.astype(np.int32)
    pack_parallel(lengths[:100], num_processes=1, **settings)
    started = time.perf_counter()
    bins = pack_parallel(lengths, **settings)
    return time.perf_counter() - started, len(bins)


def prtpy_decreasing(lengths: Any, seq_len: int) -> tuple[float, int]:
    import prtpy

    algorithm = prtpy.packing.first_fit_decreasing
    started = time.perf_counter()
    bins = prtpy.pack(algorithm=algorithm, binsize=seq_len, items=dict(enumerate(lengths.tolist())))
    return time.perf_counter() - started, len(bins)


def binpacking_volume(lengths: Any, seq_len: int) -> tuple[float, int]:
    import binpacking

    started = time.perf_counter()
    bins = binpacking.to_constant_volume(dict(enumerate(lengths.tolist())), seq_len)
    return time.perf_counter() - started, len(bins)


@dataclass(frozen=True, kw_only=True)
class Rival:
    label: str
    needs: tuple[str, ...]
    pack: Packer
    most_documents: int
    """More would take minutes: grain needs about 0.1 ms a document, others the square of their number."""


PACKERS = {
    "headrace-plan": Rival(
        label="headrace, plan", needs=("headrace",), pack=headrace_plan, most_documents=10**9
    ),
    "headrace-rows": Rival(
        label="headrace, plan and all rows", needs=("headrace",), pack=headrace_rows, most_documents=10**9
    ),
    "trl": Rival(
        label="TRL best fit, all at once",
        needs=("trl", "datasets"),
        pack=trl_whole,
        most_documents=1_000_000,
    ),
    "trl-default": Rival(
        label="TRL best fit, 1,000 at once (default)",
        needs=("trl", "datasets"),
        pack=trl_default,
        most_documents=1_000_000,
    ),
    "axolotl": Rival(
        label="axolotl multipack",
        needs=("axolotl", "numba"),
        pack=axolotl_multipack,
        most_documents=1_000_000,
    ),
    "grain": Rival(
        label="grain best fit, 128 rows open", needs=("grain",), pack=grain_best_fit, most_documents=100_000
    ),
    "prtpy": Rival(
        label="prtpy first fit decreasing", needs=("prtpy",), pack=prtpy_decreasing, most_documents=10_000
    ),
    "binpacking": Rival(
        label="binpacking to_constant_volume",
        needs=("binpacking",),
        pack=binpacking_volume,
        most_documents=10_000,
    ),
}


def versions_of(rival: Rival) -> dict[str, str] | None:
    """Versions of what it needs, or None if something is not installed."""
    try:
        return {package: importlib.metadata.version(package) for package in rival.needs}
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
