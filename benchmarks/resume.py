"""What does it cost to stop and go on?

The time of one `state_dict()`, its size, and the time from nothing to the first batch after loading a state from
0, 50 and 99 % of an epoch: opening the dataset, making the Loader, loading the state, one batch.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import arguments, describe, interleave, print_table, ratio, spread, write_results

import headrace

SHARES = (0.0, 0.5, 0.99)
SETTINGS: dict[str, Any] = {"seq_len": 2048, "batch_size": 32, "rank": 0, "world_size": 1}


def main() -> None:
    parser = arguments(__doc__ or "", "resume")
    parser.add_argument("--tokens", type=int, help="tokens in the dataset (50 million)")
    parser.add_argument("--rounds", type=int, help="rounds (15)")
    options = parser.parse_args()
    tokens = options.tokens or (1_000_000 if options.quick else 50_000_000)
    rounds = options.rounds or (2 if options.quick else 15)
    machine = describe()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = Path(folder) / "data"
        write_dataset(path, tokens)
        body = {"machine": machine, "tokens": tokens, **_state(path), **_resume(path, rounds)}
    body["targets"] = {"state_microseconds": "under 50", "first_batch_at_99_to_0_percent": "at most 1.2"}
    write_results(options, "resume", body)
    print_table(
        "stopping and going on",
        ["what", "figure"],
        [
            ["state_dict(), microseconds", body["state_microseconds"]["median"]],
            ["its JSON, bytes", body["state_bytes"]],
            *(
                [f"first batch at {share}, ms", seconds["median"] * 1000]
                for share, seconds in body["first_batch_seconds"].items()
            ),
            ["99 % to 0 %", body["first_batch_at_99_to_0_percent"]["median"]],
        ],
    )


def write_dataset(path: Path, tokens: int) -> None:
    """Documents of about 500 tokens, in shards of 8 MB."""
    rng = np.random.default_rng(0)
    with headrace.Writer(path, {"tokens": "uint16[*]"}, shard_bytes=8 * 2**20) as writer:
        while tokens > 0:
            lengths = rng.lognormal(np.log(500) - 0.5, 1.0, size=2000).astype(np.int64) + 1
            values = rng.integers(0, 50_000, size=int(lengths.sum()), dtype=np.uint16)
            writer.write_columns(
                {"tokens": headrace.Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))}
            )
            tokens -= len(values)


def _state(path: Path, calls: int = 2000) -> dict[str, Any]:
    loader = headrace.Loader(path, **SETTINGS)
    batches = iter(loader)
    taken = []
    for _ in range(5):
        next(batches)
        started = time.perf_counter()
        for _ in range(calls):
            loader.state_dict()
        taken.append((time.perf_counter() - started) / calls * 1e6)
    return {"state_microseconds": spread(taken), "state_bytes": len(json.dumps(loader.state_dict()))}


def _resume(path: Path, rounds: int) -> dict[str, Any]:
    states = {share: _state_at(path, share) for share in SHARES}
    _first_batch(path, states[0.0])
    candidates: dict[str, Callable[[], float]] = {
        f"{share:.0%}": lambda state=state: _first_batch(path, state) for share, state in states.items()
    }
    figures = interleave(candidates, rounds)
    return {
        "first_batch_seconds": {share: spread(seconds) for share, seconds in figures.items()},
        "first_batch_at_99_to_0_percent": ratio(figures["99%"], figures["0%"]),
    }


def _state_at(path: Path, share: float) -> dict[str, Any]:
    """The state of a Loader that has gone so far, without going there: a state is a position."""
    loader = headrace.Loader(path, **SETTINGS)
    return {**loader.state_dict(), "position": int(loader.rows_per_epoch * share) // 32 * 32}


def _first_batch(path: Path, state: dict[str, Any]) -> float:
    started = time.perf_counter()
    loader = headrace.Loader(path, **SETTINGS)
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
