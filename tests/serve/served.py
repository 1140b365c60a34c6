"""Loaders that servers of tests serve, by `tests.serve.served:NAME`; the tests make the same ones themselves."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import headrace

ROWS = 203


class Numbers:
    """Records of the user's own."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {
            "x": np.float32(number),
            "name": f"n{number}",
            "image": np.full((4, number % 3), number, np.uint8),
        }


def texts(folder: str, name: str) -> str:
    """A small dataset of tokens, built once."""
    place = Path(folder) / name
    if not (place / "headrace.json").exists():
        rng = np.random.default_rng(len(name))
        raw = Path(folder) / f"{name}.txt"
        raw.write_text("\n".join("x" * int(length) for length in rng.integers(0, 90, 150)))
        headrace.build(raw, place, tokenizer="bytes", split="line", shard_bytes=4096)
    return str(place)


def packed(folder: str, **settings: Any) -> headrace.Loader:
    chosen: dict[str, Any] = {"seq_len": 32, "batch_size": 4, "seed": 5, "drop_last": False}
    return headrace.Loader(texts(folder, "river"), **{**chosen, **settings})


def units(folder: str) -> headrace.Loader:
    return packed(folder, shuffle=headrace.Shuffle(kind="units", lanes=3), epochs=2)


def mixture(folder: str) -> headrace.Loader:
    mixed = headrace.mix({"river": (texts(folder, "river"), 3), "sea": (texts(folder, "sea"), 1)}, stop="all")
    return headrace.Loader(mixed, seq_len=32, batch_size=4, seed=5)


def crop(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": sample["x"] + rng.random(dtype=np.float32), "name": sample["name"], "big": rng.random(3000)}


def total(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {
        **batch,
        "sum": float(np.sum(batch["x"])),
        "noise": rng.random(2),
        "sizes": tuple(batch["big"].shape),
    }


def records(**settings: Any) -> headrace.Loader:
    """Functions of samples, then one of batches, with random numbers; batches larger than what is sent inline."""
    chosen = {"batch_size": 8, "seed": 2, **settings}
    return headrace.Loader(Numbers(), **chosen).map(crop).map(total, per="batch")


def waits(batch: dict[str, Any]) -> dict[str, Any]:
    time.sleep(float(os.environ.get("SERVED_SECONDS", "0.01")))
    return batch


def slow() -> headrace.Loader:
    return (
        headrace.Loader(Numbers(), batch_size=4, seed=1, epochs=None, fields=None)
        .map(without_images)
        .map(waits, per="batch")
    )


def without_images(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"], "big": np.full(10_000, sample["x"])}


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": sample["x"], "noise": rng.random(250)}


def distant() -> headrace.Loader:
    """Batches of some packets each, for hosts that are far away."""
    return headrace.Loader(Numbers(), batch_size=8, seed=3, epochs=None).map(noisy).map(waits, per="batch")


HELD_UP_STEP = 5


def only_x(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"]}


def held_up(batch: dict[str, Any]) -> dict[str, Any]:
    """Batches of 200 KB; one of them waits for a file."""
    while batch["x"][0] == 8 * HELD_UP_STEP and not Path(os.environ["HELD_UP_UNTIL"]).exists():
        time.sleep(0.01)
    return {"x": batch["x"], "big": np.zeros(25_000)}


TEXT_LENGTH = 300_000


def many_words(sample: dict[str, Any]) -> dict[str, Any]:
    return {"text": "x" * TEXT_LENGTH if sample["x"] % 8 == 0 else ""}


def wordy() -> headrace.Loader:
    """Batches of texts, which travel in the heads of messages."""
    return headrace.Loader(Numbers(), batch_size=8, shuffle=False).map(many_words)


def fails_at_seven(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] == 7:
        raise ValueError("seven is not a number")
    return {"x": sample["x"]}


def failing() -> headrace.Loader:
    return headrace.Loader(Numbers(), batch_size=4, shuffle=False).map(fails_at_seven)


def dies_at_nine(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] == 9 and (once := os.environ.get("DIES_ONCE")) and not Path(once).exists():
        Path(once).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"x": sample["x"]}


def dying() -> headrace.Loader:
    return headrace.Loader(Numbers(), batch_size=4, shuffle=False).map(dies_at_nine)


def broken() -> headrace.Loader:
    raise RuntimeError("no such data")
