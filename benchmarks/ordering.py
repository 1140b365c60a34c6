"""Which by-length ordering: one a shard with a table of stretches, or one of the whole dataset?

For each size, the shards' index files are written with the library's own container writer (offsets, and for
(a) the shard's ordering and histogram), then:

(a) stretches   every shard has its ordering; at the end of a build a table joins them (`stretches.py`)
(b) whole       at the end of a build all documents are sorted by length into one ordering: what the format does

Compared: bytes on disk, time and memory at the end of a build, a warm lookup of 4,096 (length, j) pairs, and
what one added shard costs. For (b) the cheapest fair way is taken each time: 4-byte record numbers while they
fit, a counting sort shard by shard into a mapped file, and an added shard merged into the old ordering length
by length.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from machine import arguments, describe, interleave, print_table, spread, write_results
from stretches import by_length, merge_stretches

from headrace.format.container import Chunks, parse_head, write_container
from headrace.format.index import fill_order, merge_histograms, number_dtype
from headrace.store.local import LocalStore
from headrace.store.maps import map_bytes

LOOKUPS = 4096
SIZES = ((100_000_000, 1000), (100_000_000, 10_000), (1_000_000_000, 10_000))
QUICK_SIZES = ((50_000, 20),)
Histogram = tuple[Any, Any]


def main() -> None:
    parser = arguments(__doc__ or "", "ordering")
    parser.add_argument("--size", type=int, nargs=2, action="append", metavar=("DOCUMENTS", "SHARDS"))
    parser.add_argument("--rounds", type=int, help="rounds of lookups (15)")
    parser.add_argument("--child", nargs=2, metavar=("STAGE", "PATH"), help="used by the benchmark itself")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_child(*options.child)))
        return
    sizes = options.size or (QUICK_SIZES if options.quick else SIZES)
    rounds = options.rounds or (3 if options.quick else 15)
    machine = describe()
    measured = []
    for documents, shards in sizes:
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            measured.append(_measure(Path(folder), documents, shards, rounds))
        _show(measured[-1])
    write_results(options, "ordering", {"machine": machine, "sizes": measured})


def web_like_lengths(count: int, seed: int) -> Any:
    """Tokens of web pages: a median of 500, a mean of about 1,000, a tail to a million."""
    draws = np.random.default_rng(seed).lognormal(6.2, 1.15, count)
    return np.clip(draws, 1, 1e6).astype(np.int64)


def _measure(folder: Path, documents: int, shards: int, rounds: int) -> dict[str, Any]:
    setup = _write_shards(folder, documents, shards)
    stages = {
        stage: _run_child(stage, folder) for stage in ("stretches", "whole", "stretches-add", "whole-add")
    }
    if documents <= 1_000_000:
        _check_added(folder)
    table_bytes, whole_bytes = stages["stretches"]["bytes"], stages["whole"]["bytes"]
    lookups = _lookups(folder, rounds)
    return {
        "documents": documents,
        "shards": shards,
        "distinct_lengths": stages["stretches"]["distinct_lengths"],
        "stretches": stages["stretches"]["stretches"],
        "ordering_all_shards_seconds": setup,
        "a_stretches": {
            "bytes_in_shards": 4 * documents + stages["stretches"]["histogram_bytes"],
            "bytes_of_table": table_bytes,
            "bytes": 4 * documents + stages["stretches"]["histogram_bytes"] + table_bytes,
            "end_of_build": _cost(stages["stretches"]),
            "added_shard": _cost(stages["stretches-add"]),
            "lookup_of_4096_seconds": spread(lookups["a"]),
            "lookup_and_offsets_seconds": spread(lookups["a with offsets"]),
        },
        "b_whole": {
            "bytes": whole_bytes,
            "bytes_with_8_byte_numbers": 8 * documents + whole_bytes - 4 * documents,
            "end_of_build": _cost(stages["whole"]),
            "added_shard": _cost(stages["whole-add"]),
            "lookup_of_4096_seconds": spread(lookups["b"]),
            "lookup_and_offsets_seconds": spread(lookups["b with offsets"]),
        },
    }


def _cost(stage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "seconds": stage["seconds"],
        "read_and_merge_seconds": stage["merge_seconds"],
        "bytes_written": stage["bytes"],
        "peak_anonymous_mb": stage["peak_anonymous_mb"],
    }


def _write_shards(folder: Path, documents: int, shards: int) -> float:
    """Index files of all shards and of one more, to be added; gives the time that their orderings took."""
    seconds = 0.0
    for number in range(shards + 1):
        lengths = web_like_lengths(documents // shards, number)
        offsets = np.zeros(len(lengths) + 1, "<u8")
        np.cumsum(lengths, out=offsets[1:], dtype=offsets.dtype)
        started = time.perf_counter()
        parts = by_length(lengths)
        seconds += time.perf_counter() - started
        sections = {name: Chunks.of(array) for name, array in {"offsets": offsets, **parts}.items()}
        write_container(LocalStore(folder), f"shard-{number:05d}", "shard", {}, sections)
    return seconds


class _Shards:
    """The shards' arrays, each mapped as a reader would map it."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("shard-*.hdrc"))

    def arrays(self, number: int) -> dict[str, Any]:
        buffer = map_bytes(self.paths[number])
        room = int.from_bytes(buffer[12:16].tobytes(), "little")
        header = parse_head(buffer[: 64 + room].tobytes(), len(buffer), "shard")
        return {name: section.view(buffer) for name, section in header.sections.items()}

    def histograms(self, count: int) -> list[Histogram]:
        found = (self.arrays(number) for number in range(count))
        return [(arrays["lengths"].copy(), arrays["counts"].copy()) for arrays in found]


def _child(stage: str, path: str) -> dict[str, Any]:
    """One stage in a process of its own, so that its memory is its own."""
    folder = Path(path)
    shards = _Shards(folder)
    before = len(shards.paths) - 1
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "stretches": lambda: _make_stretches(folder, shards, before),
        "stretches-add": lambda: _make_stretches(folder, shards, before + 1),
        "whole": lambda: _make_whole(folder, shards, before),
        "whole-add": lambda: _add_to_whole(folder, shards, before),
    }
    with _PeakAnonymous() as peak:
        started = time.perf_counter()
        made = stages[stage]()
        made["seconds"] = time.perf_counter() - started
    return {**made, "peak_anonymous_mb": peak.mb}


def _make_stretches(folder: Path, shards: _Shards, count: int) -> dict[str, Any]:
    started = time.perf_counter()
    histograms = shards.histograms(count)
    table = merge_stretches(histograms)
    merged = time.perf_counter() - started
    stored = write_container(
        LocalStore(folder), "stretches", "index", {}, {k: Chunks.of(v) for k, v in table.items()}
    )
    return {
        "bytes": stored.bytes,
        "merge_seconds": merged,
        "distinct_lengths": len(table["lengths"]),
        "stretches": len(table["first"]),
        "histogram_bytes": sum(8 * len(lengths) for lengths, _ in histograms),
    }


def _make_whole(folder: Path, shards: _Shards, count: int) -> dict[str, Any]:
    """What the format does: a counting sort, shard by shard, into an array on disk."""
    started = time.perf_counter()
    lengths, starts = merge_histograms(
        (arrays["lengths"], arrays["counts"]) for arrays in map(shards.arrays, range(count))
    )
    records = int(starts[-1])
    whole = np.lib.format.open_memmap(
        folder / "whole.npy", "w+", dtype=number_dtype(records), shape=(records,)
    )
    of_shards = (np.diff(shards.arrays(number)["offsets"]).astype(np.int64) for number in range(count))
    fill_order(whole, lengths, starts, of_shards)
    merged = time.perf_counter() - started
    whole.flush()
    np.savez(folder / "whole-lengths.npz", lengths=lengths, starts=starts.astype(np.int64))
    return {"bytes": whole.nbytes + lengths.nbytes + starts.nbytes, "merge_seconds": merged}


def _add_to_whole(folder: Path, shards: _Shards, number: int) -> dict[str, Any]:
    """Every place behind the first added document moves: copy the old ordering, length by length."""
    started = time.perf_counter()
    old = np.asarray(np.load(folder / "whole.npy", mmap_mode="r"))
    with np.load(folder / "whole-lengths.npz") as known:
        lengths, starts = known["lengths"].tolist(), known["starts"].tolist()
    arrays = shards.arrays(number)
    added, begin = arrays["order"] + len(old), 0
    records = len(old) + len(added)
    new = np.lib.format.open_memmap(folder / "new.npy", "w+", dtype=number_dtype(records), shape=(records,))
    target, source = np.asarray(new), 0
    ends = dict(zip(lengths, starts[1:], strict=True))
    for length, count in zip(arrays["lengths"].tolist(), arrays["counts"].tolist(), strict=True):
        # All old documents up to this length, then the added ones of this length.
        place = ends.get(length)
        if place is None:
            place = starts[int(np.searchsorted(lengths, length))]
        target[source + begin : place + begin] = old[source:place]
        target[place + begin : place + begin + count] = added[begin : begin + count]
        source, begin = place, begin + count
    target[source + begin :] = old[source:]
    merged = time.perf_counter() - started
    new.flush()
    return {"bytes": new.nbytes, "merge_seconds": merged}


def _check_added(folder: Path) -> None:
    """The merged ordering must be what sorting everything would have given."""
    merged = np.load(folder / "new.npy")
    shards = _Shards(folder)
    lengths = np.concatenate([np.diff(shards.arrays(n)["offsets"]) for n in range(len(shards.paths))])
    if not np.array_equal(merged, np.argsort(lengths, kind="stable")):
        raise SystemExit("the ordering with an added shard is wrong")


def _lookups(folder: Path, rounds: int) -> dict[str, list[float]]:
    """The same pairs both ways, warm, and with the offsets that a reader fetches next; answers compared."""
    shards = _Shards(folder)
    count = len(shards.paths) - 1
    arrays = [shards.arrays(number) for number in range(count)]
    orders, offsets = [a["order"] for a in arrays], [a["offsets"] for a in arrays]
    firsts = np.cumsum([0, *(len(order) for order in orders)])
    table = merge_stretches([(a["lengths"].copy(), a["counts"].copy()) for a in arrays])
    whole = np.asarray(np.load(folder / "whole.npy", mmap_mode="r"))
    random = np.random.default_rng(0)
    # Documents as they come: common lengths are asked for often.
    places = random.integers(0, int(table["starts"][-1]), LOOKUPS)
    which = np.searchsorted(table["starts"], places, side="right") - 1
    lengths, within = table["lengths"][which], places - table["starts"][which].astype(np.int64)

    def place_of() -> Any:
        return table["starts"][np.searchsorted(table["lengths"], lengths)].astype(np.int64) + within

    table_first = table["first"].astype(np.int64)

    def by_stretches() -> tuple[Any, Any]:
        place = place_of()
        stretch = np.searchsorted(table_first, place, side="right") - 1
        shard = table["shard"][stretch]
        position = table["position"][stretch] + place - table_first[stretch]
        local = [orders[s][p] for s, p in zip(shard.tolist(), position.tolist(), strict=True)]
        return shard, np.array(local)

    def by_whole() -> tuple[Any, Any]:
        record = whole[place_of()]
        shard = np.searchsorted(firsts, record, side="right") - 1
        return shard, record - firsts[shard]

    def with_offsets(look_up: Callable[[], tuple[Any, Any]]) -> Any:
        shard, local = look_up()
        return [offsets[s][r : r + 2] for s, r in zip(shard.tolist(), local.tolist(), strict=True)]

    for a, b in zip(by_stretches(), by_whole(), strict=True):
        if not np.array_equal(a, b):
            raise SystemExit("the two orderings give different documents")
    with_offsets(by_whole)
    candidates: dict[str, Callable[[], Any]] = {
        "a": by_stretches,
        "b": by_whole,
        "a with offsets": lambda: with_offsets(by_stretches),
        "b with offsets": lambda: with_offsets(by_whole),
    }
    return interleave({name: _timed(run) for name, run in candidates.items()}, rounds)


def _timed(run: Callable[[], Any]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return measure


class _PeakAnonymous:
    """The most memory that the kernel could not drop, above what the process had at the start."""

    def __enter__(self) -> "_PeakAnonymous":
        self._stop, self._before, self.mb = threading.Event(), _anonymous_mb(), 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.mb = round(max(self.mb, _anonymous_mb() - self._before), 1)
            if self._stop.wait(0.01):
                return


def _anonymous_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


def _run_child(stage: str, folder: Path) -> Any:
    command = [sys.executable, __file__, "--child", stage, str(folder)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _show(size: Mapping[str, Any]) -> None:
    a, b = size["a_stretches"], size["b_whole"]
    rows = [
        ["on disk, bytes a document", a["bytes"] / size["documents"], b["bytes"] / size["documents"]],
        ["written at the end of a build, MB", a["bytes_of_table"] / 1e6, b["bytes"] / 1e6],
        ["end of a build, seconds", a["end_of_build"]["seconds"], b["end_of_build"]["seconds"]],
        ["end of a build, peak MB", *(x["end_of_build"]["peak_anonymous_mb"] for x in (a, b))],
        ["one more shard, seconds", a["added_shard"]["seconds"], b["added_shard"]["seconds"]],
        ["one more shard, MB written", *(x["added_shard"]["bytes_written"] / 1e6 for x in (a, b))],
        [
            "lookup of 4,096, us each",
            *(x["lookup_of_4096_seconds"]["median"] / LOOKUPS * 1e6 for x in (a, b)),
        ],
        [
            "lookup and offsets, us each",
            *(x["lookup_and_offsets_seconds"]["median"] / LOOKUPS * 1e6 for x in (a, b)),
        ],
    ]
    title = (
        f"{size['documents']:,} documents in {size['shards']:,} shards: {size['distinct_lengths']:,} "
        f"distinct lengths, {size['stretches']:,} stretches; ordering all shards took "
        f"{size['ordering_all_shards_seconds']:.1f} s in one process"
    )
    print_table(title, ["", "(a) a shard each", "(b) one whole"], rows)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
