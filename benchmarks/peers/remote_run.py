"""How does Headrace compare with its peers when the data is in a bucket and nothing is cached?

remote_tokens   rows of 2,049 tokens as int64, 32 a batch, shuffled as each peer can
remote_images   images of 50,000 to 100,000 bytes, 32 a batch, not decoded

The server is a real one on loopback, behind a proxy that adds 30 ms to each request and lets 300 MB through a second
(`benchmarks/remote.py`). Every peer reads the same content, in its own format, with an empty cache. It runs in a fresh
process each round (`remote_one.py`): once for an epoch, once from the state of half an epoch to its next batch. Rounds
are interleaved; ratios are to Headrace within a round. Before the rounds each has a trial without the proxy, whose
figures do not count: its memory is watched, what it delivers is checked, and its state is kept. Who is not installed,
fails or gives rows twice is listed in `left_out` with the reason.

`make peers` runs this, and draws the results into docs/peers.svg (`chart.py`).
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import remote_formats
import token_data
from children import Failed, lines
from machine import arguments, describe, interleave, print_table, ratio, spread, write_results
from peer import shown, version_of
from remote_child import in_a_process
from remote_peer import BATCH_SIZE, QUESTIONS, RemotePeer, remote_peers_of
from remote_server import BUCKET, BYTES_PER_SECOND, LATENCY_SECONDS, Endpoint, proxy, server
from run import spread_of_rates

ONE = Path(__file__).parent / "remote_one.py"
REFERENCE = "Headrace Loader"
PACKAGES = ("torch", "mosaicml-streaming", "litdata", "s3torchconnector", "obstore", "boto3")
UNITS = {"remote_tokens": "tokens", "remote_images": "images"}
TITLES = {
    "remote_tokens": "rows of 2,049 tokens from a bucket, 32 a batch, int64, nothing cached",
    "remote_images": "images of 50 to 100 KB from a bucket, 32 a batch, not decoded, nothing cached",
}


@dataclass
class Contest:
    """A question that is asked of all peers."""

    question: str
    folder: Path
    rows: int
    """Rows of tokens, or images."""
    near: Endpoint
    far: Endpoint
    scratch: Path
    left_out: dict[str, str] = field(default_factory=dict)
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def items(self) -> int:
        """Tokens or images of an epoch."""
        return self.rows * (token_data.SEQ_LEN if self.question == "remote_tokens" else 1)

    @property
    def half(self) -> int:
        """The batches of half an epoch. Headrace may have a row less for each unit."""
        return max(1, self.rows // BATCH_SIZE // 2 - 1)

    def run(
        self, name: str, peer: RemotePeer, workers: int, endpoint: Endpoint, expected: int, *more: str
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Start a peer with an empty cache. It is always the same folder, because a state of litdata names it."""
        cache = self.scratch / "cache"
        cache.mkdir()
        address = f"s3://{BUCKET}/{self.question}/{peer.reads}"
        command = [self.question, name, str(workers), address, "--half", str(self.half), *more]
        command += ["--cache", str(cache)]
        try:
            return lines(command, self.scratch, expected, script=ONE, environment=environment_of(endpoint))
        finally:
            shutil.rmtree(cache, ignore_errors=True)


def environment_of(endpoint: Endpoint) -> dict[str, str]:
    """MosaicML and boto3 have names of their own for the server and the region."""
    return {
        **endpoint.environment,
        "S3_ENDPOINT_URL": endpoint.address,
        "AWS_DEFAULT_REGION": endpoint.environment["AWS_REGION"],
    }


def main() -> None:
    parser = arguments(__doc__ or "", "peers-remote")
    parser.add_argument("--rounds", type=int, help="rounds after the trial (3)")
    parser.add_argument("--megabytes", type=int, help="size of the tokens, and of the images (300)")
    parser.add_argument(
        "--only", choices=list(QUESTIONS), action="append", help="one question; may be repeated"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (0 if options.quick else 3)
    options.megabytes = options.megabytes or (4 if options.quick else 300)
    versions = {package: found for package in PACKAGES if (found := version_of(package))}
    body: dict[str, Any] = {"machine": describe(), "versions": versions, "rounds": options.rounds}
    body["network"] = {"latency_seconds": LATENCY_SECONDS, "bytes_per_second": BYTES_PER_SECOND}
    with (
        tempfile.TemporaryDirectory(dir=options.scratch) as folder,
        server(Path(folder) / "s3") as near,
        proxy(near) as far,
    ):
        for question in options.only or QUESTIONS:
            body[question] = answer(question, Path(folder), near, far, options)
    write_results(options, "peers-remote", body)


def answer(
    question: str, scratch: Path, near: Endpoint, far: Endpoint, options: argparse.Namespace
) -> dict[str, Any]:
    folder = scratch / question
    rows = _make(question, folder, options.megabytes * 10**6)
    contest = Contest(question, folder, rows, near, far, scratch)
    present = _present(contest, options.quick)
    _upload(contest, present)
    for name, peer in present.items():
        for workers in (peer.quick,) if options.quick else peer.workers:
            _try(contest, name, peer, workers or 0)
    print(f"{len(contest.trials)} tried and checked, {options.rounds} rounds to come", flush=True)
    _take_turns(contest, present, options.rounds)
    found = {label: _summary(contest, label) for label in contest.reports if contest.reports[label]}
    _show(contest, found)
    shutil.rmtree(folder)
    return {
        "question": TITLES[question],
        "reference": REFERENCE,
        UNITS[question]: contest.items,
        "peers": found,
        "left_out": contest.left_out,
    }


def _make(question: str, folder: Path, size: int) -> int:
    """How many rows or images there are."""
    if question == "remote_tokens":
        rows = size // (2 * token_data.SEQ_LEN * BATCH_SIZE) * BATCH_SIZE
        token_data.make(folder, rows)
        return rows
    mean = (remote_formats.SMALLEST_IMAGE + remote_formats.LARGEST_IMAGE) // 2
    images = max(2, size // (mean * BATCH_SIZE)) * BATCH_SIZE
    folder.mkdir()
    remote_formats.make_images(folder, images)
    return images


def _present(contest: Contest, is_quick: bool) -> dict[str, RemotePeer]:
    present = {}
    for name, peer in remote_peers_of(contest.question).items():
        missing = peer.missing()
        if missing:
            contest.left_out[name] = f"not installed: {', '.join(missing)}"
        elif is_quick and peer.quick is None:
            contest.left_out[name] = "not part of a quick run"
        else:
            present[name] = peer
    return present


def _upload(contest: Contest, present: dict[str, RemotePeer]) -> None:
    """Write the data in each peer's format, and upload it."""
    uploaded = set()
    for name, peer in list(present.items()):
        try:
            if peer.write is not None:
                contest.run(name, peer, 0, contest.near, 1, "--prepare", str(contest.folder))
        except Failed as failed:
            contest.left_out[name] = f"did not write its format: {failed}"
            del present[name]
            continue
        if peer.reads not in uploaded:
            uploaded.add(peer.reads)
            folder, prefix = contest.folder / peer.reads, f"{contest.question}/{peer.reads}"
            environment = dict(contest.near.environment)
            in_a_process(environment, remote_formats.upload, folder, BUCKET, prefix, environment)


def _try(contest: Contest, name: str, peer: RemotePeer, workers: int) -> None:
    """A trial, without the proxy."""
    label = shown(name, peer, workers)
    state = contest.scratch / f"{contest.question}-{label}.state"
    try:
        (report, checked), memory = contest.run(name, peer, workers, contest.near, 2, "--learn", str(state))
        if checked["twice"]:
            raise Failed(f"an epoch gives {checked['twice']} of {checked['rows']} rows again")
    except Failed as failed:
        contest.left_out[label] = f"did not run: {failed}"
        return
    if not peer.limit:
        checked["share_of_epoch"] = report["items"] / contest.items
    contest.trials[label] = {"report": report, "checked": checked, "peak_memory_mb": memory, "peer": peer}
    contest.reports[label] = []


def _take_turns(contest: Contest, present: Mapping[str, RemotePeer], rounds: int) -> None:
    """The rounds. A quick run has one, and takes the trial's figures instead of another epoch's."""
    turns: dict[str, Callable[[], float]] = {}
    for name, peer in present.items():
        for workers in peer.workers:
            label = shown(name, peer, workers)
            if label not in contest.trials:
                continue

            def turn(
                label: str = label, name: str = name, peer: RemotePeer = peer, workers: int = workers
            ) -> float:
                if label in contest.left_out:
                    return 0.0
                try:
                    contest.reports[label].append(_measured(contest, label, name, peer, workers, rounds))
                except Failed as failed:
                    contest.left_out[label] = f"failed in a round: {failed}"
                    contest.reports[label] = []
                return 1.0

            turns[label] = turn
    interleave(turns, max(1, rounds))


def _measured(
    contest: Contest, label: str, name: str, peer: RemotePeer, workers: int, rounds: int
) -> dict[str, Any]:
    report = dict(contest.trials[label]["report"])
    if rounds:
        report = contest.run(name, peer, workers, contest.far, 1)[0][0]
    if not peer.limit:
        state = contest.scratch / f"{contest.question}-{label}.state"
        resumed = contest.run(name, peer, workers, contest.far, 1, "--resume", str(state))[0][0]
        report["resume_seconds"] = resumed["resume_seconds"]
    return report


def _rates(contest: Contest, label: str) -> list[float]:
    is_limit = contest.trials[label]["peer"].limit
    whole = contest.items if is_limit else 1
    return [whole * report["items"] / report["seconds"] for report in contest.reports[label]]


def _summary(contest: Contest, label: str) -> dict[str, Any]:
    trial, reports, rates = contest.trials[label], contest.reports[label], _rates(contest, label)
    peer = trial["peer"]
    per_million = 1e6 if contest.question == "remote_tokens" else 1.0
    cpu_name = "cpu_seconds_per_million_tokens" if per_million > 1 else "cpu_seconds_per_image"
    items = contest.items if peer.limit else 1
    cpu = [report["cpu_seconds"] / (items * report["items"]) * per_million for report in reports]
    figures: dict[str, Any] = {
        "limit": peer.limit,
        "note": peer.note,
        f"{UNITS[contest.question]}_per_second": spread_of_rates(rates),
        cpu_name: spread(cpu),
        "first_batch_seconds": spread([report["first_batch_seconds"] for report in reports]),
        "import_seconds": spread([report["import_seconds"] for report in reports]),
        "peak_memory_mb": trial["peak_memory_mb"],
        "checked": trial["checked"],
    }
    if not peer.limit:
        figures["resume_seconds"] = spread([report["resume_seconds"] for report in reports])
    if len(contest.reports.get(REFERENCE, [])) == len(reports):
        figures["rate_to_headrace"] = ratio(rates, _rates(contest, REFERENCE))
    return figures


def _show(contest: Contest, found: Mapping[str, Any]) -> None:
    unit = UNITS[contest.question]
    rate, scale = f"{unit}_per_second", 1e6 if unit == "tokens" else 1
    rows = []
    for label, each in sorted(found.items(), key=lambda item: -item[1][rate]["median"]):
        row: list[Any] = [label, each[rate]["median"] / scale]
        row.append(each.get("rate_to_headrace", {}).get("median", ""))
        row += [each["first_batch_seconds"]["median"], each.get("resume_seconds", {}).get("median", "")]
        row += [each["import_seconds"]["median"], each["peak_memory_mb"]["uss"]]
        row.append(each["checked"].get("share_of_epoch", ""))
        rows.append(row)
    header = ["", f"{'million ' if scale > 1 else ''}{unit}/s", "to Headrace", "first batch, s", "resume, s"]
    header += ["of it imports, s", "peak USS, MB", "share of epoch"]
    print_table(f"{contest.question}: {TITLES[contest.question]}", header, rows)
    for label, reason in contest.left_out.items():
        print(f"left out: {label}: {reason}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
