"""What the Loader's tests share: documents whose tokens tell where they come from, batches kept for comparing, and
the assertion that every stream passes: it resumes at every step."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from headrace.load.loader import Loader

Contents = dict[str, Any]
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a row without its padding, and the segment of each."""
MakeLoader = Callable[[], Loader]


# Data


def documents(lengths: Sequence[int], first: int = 1, dtype: Any = np.uint32) -> list[Any]:
    """Documents of those lengths. No two tokens of all are equal: they count on from `first`."""
    ends = first + np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=dtype) for length, end in zip(lengths, ends, strict=True)]


def token_dataset(lengths: Sequence[int], first: int = 1, dtype: Any = np.uint32) -> headrace.Dataset:
    return headrace.from_arrays({"tokens": documents(lengths, first, dtype)})


def write_tokens(
    path: Path, lengths: Sequence[int], first: int = 1, shard_bytes: int = 200, overwrite: bool = False
) -> Path:
    """The same documents on disk, in many small shards."""
    with headrace.Writer(
        path, {"tokens": "uint32[*]"}, shard_bytes=shard_bytes, overwrite=overwrite
    ) as writer:
        for tokens in documents(lengths, first):
            writer.write({"tokens": tokens})
    return path


class Numbers:
    """A user's own map-style data: sample i is a dict that tells i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(3, index, dtype=np.float32), "number": index, "text": f"sample {index}"}


# Transforms: worker processes import them from here


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"y": sample["x"] * 2}


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": sample["x"] + rng.random(), "drawn": rng.integers(1_000_000)}


def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """What it draws, beside the number of its sample."""
    return {"number": sample["number"], "drawn": rng.random(3)}


def failing(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["number"] == 7:
        raise LookupError("no sevens here")
    return {"number": sample["number"]}


def leaving_a_mark(folder: str, batch: dict[str, Any]) -> dict[str, Any]:
    """A file with the name of the batch's first number."""
    Path(folder, str(batch["number"][0])).touch()
    return batch


class OddError(Exception):
    """Cannot be unpickled: it takes two arguments and keeps one."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{why}: {number}")


def failing_oddly(sample: dict[str, Any]) -> dict[str, Any]:
    raise OddError(int(sample["number"]), "not this one")


def hanging(mark: str, sample: dict[str, Any]) -> dict[str, Any]:
    """Leaves a file when it begins to."""
    if sample["number"] == 7:
        Path(mark).touch()
        time.sleep(600)
    return {"number": sample["number"]}


def exiting(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["number"] == 7:
        os._exit(5)
    return {"number": sample["number"]}


def killed(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["number"] == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": sample["number"]}


def uneven(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.ones(int(sample["number"]))}


def listed(sample: dict[str, Any]) -> Any:
    return [sample["number"]]


def noisy_here(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**noisy(sample, rng), "process": os.getpid()}


# What came


def kept(batch: headrace.Batch) -> Contents:
    """A copy that stays what it is, whatever becomes of the batch's memory."""
    return {
        name: value.copy() if isinstance(value, np.ndarray) else value for name, value in dict(batch).items()
    }


def take(loader: Iterable[headrace.Batch], count: int | None = None) -> list[Contents]:
    return [kept(batch) for batch in islice(loader, count)]


def same(found: Sequence[Contents], wanted: Sequence[Contents]) -> bool:
    return len(found) == len(wanted) and all(map(_same_batch, found, wanted))


def _same_batch(found: Contents, wanted: Contents) -> bool:
    if list(found) != list(wanted):
        return False
    for name, value in wanted.items():
        other = found[name]
        if isinstance(value, np.ndarray):
            if (value.dtype, value.shape) != (other.dtype, other.shape) or not np.array_equal(value, other):
                return False
        elif other != value:
            return False
    return True


def rows_of(batch: Any) -> list[Row]:
    """The rows of a batch of tokens, comparable."""
    filled = batch["segment_ids"] > 0
    return [
        (tuple(tokens[where].tolist()), tuple(segments[where].tolist()))
        for tokens, segments, where in zip(batch["tokens"], batch["segment_ids"], filled, strict=True)
    ]


def tokens_of(rows: Iterable[Row]) -> list[int]:
    return [token for tokens, _ in rows for token in tokens]


def rows_of_ranks(
    make: Callable[[int, int], Loader], world_size: int, steps: int | None = None
) -> list[list[Row]]:
    """The rows of each global batch, rank after rank. Every rank must have as many batches as the others."""
    ranks = [take(make(rank, world_size), steps) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1, "ranks have different numbers of batches"
    return [[row for batch in step for row in rows_of(batch)] for step in zip(*ranks, strict=True)]


def flat(batches: Iterable[Iterable[Row]]) -> list[Row]:
    return [row for batch in batches for row in batch]


# Resuming


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 1024, f"a state of {len(text)} bytes: {text}"
    restored: dict[str, Any] = json.loads(text)
    assert restored == state, "JSON changes the state"
    return restored


def resumes_at_every_step(make_loader: MakeLoader, steps: int | None = None) -> None:
    """From the state after any batch, a new Loader gives exactly the batches that would have come.

    Three ways: once from each step, again and again with a batch or two in between, and in the same Loader. An
    endless stream is followed for `steps` batches.
    """
    loader = make_loader()
    states, batches = [through_json(loader.state_dict())], []
    for batch in islice(loader, steps):
        batches.append(kept(batch))
        states.append(through_json(loader.state_dict()))
    assert len(batches) == (steps or len(make_loader()))
    next_pass = take(loader, len(batches))
    _resumes_once(make_loader, states, batches, next_pass, steps is None)
    _resumes_in_a_row(make_loader, batches)
    loader.load_state_dict(states[len(batches) // 2])
    rest = batches[len(batches) // 2 :]
    assert same(take(loader, len(rest)), rest), "the same Loader does not go back to a state of its own"


def _resumes_once(
    make_loader: MakeLoader,
    states: list[dict[str, Any]],
    batches: list[Contents],
    next_pass: list[Contents],
    ends: bool,
) -> None:
    for step, state in enumerate(states):
        loader = make_loader()
        loader.load_state_dict(state)
        assert loader.state_dict() == state, f"loading the state of step {step} and saving it changes it"
        # After the last batch of a pass comes the next pass.
        rest = batches[step:] or next_pass
        if ends:
            assert len(loader) == len(rest), f"the length after resuming at step {step}"
        assert same(take(loader, None if ends else len(rest)), rest), f"other batches after step {step}"


def _resumes_in_a_row(make_loader: MakeLoader, batches: list[Contents]) -> None:
    found: list[Contents] = []
    state = make_loader().state_dict()
    while len(found) < len(batches):
        loader = make_loader()
        loader.load_state_dict(state)
        found += take(loader, min(1 + len(found) % 2, len(batches) - len(found)))
        state = through_json(loader.state_dict())
    assert same(found, batches), "resuming again and again gives other batches"
