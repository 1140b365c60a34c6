"""Documents to build from, and ways to compare what came out."""

import hashlib
import json
from pathlib import Path
from typing import Any

WORDS = "river stone feeds a turbine quietly while Über-große ζωή 水 flows 🌊 through steel".split()


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of uneven lengths, some empty, the same for the same seed."""
    texts = []
    for number in range(count):
        length = (number * 7919 + seed * 104729) % 60
        texts.append(" ".join(WORDS[(number + seed + k * k) % len(WORDS)] for k in range(length)))
    return texts


def tree(directory: Path) -> dict[str, str]:
    """Every file of a dataset's directory with a hash of its bytes, except those that are kept only for readers of the
    version before: equal trees are equal datasets to the byte, with equally much left behind."""
    kept = kept_for_readers(directory)
    files = [path for path in directory.rglob("*") if path.is_file() and path.name not in kept]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def kept_for_readers(directory: Path) -> set[str]:
    """The manifest before the current one, and the files that only it names."""
    previous = directory / ".previous.json"
    if not previous.exists():
        return set()
    return {previous.name} | (named_in(previous) - named_in(directory / "headrace.json"))


def named_in(manifest: Path) -> set[str]:
    body = json.loads(manifest.read_bytes())
    stored = [
        *body["shards"],
        body["index"],
        body["provenance"],
        (body["tokenizer"] or {}).get("stored"),
        *body["further"],
    ]
    return {entry["file"] for entry in stored if entry}


def decoded(dataset: Any) -> list[str]:
    """The texts of a dataset made with the byte tokenizer."""
    return [bytes(record["tokens"][:-1].astype("uint8")).decode() for record in dataset]


def negated(sample: dict[str, Any]) -> dict[str, Any]:
    """For worker processes, which find a function by its name."""
    return {"tokens": -sample["tokens"]}


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    assert type(batch["tokens"]).__module__ == "numpy"
    return {"tokens": 2 * batch["tokens"]}
