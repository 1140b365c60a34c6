"""How does Headrace compare with its peers, each set up as its own documentation advises?

tokens   shuffled rows of 2,049 tokens as int64, 32 a batch, from the same 100 million tokens
packed   the blocks of Python's standard library as documents, packed into rows of 2,048 with their boundaries
images   JPEG files decoded and resized by Pillow, 32 a batch

Every peer runs in a fresh process each round (`one.py`), and rounds are interleaved; ratios are to Headrace within
a round. Before the rounds each has a trial, whose figures do not count: its memory is watched, and what it delivers
is checked. Who cannot be installed, fails or gives wrong data is listed in `left_out` with the reason.

`make peers` makes an environment with all of them, runs this, and draws docs/peers.svg (`chart.py`).
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import image_peers
import packed_peers
import token_data
import token_peers
from children import Failed, prepare, run_one
from machine import arguments, describe, interleave, print_table, ratio, spread, write_results
from peer import Peer, peers_of, shown, version_of

LEFT_OUT_ALWAYS = {
    "packed": {
        "MosaicML Streaming": "does not pack documents",
        "litdata": "does not pack documents: fixed blocks, without boundaries",
        "webdataset": "does not pack documents",
    }
}
PACKAGES = (
    "torch",
    "torchdata",
    "mosaicml-streaming",
    "litdata",
    "grain",
    "datasets",
    "webdataset",
    "trl",
    "transformers",
    "spdl-core",
    "spdl-io",
    "pillow",
)


@dataclass(frozen=True, kw_only=True)
class Question:
    title: str
    unit: str
    """What is counted: 'tokens' or 'images'."""
    each: int
    """How many of them a batch holds; of packed rows, padding included."""
    reference: str
    make: Callable[[Path, int], None]
    sizes: tuple[int, int]
    """What `make` gets: for the rounds, and for the check."""
    quick_sizes: tuple[int, int]
    unmeasured: int
    longer: float = 1.0
    """Turns so many times as long, where batches are few."""


QUESTIONS = {
    "tokens": Question(
        title="rows of 2,049 tokens, 32 a batch, shuffled, int64",
        unit="tokens",
        each=token_data.SEQ_LEN * token_data.BATCH_SIZE,
        reference=token_peers.REFERENCE,
        make=token_data.make,
        sizes=(48 * 1024, 64 * 64),
        quick_sizes=(512, 256),
        unmeasured=32,
    ),
    "packed": Question(
        title="blocks of Python's standard library packed into rows of 2,048, 32 a batch, with boundaries",
        unit="tokens",
        each=packed_peers.SEQ_LEN * packed_peers.BATCH_SIZE,
        reference=packed_peers.REFERENCE,
        make=packed_peers.make,
        sizes=(8_000_000, 0),
        quick_sizes=(300_000, 0),
        unmeasured=8,
    ),
    "images": Question(
        title="JPEG 500 x 375, decoded and resized to 224 x 224, 32 a batch",
        unit="images",
        each=image_peers.BATCH_SIZE,
        reference=image_peers.REFERENCE,
        make=image_peers.make,
        sizes=(512, 40),
        quick_sizes=(32, 0),
        unmeasured=12,
        longer=2.0,
    ),
}


def main() -> None:
    parser = arguments(__doc__ or "", "peers")
    parser.add_argument("--rounds", type=int, help="rounds after the trial (3)")
    parser.add_argument("--seconds", type=float, help="length of a turn (1.5)")
    parser.add_argument(
        "--only", choices=list(QUESTIONS), action="append", help="one question; may be repeated"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (0 if options.quick else 3)
    options.seconds = options.seconds or (0.05 if options.quick else 1.5)
    versions = {package: found for package in PACKAGES if (found := version_of(package))}
    body: dict[str, Any] = {"machine": describe(), "versions": versions, "rounds": options.rounds}
    body["seconds_per_turn"] = options.seconds
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        for name in options.only or QUESTIONS:
            body[name] = answer(name, QUESTIONS[name], Path(folder), options)
    write_results(options, "peers", body)


def answer(name: str, question: Question, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder, small = _make(name, question, scratch, options.quick)
    present, left_out = _present(name, options.quick)
    left_out |= LEFT_OUT_ALWAYS.get(name, {})
    for peer_name in list(present):
        if present[peer_name].prepare:
            try:
                for place in {folder, small}:
                    prepare(name, peer_name, place, scratch)
            except Failed as failed:
                left_out[peer_name] = str(failed)
                del present[peer_name]
    seconds = options.seconds * question.longer
    unmeasured = 2 if options.quick else question.unmeasured
    run = partial(run_one, name, scratch=scratch, seconds=seconds, unmeasured=unmeasured)
    reports, trials = _take_turns(run, present, folder, small, left_out, options.rounds)
    found = {
        label: _summary(question, trials[label], reports[label], reports.get(question.reference))
        for label in reports
    }
    _show(name, question, found)
    for label, reason in left_out.items():
        print(f"left out: {label}: {reason}")
    return {"question": question.title, "reference": question.reference, "peers": found, "left_out": left_out}


def _make(name: str, question: Question, scratch: Path, quick: bool) -> tuple[Path, Path]:
    size, size_of_check = question.quick_sizes if quick else question.sizes
    folder = scratch / name
    question.make(folder, size)
    if not size_of_check:
        return folder, folder
    small = scratch / f"{name}-small"
    question.make(small, size_of_check)
    return folder, small


def _present(name: str, quick: bool) -> tuple[dict[str, Peer], dict[str, str]]:
    present, left_out = {}, {}
    for peer_name, peer in peers_of(name).items():
        missing = peer.missing()
        if missing:
            left_out[peer_name] = f"not installed: {', '.join(missing)}"
        elif quick and peer.quick is None:
            left_out[peer_name] = "not part of a quick run"
        else:
            present[peer_name] = peer
    return present, left_out


def _take_turns(
    run: Callable[..., Any],
    present: dict[str, Peer],
    folder: Path,
    small: Path,
    left_out: dict[str, str],
    rounds: int,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    """A trial of each, then the rounds. Without rounds the trial's figures are taken, for what they are worth."""
    trials: dict[str, dict[str, Any]] = {}
    reports: dict[str, list[dict[str, Any]]] = {}
    candidates: dict[str, Callable[[], float]] = {}
    for name, peer in present.items():
        for workers in peer.workers if rounds else (peer.quick,):
            label = shown(name, peer, workers)
            try:
                trials[label] = run(name, workers, folder, check=small)
                if trials[label]["checked"].get("every_one_once", True) is False:
                    raise Failed(f"an epoch is not every row once: {trials[label]['checked']}")
            except Failed as failed:
                left_out[label] = str(failed)
                continue
            trials[label] |= {"note": peer.note, "limit": peer.limit}
            reports[label] = [] if rounds else [trials[label]]

            def turn(label: str = label, name: str = name, workers: int = workers) -> float:
                try:
                    reports[label].append(run(name, workers, folder))
                except Failed as failed:
                    left_out[label] = f"failed in a round: {failed}"
                    return 0.0
                return 1.0

            candidates[label] = turn
    print(f"{len(trials)} tried and checked, {rounds} rounds to come", flush=True)
    if rounds:
        interleave(candidates, rounds)
    return {label: each for label, each in reports.items() if label not in left_out}, trials


def _summary(
    question: Question,
    trial: dict[str, Any],
    reports: list[dict[str, Any]],
    reference: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    each = _per_batch(question, trial)
    per_million = 1e6 if question.unit == "tokens" else 1.0
    rates = [report["batches_per_second"] * each for report in reports]
    cpu = [report["cpu_seconds_per_batch"] / each * per_million for report in reports]
    figures = {
        "limit": trial["limit"],
        "note": trial["note"],
        f"{question.unit}_per_second": spread_of_rates(rates),
        "cpu_seconds_per_million_tokens" if question.unit == "tokens" else "cpu_seconds_per_image": spread(
            cpu
        ),
        "first_batch_seconds": spread([report["first_batch_seconds"] for report in reports]),
        "import_seconds": spread([report["import_seconds"] for report in reports]),
        "peak_memory_mb": trial["peak_memory_mb"],
        "checked": trial["checked"],
    }
    if reference and len(reference) == len(reports):
        own = [report["batches_per_second"] for report in reference]
        figures["rate_to_headrace"] = ratio([report["batches_per_second"] for report in reports], own)
        first = [report["first_batch_seconds"] for report in reference]
        figures["first_batch_to_headrace"] = ratio([r["first_batch_seconds"] for r in reports], first)
    return figures


def _per_batch(question: Question, trial: dict[str, Any]) -> float:
    """Tokens or images of a batch, padding left out."""
    if "tokens_per_row" in trial["checked"]:
        return float(trial["checked"]["tokens_per_row"] * packed_peers.BATCH_SIZE)
    return question.each


def spread_of_rates(rates: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "rounds": [round(rate) for rate in rates],
    }


def _show(name: str, question: Question, found: dict[str, Any]) -> None:
    tokens = question.unit == "tokens"
    rate, scale = f"{question.unit}_per_second", 1e6 if tokens else 1
    cpu = "cpu_seconds_per_million_tokens" if tokens else "cpu_seconds_per_image"
    rows = []
    for label, each in sorted(found.items(), key=lambda item: -item[1][rate]["median"]):
        row: list[Any] = [label, each[rate]["median"] / scale]
        row.append(each.get("rate_to_headrace", {}).get("median", ""))
        row += [each["first_batch_seconds"]["median"], each[cpu]["median"] * 1000]
        row += [each["peak_memory_mb"]["uss"], each["peak_memory_mb"]["pss"]]
        row.append(each["checked"].get("padding_percent", ""))
        rows.append(row)
    header = ["", f"{'million ' if tokens else ''}{question.unit}/s", "to Headrace", "first batch, s"]
    header += [f"cpu ms / {'million tokens' if tokens else 'image'}", "peak USS, MB", "PSS", "padding %"]
    print_table(f"{name}: {question.title}", header, rows)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
