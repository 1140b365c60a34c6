"""What grows with the number of ranks, tokens and shards, how fast, and what breaks first?

Each term is measured here at sizes that this machine can hold. How it grows is shown as an exponent, fitted to what was
measured (1: in proportion, 0: not at all). Terms that grow are extrapolated in proportion, and marked with ~.

opening   parsing the manifest and the units of so many shards of 64 MB (16 units each), and the memory that they take
planning  the rows at some positions of an epoch: the order by units, and the global shuffle
packing   the plan of best fit for the documents of a unit, and of a whole dataset
steps     finding a rank's rows of a step among those of all ranks
lanes     how often units are fetched when nodes share an epoch
finishing the index over all documents at the end of a build
"""

import contextlib
import gc
import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from machine import arguments, describe, print_table, write_results

from headrace.format.container import Chunks, parse_head, write_container
from headrace.format.fields import Field
from headrace.format.finish import finish_dataset
from headrace.format.manifest import Manifest, ShardEntry, parse_manifest, write_manifest
from headrace.format.ragged import Ragged
from headrace.format.shard import ShardBuilder
from headrace.format.units import read_units
from headrace.order.lanes import UnitOrder
from headrace.order.mixture import Stages
from headrace.order.shuffle import Shuffle
from headrace.order.steps import Steps
from headrace.order.stream import RowStream
from headrace.order.world import World
from headrace.rows.kernel import permute, plan_best_fit
from headrace.store.memory import MemoryStore

FIELDS = {"tokens": Field.parse("uint16[*]")}
UNITS_PER_SHARD, RECORDS_PER_UNIT, TOKENS_PER_UNIT = 16, 2600, 2**21
TOKENS_PER_SHARD = UNITS_PER_SHARD * TOKENS_PER_UNIT
ROWS_PER_UNIT = 1024
RECORDS_PER_SHARD = UNITS_PER_SHARD * RECORDS_PER_UNIT
RANKS_PER_NODE, DEFAULT_LANES, MOST_NODES_SIMULATED = 8, 128, 24
LARGE_SHARDS = (10, 1_000, 10_000, 100_000, 1_000_000)
LARGE_TOKENS = (1e6, 1e9, 1e12, 1e13)
LARGE_RANKS = (1, 8, 64, 1024, 2048, 10_000)
BATCH_OF_A_RANK, STEPS_PLANNED_AT_ONCE = 16, 256
S3_REQUESTS_PER_SECOND, REQUEST_BYTES = 5500, 4 * 2**20
TOKENS_PER_SECOND_AND_RANK = 50_000


def main() -> None:
    options = arguments(__doc__ or "", "scale").parse_args()
    is_quick = options.quick
    body: dict[str, Any] = {"machine": describe()}
    body["opening"] = opening([10, 40] if is_quick else [10, 100, 1_000, 4_000, 10_000])
    body["planning"] = planning([10**3, 10**4] if is_quick else [10**4, 10**5, 10**6])
    body["packing"] = packing([10**4, 10**6] if is_quick else [10**6, 10**9, 10**12])
    ranks = (1, 16) if is_quick else LARGE_RANKS
    body["steps"] = steps(ranks)
    body["lanes"] = lanes(ranks)
    body["finishing"] = finishing([10**3, 10**4] if is_quick else [3 * 10**5, 10**6, 3 * 10**6])
    body["exponents"] = exponents(body)
    body["extrapolated"] = extrapolated(body)
    write_results(options, "scale", body)
    show(body)


def timed(call: Callable[[], Any], least_seconds: float = 0.2) -> float:
    """The best of several calls."""
    best, began = math.inf, time.perf_counter()
    while best == math.inf or time.perf_counter() - began < least_seconds:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def memory_of(call: Callable[[], Any]) -> int:
    """The bytes that what a call returns takes."""
    gc.collect()
    tracemalloc.start()
    kept = call()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return size


def peak_of(call: Callable[[], Any]) -> int:
    """The most bytes that a call holds at once."""
    gc.collect()
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


# Opening


def opening(sizes: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for shards in sizes:
        manifest, units, entries, header_bytes = described_dataset(shards)

        def parse(raw: bytes = manifest) -> Manifest:
            return parse_manifest(raw, "manifest")

        def read(raw: bytes = units, parts: list[ShardEntry] = entries, head: int = header_bytes) -> Any:
            header = parse_head(raw[:head], len(raw), "units")
            return read_units(np.frombuffer(raw, dtype=np.uint8), header, FIELDS, parts, "units")

        found.append(
            {
                "shards": shards,
                "manifest_bytes": len(manifest),
                "manifest_seconds": timed(parse),
                "manifest_memory": memory_of(parse),
                "units_bytes": len(units),
                "units_seconds": timed(read),
                "units_memory": memory_of(read) + len(units),
            }
        )
    return found


def described_dataset(shards: int) -> tuple[bytes, bytes, list[ShardEntry], int]:
    """The manifest and the units of a dataset that was never written: one shard, many times under other names."""
    store = MemoryStore(f"scale-{shards}")
    store.create()
    builder = ShardBuilder(FIELDS)
    builder.append({"tokens": Ragged(np.zeros(4, np.uint16), np.array([0, 1, 4]))})
    one = builder.write(store)
    entries = [_renamed(one, number) for number in range(shards)]
    index = finish_dataset(store, FIELDS, [one], "scale").index
    stored = write_container(
        store,
        "units",
        "units",
        {},
        {name: Chunks.of(array) for name, array in _units(shards, entries).items()},
    )
    manifest = Manifest(fields=FIELDS, shards=entries, index=index, written_by="scale")
    write_manifest(store, manifest)
    raw, units = store.read("headrace.json"), store.read(stored.file)
    return raw, units, entries, stored.header_bytes


def _renamed(entry: ShardEntry, number: int) -> ShardEntry:
    name = f"shard-{number:016x}.hdrc"
    size = 2 * TOKENS_PER_SHARD + 2**20
    stored = replace(entry.stored, file=name, bytes=size, checksum=f"{number:032x}")
    return replace(
        entry,
        stored=stored,
        records=RECORDS_PER_SHARD,
        elements={"tokens": TOKENS_PER_SHARD},
    )


def _units(shards: int, entries: Sequence[ShardEntry]) -> dict[str, Any]:
    count = shards * UNITS_PER_SHARD
    offsets_at = 4096 + 2 * TOKENS_PER_SHARD
    blocks_at = offsets_at + 8 * (UNITS_PER_SHARD * RECORDS_PER_UNIT + 1)
    each = {
        "first_unit": np.arange(shards + 1) * UNITS_PER_SHARD,
        "first_record": np.arange(count + 1) * RECORDS_PER_UNIT,
        "tokens/first_element": np.arange(count + 1) * TOKENS_PER_UNIT,
        "tokens/data/check": np.zeros(count),
        "tokens/offsets/check": np.zeros(count),
        "tokens/data/offset": np.full(shards, 4096),
        "tokens/offsets/offset": np.full(shards, offsets_at),
        "blocks/offset": np.full(shards, blocks_at),
        "index/blocks": np.zeros(1),
        "index/check": np.zeros(1),
    }
    return {name: array.astype("<u8") for name, array in each.items()}


# Planning


def planning(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The time for 4,096 rows, which are planned at once, and for what an epoch needs once."""
    found = []
    draw = np.random.default_rng(0)
    for units in sizes:
        rows_of_units = np.full(units, ROWS_PER_UNIT)
        rows = int(rows_of_units.sum())
        positions = draw.integers(0, rows - 4096) + np.arange(4096)
        order = UnitOrder(rows_of_units, 128, np.uint64(1), permute)
        found.append(
            {
                "units": units,
                "rows": rows,
                "epoch_seconds": timed(lambda of=rows_of_units: UnitOrder(of, 128, np.uint64(1), permute)),
                "epoch_memory": memory_of(lambda of=rows_of_units: UnitOrder(of, 128, np.uint64(1), permute)),
                "by_units_us_per_row": 1e6 * timed(lambda o=order, p=positions: o.rows_at(p)) / 4096,
                "global_us_per_row": 1e6
                * timed(lambda p=positions, n=rows: permute(p, n, np.uint64(1)))
                / 4096,
            }
        )
    return found


# Packing


def packing(sizes: Sequence[int], seq_len: int = 2048) -> list[dict[str, Any]]:
    """Best fit on the histogram of so many documents of web-like lengths."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(6.2, 1.1, 10**6), 20_000).astype(np.int64) + 1
    found = []
    for documents in sizes:
        values, counts = np.unique(np.minimum(lengths, seq_len), return_counts=True)
        counts = np.maximum(1, counts * (documents / len(lengths))).astype(np.int64)
        seconds = timed(lambda v=values, c=counts: plan_best_fit(v, c, seq_len))
        made = plan_best_fit(values, counts, seq_len)
        found.append({"documents": documents, "plan_seconds": seconds, "moves": len(made.length)})
    return found


# Ranks


def steps(rank_counts: Sequence[int]) -> list[dict[str, Any]]:
    """What a rank spends on finding its rows: among all rows of the step, if nodes share the units."""
    found = []
    for ranks in rank_counts:
        stream = _stream_by_units(_lanes_for(ranks), units_per_lane=4, rows_per_unit=ROWS_PER_UNIT)
        each = _steps_of(stream, World(ranks // 2, ranks), BATCH_OF_A_RANK)
        several = range(10, 10 + STEPS_PLANNED_AT_ONCE)
        seconds = timed(lambda e=each, s=several: e.positions_of(s)) / len(several)
        found.append(
            {
                "ranks": ranks,
                "global_batch": ranks * BATCH_OF_A_RANK,
                "step_microseconds": 1e6 * seconds,
                "step_of_a_mixture_microseconds": 1e6 * _step_of_a_mixture(ranks),
            }
        )
    return found


def _step_of_a_mixture(ranks: int) -> float:
    """The same for two sources, where all rows of the step are put in order."""
    one = _stream_by_units(DEFAULT_LANES, units_per_lane=64, rows_per_unit=ROWS_PER_UNIT)
    both = replace(one, rows=one.rows * 2, units=one.units * 2, stages=Stages.of([1, 2]))
    each = _steps_of(both, World(ranks // 2, ranks), BATCH_OF_A_RANK, start=one.rows[0])
    return timed(lambda: each.positions_of(range(1)))


def lanes(rank_counts: Sequence[int]) -> list[dict[str, Any]]:
    """How often a unit is fetched, with as many lanes as by default, and with eight for each node."""
    found = []
    for ranks in rank_counts:
        nodes = max(1, ranks // RANKS_PER_NODE)
        fitting = _lanes_for(ranks)
        by_default = _fetched_times(nodes, DEFAULT_LANES)
        found.append(
            {
                "ranks": ranks,
                "nodes": nodes,
                "lanes": DEFAULT_LANES,
                "fetched_times": by_default,
                "fitting_lanes": fitting,
                "fetched_times_then": by_default
                if fitting == DEFAULT_LANES
                else _fetched_times(nodes, fitting),
            }
        )
    return found


def _steps_of(
    stream: RowStream, world: World, batch_size: int, start: int = 0, stop: int | None = None
) -> Steps:
    return Steps(
        start=start, stop=stop, batch_size=batch_size, world=world, drop_last=False, by_lane=stream.by_lane
    )


def _lanes_for(ranks: int) -> int:
    """The default, or else as many for each node as it has ranks."""
    return max(DEFAULT_LANES, ranks)


def _stream_by_units(lane_count: int, units_per_lane: int, rows_per_unit: int) -> RowStream:
    units = np.full(units_per_lane * lane_count, rows_per_unit)
    return RowStream(
        rows=(int(units.sum()),),
        units=(units,),
        stages=Stages.of([1]),
        shuffle=Shuffle(kind="units", lanes=lane_count),
        seed=3,
        permute=permute,
    )


def _fetched_times(nodes: int, lane_count: int, rows_per_unit: int = 64) -> float:
    """Over an epoch: the units that some nodes touch, for all nodes, to the units that there are.

    A node keeps the units that it is at, so it fetches each once.
    """
    stream = _stream_by_units(lane_count, units_per_lane=8, rows_per_unit=rows_per_unit)
    rows = stream.rows[0]
    touched = 0
    looked_at = np.unique(np.linspace(0, nodes - 1, min(nodes, MOST_NODES_SIMULATED)).astype(int))
    for node in looked_at:
        own = _steps_of(stream, World(int(node), nodes), RANKS_PER_NODE * 4, stop=rows)
        positions, _ = own.positions_of(range(own.count or 0))
        touched += len(np.unique(stream.at(positions).row // rows_per_unit))
    return touched / len(looked_at) * nodes / (rows / rows_per_unit)


# Finishing


def finishing(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The index of so many documents of web-like lengths, at a tenth, which one machine makes at the end of a build."""
    draw = np.random.default_rng(0)
    found = []
    for documents in sizes:
        store = MemoryStore(f"finish-{documents}")
        store.create()
        entries = []
        for first in range(0, documents, RECORDS_PER_SHARD):
            count = min(RECORDS_PER_SHARD, documents - first)
            lengths = np.minimum(draw.lognormal(3.9, 1.1, count), 2_000).astype(np.int64) + 1
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            builder = ShardBuilder(FIELDS)
            builder.append({"tokens": Ragged(np.zeros(int(offsets[-1]), np.uint16), offsets)})
            entries.append(builder.write(store))
        seconds = timed(lambda s=store, e=entries: finish_dataset(s, FIELDS, e, "scale"), 0.0)
        found.append(
            {
                "documents": documents,
                "shards": len(entries),
                "seconds": seconds,
                "peak_bytes": peak_of(lambda s=store, e=entries: finish_dataset(s, FIELDS, e, "scale")),
            }
        )
    return found


# How terms grow, and at sizes that this machine cannot hold


def exponents(body: dict[str, Any]) -> dict[str, float]:
    """The slope of each term on logarithmic axes, by least squares."""
    terms = [
        ("opening", "shards", "manifest_seconds"),
        ("opening", "shards", "units_seconds"),
        ("opening", "shards", "manifest_memory"),
        ("opening", "shards", "units_memory"),
        ("planning", "units", "epoch_seconds"),
        ("planning", "units", "by_units_us_per_row"),
        ("planning", "units", "global_us_per_row"),
        ("packing", "documents", "plan_seconds"),
        ("steps", "ranks", "step_microseconds"),
        ("steps", "ranks", "step_of_a_mixture_microseconds"),
        ("finishing", "documents", "seconds"),
        ("finishing", "documents", "peak_bytes"),
    ]
    found = {}
    for part, size, term in terms:
        points = [(math.log(each[size]), math.log(each[term])) for each in body[part]]
        slope, _ = np.polyfit(*zip(*points, strict=True), 1)
        found[f"{part}: {term} by {size}"] = float(slope)
    return found


def extrapolated(body: dict[str, Any]) -> dict[str, Any]:
    last = body["opening"][-1]
    per_shard = {name: last[name] / last["shards"] for name in last if name != "shards"}
    measured = {each["shards"]: each for each in body["opening"]}
    by_shards = [
        {
            "shards": shards,
            "is_measured": shards in measured,
            **{name: value * shards for name, value in per_shard.items()},
            **measured.get(shards, {}),
        }
        for shards in LARGE_SHARDS
    ]
    plan_last = body["planning"][-1]
    finish_last = body["finishing"][-1]
    by_tokens = []
    for tokens in LARGE_TOKENS:
        units = max(1.0, tokens / TOKENS_PER_UNIT)
        documents = units * RECORDS_PER_UNIT
        by_tokens.append(
            {
                "tokens": tokens,
                "shards_of_64_mb": max(1.0, tokens / TOKENS_PER_SHARD),
                "epoch_seconds": plan_last["epoch_seconds"] * units / plan_last["units"],
                "epoch_memory": plan_last["epoch_memory"] * units / plan_last["units"],
                "us_per_row": plan_last["by_units_us_per_row"],
                "finish_seconds": finish_last["seconds"] * documents / finish_last["documents"],
                "finish_memory": finish_last["peak_bytes"] * documents / finish_last["documents"],
            }
        )
    by_ranks = []
    for ranks in LARGE_RANKS:
        nodes = max(1, ranks // RANKS_PER_NODE)
        rate = ranks * TOKENS_PER_SECOND_AND_RANK * 2
        by_ranks.append(
            {
                "ranks": ranks,
                "bytes_per_second_and_node": rate / nodes,
                # Each unit of 4 MB takes one request for its tokens, and one for the offsets of its documents.
                "requests_per_second": rate / REQUEST_BYTES * 2,
                "requests_to_open": 3 * ranks,
                "seconds_to_open_at_the_limit_of_a_prefix": 3 * ranks / S3_REQUESTS_PER_SECOND,
            }
        )
    return {"by_shards": by_shards, "by_tokens": by_tokens, "by_ranks": by_ranks}


def show(body: dict[str, Any]) -> None:
    for name in ("opening", "planning", "packing", "steps", "lanes", "finishing"):
        rows = [list(each.values()) for each in body[name]]
        print_table(name, list(body[name][0]), rows)
    print_table("exponents", ["term", "exponent"], [list(each) for each in body["exponents"].items()])
    for name, rows_of in body["extrapolated"].items():
        print_table(f"~ {name}", list(rows_of[0]), [list(each.values()) for each in rows_of])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
