"""How fast could any loader be?

A loader of tokens has at least to copy them: 32 rows of 2,049 tokens, from random places of a memory-mapped
file into a buffer that is used again, widened from uint16 to what the model wants. Here that copy stands
alone, on one thread, with the places drawn beforehand. NumPy has two plain ways, and the limit is the faster:

    one call   all rows gathered by one index into a sliding window, then widened at once
    row by row a slice a row, widened as it is copied

Beside them the same bytes without widening (memcpy), and as many tokens from one place. Other benchmarks
import `limit_copy` and `tokens_per_second`, and measure the limit in the same rounds as what they compare.
"""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import arguments, describe, interleave, print_table, ratio, spread, write_results

ROWS, SEQ_LEN = 32, 2049
DRAWN_BATCHES = 4096
Step = Callable[[], int]
"""Makes one batch and gives the number of its tokens."""


def main() -> None:
    parser = arguments(__doc__ or "", "limit")
    parser.add_argument("--tokens", type=int, help="tokens in the file (100 million)")
    parser.add_argument("--rounds", type=int, help="rounds (9)")
    options = parser.parse_args()
    tokens = options.tokens or (1_000_000 if options.quick else 100_000_000)
    rounds = options.rounds or (2 if options.quick else 9)
    machine = describe()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = Path(folder) / "tokens.bin"
        write_tokens(path, tokens)
        figures = _measure(map_tokens(path), rounds, 0.02 if options.quick else 0.5)
    body = {
        "tokens": tokens,
        "rows": ROWS,
        "seq_len": SEQ_LEN,
        "rounds": rounds,
        "tokens_per_second": {name: spread_of_rates(rates) for name, rates in figures.items()},
        "to_memcpy": {name: ratio(rates, figures["memcpy, row by row"]) for name, rates in figures.items()},
    }
    write_results(options, "limit", {"machine": machine, **body})
    show_rates(f"{ROWS} rows of {SEQ_LEN:,} tokens from {tokens:,}", figures)


def _measure(tokens: Any, rounds: int, seconds: float) -> dict[str, list[float]]:
    steps = {
        "uint16 to int64, one call": limit_copy(tokens, "int64"),
        "uint16 to int64, row by row": copy_by_row(tokens, "int64"),
        "uint16 to int64, one place": _copy_from_one_place(tokens, "int64"),
        "uint16 to int32, one call": limit_copy(tokens, "int32"),
        "uint16 to int32, row by row": copy_by_row(tokens, "int32"),
        "uint16 to int32, one place": _copy_from_one_place(tokens, "int32"),
        "memcpy, row by row": copy_by_row(tokens, "uint16"),
        "memcpy, one place": _copy_from_one_place(tokens, "uint16"),
    }
    return interleave({name: tokens_per_second(step, seconds) for name, step in steps.items()}, rounds)


def write_tokens(path: Path, count: int) -> None:
    np.random.default_rng(0).integers(0, 2**16, count, dtype=np.uint16).tofile(path)


def map_tokens(path: Path) -> Any:
    """A plain array over the map: slices of `np.memmap` itself cost three times as much."""
    return np.asarray(np.memmap(path, dtype=np.uint16, mode="r"))


def limit_copy(tokens: Any, dtype: str, rows: int = ROWS, seq_len: int = SEQ_LEN) -> Step:
    """The limit: each call copies and widens one batch from random places into the same buffer."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len)
    out, places = np.empty((rows, seq_len), dtype), _places(len(windows), rows)

    def copy() -> int:
        out[:] = windows[next(places)]
        return out.size

    return copy


def copy_by_row(tokens: Any, dtype: str, rows: int = ROWS, seq_len: int = SEQ_LEN) -> Step:
    """The same as anyone would write it first: a slice a row."""
    out = np.empty((rows, seq_len), dtype)
    views, places = list(out), _places(len(tokens) - seq_len + 1, rows)

    def copy() -> int:
        for view, start in zip(views, next(places), strict=True):
            view[:] = tokens[start : start + seq_len]
        return out.size

    return copy


def _copy_from_one_place(tokens: Any, dtype: str) -> Step:
    out = np.empty(ROWS * SEQ_LEN, dtype)
    places = _places(len(tokens) - out.size + 1, 1)

    def copy() -> int:
        (start,) = next(places)
        out[:] = tokens[start : start + out.size]
        return out.size

    return copy


def _places(below: int, rows: int) -> Iterator[list[int]]:
    drawn = np.random.default_rng(1).integers(0, below, (DRAWN_BATCHES, rows))
    return itertools.cycle(drawn.tolist())


def tokens_per_second(step: Step, seconds: float, unmeasured: int = 32) -> Callable[[], float]:
    """A candidate for `interleave`: its speed over about `seconds`. The first batches of a turn do not count:
    what workers had ready while others were measured is used up by them."""

    def measure() -> float:
        for _ in range(unmeasured):
            step()
        done, started = 0, time.perf_counter()
        while True:
            done += step()
            passed = time.perf_counter() - started
            if passed >= seconds:
                return done / passed

    return measure


def spread_of_rates(rates: list[float]) -> dict[str, Any]:
    """As `machine.spread`, but of figures of which the highest is the best; in million tokens a second."""
    found = spread([rate / 1e6 for rate in rates])
    return {
        "unit": "million",
        "median": found["median"],
        "min": found["best"],
        "max": found["worst"],
        "rounds": found["rounds"],
    }


def show_rates(
    title: str, figures: dict[str, list[float]], first_batch: dict[str, float] | None = None
) -> None:
    header = ["million tokens a second", "median", "min", "max"]
    rows: list[list[Any]] = []
    for name, rates in figures.items():
        found = spread_of_rates(rates)
        rows.append([name, *(found[which] for which in ("median", "min", "max"))])
        if first_batch is not None:
            seconds = first_batch.get(name)
            rows[-1].append("" if seconds is None else f"{1000 * seconds:,.1f}")
    print_table(title, [*header, *(["first batch, ms"] if first_batch is not None else [])], rows)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
