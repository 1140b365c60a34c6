"""How many tokens a second does a Loader give, beside the limit and beside other loaders?

rows     rows of 2,049 tokens cut from the stream, in global shuffle, 32 per batch, as int64
packed   documents of about 500 tokens, best fit into rows of 2,048, with labels, positions, segments and bounds
short    the same with documents of about 100 tokens, where the cost of a document shows

All read the same tokens from the page cache, and candidates take turns. The time to the first batch is measured
once, from opening the data on, with packages imported before; it counts in no rate. Padding counts as nothing.
The limit copies as many tokens from random places (`limit.py`); rivals are in `loading_rivals.py`.
"""

import contextlib
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from limit import copy_by_row, limit_copy, map_tokens, show_rates, spread_of_rates, tokens_per_second
from loading_rivals import Documents, Rival, installed, packed_rivals, row_rivals
from machine import arguments, describe, interleave, print_table, ratio, write_results

from headrace import Loader, Ragged, Writer
from headrace import open as open_dataset
from headrace.pack.best_fit import plan_best_fit
from headrace.pack.overlong import cut_overlong

BATCH_SIZE, WINDOW, PACKED = 32, 2049, 2048
SHARDS = 8
ALL_FIELDS = ("tokens", "labels", "position_ids", "segment_ids", "cu_seqlens", "max_seqlen", "loss_mask")


def main() -> None:
    parser = arguments(__doc__ or "", "loading")
    parser.add_argument("--tokens", type=int, help="tokens of each dataset (100 million)")
    parser.add_argument("--rounds", type=int, help="turns of each candidate (7)")
    parser.add_argument("--seconds", type=float, help="length of a turn (1)")
    parser.add_argument("--only", choices=("rows", "packed", "short"), help="one part of the question")
    parser.add_argument(
        "--rivals", action="store_true", help="all rivals, also those that take long to import"
    )
    options = parser.parse_args()
    tokens = options.tokens or (400_000 if options.quick else 100_000_000)
    turns = _Turns(
        rounds=options.rounds or (2 if options.quick else 7),
        seconds=options.seconds or (0.02 if options.quick else 1.0),
    )
    machine, left_out = describe(), _LeftOut(slow=options.quick and not options.rivals)
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        if options.only != "short":
            data = _make(Path(folder) / "web", tokens, mean_length=500)
            if options.only != "packed":
                parts["rows"] = _measure_rows(data, turns, left_out)
            if options.only != "rows":
                parts["packed"] = _measure_packed(data, turns, left_out)
        if options.only in (None, "short"):
            parts["short"] = _measure_short(_make(Path(folder) / "short", tokens, mean_length=100), turns)
    for name, reason in sorted(left_out.reasons.items()):
        print(f"left out, {reason}: {name}")
    versions = installed("torch") or {}
    versions |= (installed("grain") or {}) | (installed("transformers") or {})
    body = {"versions": versions, "rounds": turns.rounds, "left_out": sorted(left_out.reasons), **parts}
    write_results(options, "loading", {"machine": machine, **body})


@dataclass(frozen=True, kw_only=True)
class _Data:
    """One dataset three times: Headrace's, all tokens in one file, and documents cut to fit a row."""

    dataset: Path
    tokens: Path
    offsets: Path
    documents: int
    filled: float
    """How full best fit makes the rows."""


@dataclass(kw_only=True)
class _LeftOut:
    slow: bool
    """Leave out those that take long to import."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By the rival's name."""


@dataclass(frozen=True, kw_only=True)
class _Turns:
    rounds: int
    seconds: float

    def take(self, streams: Mapping[str, Callable[[], int]]) -> dict[str, list[float]]:
        return interleave({n: tokens_per_second(s, self.seconds) for n, s in streams.items()}, self.rounds)


def document_lengths(tokens: int, mean: int) -> Any:
    """Lengths with the heavy tail of web pages: half the documents are shorter than about half the mean."""
    sigma = 1.15
    draws = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, max(8, tokens // mean))
    return np.clip(draws, 1, 1e6).astype(np.int64)


def _make(folder: Path, tokens: int, mean_length: int) -> _Data:
    folder.mkdir()
    random, lengths = np.random.default_rng(1), document_lengths(tokens, mean_length)
    with (
        open(folder / "tokens.bin", "wb") as flat,
        # A shard ends with each call: the smallest size that is allowed has always been reached.
        Writer(folder / "dataset", {"tokens": "uint16[*]"}, shard_bytes=1) as writer,
    ):
        for part in np.array_split(lengths, SHARDS):
            offsets = np.concatenate([[0], np.cumsum(part)])
            values = random.integers(0, 2**16, offsets[-1], dtype=np.uint16)
            values.tofile(flat)
            writer.write_columns({"tokens": Ragged(values, offsets)})
    np.save(folder / "offsets.npy", _cut(lengths, PACKED))
    return _Data(
        dataset=folder / "dataset",
        tokens=folder / "tokens.bin",
        offsets=folder / "offsets.npy",
        documents=len(lengths),
        filled=_filled(lengths, PACKED),
    )


def _cut(lengths: Any, seq_len: int) -> Any:
    """Offsets of the documents, with a further cut after every `seq_len` tokens of one."""
    pieces = -(-lengths // seq_len)
    sizes = np.full(pieces.sum(), seq_len)
    sizes[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * seq_len
    return np.concatenate([[0], np.cumsum(sizes)])


def _filled(lengths: Any, seq_len: int) -> float:
    cut = cut_overlong(*np.unique(lengths, return_counts=True), seq_len)
    rows = cut.full_rows + plan_best_fit(cut.lengths, cut.counts, seq_len).rows
    return int(lengths.sum()) / (rows * seq_len)


def _headrace(data: _Data, fields: tuple[str, ...], **settings: Any) -> Iterator[int]:
    """Tokens of each batch without an end; every field is looked at, in case one is made only when asked for."""
    filled = 1.0 if settings["packing"] == "windows" else data.filled
    loader = Loader(
        open_dataset(data.dataset),
        batch_size=BATCH_SIZE,
        shuffle="global",
        fields=fields,
        epochs=None,
        **settings,
    )
    for batch in loader:
        for name in fields:
            getattr(batch, name)
        yield round(batch.tokens.size * filled)


def _measure_rows(data: _Data, turns: _Turns, left_out: _LeftOut) -> dict[str, Any]:
    tokens = map_tokens(data.tokens)
    limits = {f"limit, {dtype}": limit_copy(tokens, dtype) for dtype in ("int64", "int32")}
    limits["plain copy row by row, int64"] = copy_by_row(tokens, "int64")
    started: dict[str, Callable[[], Iterator[int]]] = {
        f"headrace, {dtype}": lambda dtype=dtype: _headrace(
            data, ("tokens",), packing="windows", seq_len=WINDOW, dtype=dtype
        )
        for dtype in ("int64", "int32")
    }
    started["headrace, int64, no prefetch"] = lambda: _headrace(
        data, ("tokens",), packing="windows", seq_len=WINDOW, dtype="int64", prefetch=0
    )
    started |= _present(row_rivals(data.tokens, WINDOW, BATCH_SIZE), left_out)
    title = f"rows of {WINDOW:,} tokens, {BATCH_SIZE} a batch, global shuffle"
    found = _compare(title, limits, started, turns, ("headrace, int64",))
    found["ratios"] |= {
        "headrace, int32": {
            "limit, int32": ratio(found["figures"]["headrace, int32"], found["figures"]["limit, int32"])
        }
    }
    return _report(title, data, found)


def _measure_packed(data: _Data, turns: _Turns, left_out: _LeftOut) -> dict[str, Any]:
    source = Documents(tokens=data.tokens, offsets=data.offsets, seq_len=PACKED, batch_size=BATCH_SIZE)
    limits = _packed_limits(data)
    started = _packed_candidates(data) | _present(packed_rivals(source), left_out)
    title = f"documents of about 500 tokens in rows of {PACKED:,}, with all metadata"
    return _report(title, data, _compare(title, limits, started, turns, ("headrace, all fields",)))


def _measure_short(data: _Data, turns: _Turns) -> dict[str, Any]:
    limits = _packed_limits(data)
    started = _packed_candidates(data)
    title = f"documents of about 100 tokens in rows of {PACKED:,}"
    return _report(title, data, _compare(title, limits, started, turns, tuple(started)))


def _packed_limits(data: _Data) -> dict[str, Callable[[], int]]:
    tokens = map_tokens(data.tokens)
    return {
        "limit, tokens only": limit_copy(tokens, "int64", seq_len=PACKED),
        "plain copy row by row, tokens only": copy_by_row(tokens, "int64", seq_len=PACKED),
    }


def _packed_candidates(data: _Data) -> dict[str, Callable[[], Iterator[int]]]:
    def start(fields: tuple[str, ...]) -> Iterator[int]:
        return _headrace(data, fields, packing="best-fit", seq_len=PACKED, dtype="int64")

    return {
        "headrace, all fields": lambda: start(ALL_FIELDS),
        "headrace, tokens only": lambda: start(("tokens",)),
    }


def _present(rivals: Mapping[str, Rival], left_out: _LeftOut) -> dict[str, Callable[[], Iterator[int]]]:
    """Those that are installed, as streams of token counts; the others go to `left_out`."""
    found: dict[str, Callable[[], Iterator[int]]] = {}
    for name, rival in rivals.items():
        if installed(*rival.needs) is None:
            left_out.reasons[name] = "not installed"
            continue
        if left_out.slow and "transformers" in rival.needs:
            left_out.reasons[name] = "not part of a quick run"
            continue
        for package in rival.needs:
            importlib.import_module(package)
        found[name] = lambda rival=rival: _counted(rival)
    return found


def _counted(rival: Rival) -> Iterator[int]:
    batches = rival.start()
    try:
        for batch in batches:
            yield rival.count(batch)
    finally:
        # Worker processes end here and not at some later collection.
        getattr(batches, "close", lambda: None)()


def _compare(
    title: str,
    limits: Mapping[str, Callable[[], int]],
    started: Mapping[str, Callable[[], Iterator[int]]],
    turns: _Turns,
    ours: tuple[str, ...],
) -> dict[str, Any]:
    steps, first_batch = dict(limits), dict[str, float]()
    with contextlib.ExitStack() as streams:
        for name, start in started.items():
            begun = time.perf_counter()
            stream = start()
            next(stream)
            first_batch[name] = time.perf_counter() - begun
            streams.callback(stream.close)  # type: ignore[attr-defined]
            steps[name] = stream.__next__
        figures = turns.take(steps)
    show_rates(title, figures, first_batch)
    ratios = {
        own: {name: ratio(figures[own], rates) for name, rates in figures.items() if name != own}
        for own in ours
    }
    return {"figures": figures, "first_batch_seconds": first_batch, "ratios": ratios}


def _report(title: str, data: _Data, found: Mapping[str, Any]) -> dict[str, Any]:
    for own, to in found["ratios"].items():
        rows = [[name, *(each[w] for w in ("median", "lowest", "highest"))] for name, each in to.items()]
        print_table(f"{own}: how many times", ["", "median", "lowest", "highest"], rows)
    return {
        "question": title,
        "documents": data.documents,
        "rows_filled": data.filled,
        "tokens_per_second": {name: spread_of_rates(rates) for name, rates in found["figures"].items()},
        "first_batch_seconds": found["first_batch_seconds"],
        "ratios": found["ratios"],
    }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
