"""How do Headrace's servers compare with Ray Data and tf.data service, for the same consumer and the same work?

burning   10 ms of processor time a batch
waiting   100 ms of waiting a batch, twenty at once
killing   10 ms of processor time a batch, and one of the workers is killed while the loop runs

A batch is 4 rows of 128 KB, which are numbered. Every system has two processes that make batches, and all run on this
machine: in a network of their own, where that is allowed. The consumer is a loop whose step sleeps 10 ms, and for the
rate one without a step. Each system is started afresh for each question in each round (`serve_one.py`), and rounds are
interleaved; ratios are to Headrace over Arrow Flight within a round.

Ray Data is read with `streaming_split`, without and with `preserve_order`. tf.data service runs no Python functions, so
operations of a graph spend its 10 ms. Who is not installed, fails or cannot do it is listed in `left_out` with the
reason.

`make peers` runs this. TensorFlow has an environment of its own, `.venv-tfdata`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from children import Failed, lines
from machine import arguments, describe, interleave, print_table, ratio, spread, write_results
from peer import version_of
from serve_passes import FULL, QUICK, STEP_SECONDS
from serve_peer import PEERS, QUESTIONS, REFERENCE, ServePeer
from serve_rows import BATCH_SIZE, BURN_SECONDS, ROW_BYTES, WAIT_SECONDS
from serve_system import AT_ONCE, WORKERS

ONE = Path(__file__).parent / "serve_one.py"
TFDATA_PYTHON = Path(__file__).parents[2] / ".venv-tfdata" / "bin" / "python"
PACKAGES = ("headrace", "pyarrow", "ray", "pandas", "tensorflow-cpu")
MOST_SECONDS = 300
TITLES = {
    "burning": "10 ms of processor time a batch, two workers",
    "waiting": "100 ms of waiting a batch, twenty at once in two workers",
    "killing": "one of two workers is killed while the loop runs",
}
FIGURES = (
    "accelerator_share",
    "batches_per_second",
    "consumer_cpu_seconds_per_batch",
    "all_cpu_seconds_per_batch",
    "first_batch_seconds",
    "cold_first_batch_seconds",
    "start_seconds",
)
COMPARED = {
    "accelerator_share": "share_to_headrace",
    "batches_per_second": "rate_to_headrace",
    "consumer_cpu_seconds_per_batch": "consumer_cpu_to_headrace",
    "first_batch_seconds": "first_batch_to_headrace",
}
COUNTS = ("rows_lost", "rows_twice", "stalled_seconds", "longest_wait_before_seconds", "end_seconds")


@dataclass
class Contest:
    """A question that is asked of all systems."""

    question: str
    scratch: Path
    quick: bool
    tfdata_python: Path
    left_out: dict[str, str] = field(default_factory=dict)
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def turn(self, name: str) -> float:
        """One run of one system, unless it has failed before."""
        if name in self.left_out:
            return 0.0
        command = [self.question, name, "--scratch", str(self.scratch), *(["--quick"] if self.quick else [])]
        python = self.tfdata_python if PEERS[name].is_tfdata else sys.executable
        # TensorFlow would write some lines for each of its processes.
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            (report,), _ = lines(
                command,
                self.scratch,
                1,
                script=ONE,
                python=python,
                environment=environment,
                most_seconds=MOST_SECONDS,
            )
        except Failed as failed:
            self.left_out[name] = f"failed: {failed}"
            return 0.0
        self.reports.setdefault(name, []).append(report)
        return 1.0

    @property
    def whole(self) -> dict[str, list[dict[str, Any]]]:
        """The reports of those who took part in every round."""
        return {name: each for name, each in self.reports.items() if name not in self.left_out}


def main() -> None:
    parser = arguments(__doc__ or "", "peers-serve")
    parser.add_argument("--rounds", type=int, help="rounds (3)")
    parser.add_argument("--only", choices=QUESTIONS, action="append", help="one question; may be repeated")
    parser.add_argument("--peer", choices=list(PEERS), action="append", help="one system; may be repeated")
    parser.add_argument("--tfdata-python", type=Path, help="the Python that has TensorFlow")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.tfdata_python = options.tfdata_python or TFDATA_PYTHON
    body: dict[str, Any] = {"machine": describe(), "versions": _versions(options.tfdata_python)}
    body |= {"rounds": options.rounds, "settings": _settings(options.quick)}
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        for question in options.only or QUESTIONS:
            body[question] = answer(question, Path(folder), options)
    write_results(options, "peers-serve", body)


def _versions(tfdata_python: Path) -> dict[str, str]:
    found = {package: version_of(package) or _version_in(tfdata_python, package) for package in PACKAGES}
    return {package: version for package, version in found.items() if version}


def _version_in(python: Path, package: str) -> str | None:
    """The version of a package in another environment."""
    if not python.exists():
        return None
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return ran.stdout.strip() or None


def _settings(quick: bool) -> dict[str, Any]:
    sizes = QUICK if quick else FULL
    return {
        "batch": f"{BATCH_SIZE} x {ROW_BYTES} bytes",
        "workers": WORKERS,
        "step_seconds": STEP_SECONDS,
        "burn_seconds": BURN_SECONDS,
        "wait_seconds": WAIT_SECONDS,
        "waiting_at_once": AT_ONCE,
        "batches_before_the_clock": sizes.unmeasured,
        "batches": sizes.measured,
        "batches_while_killing": sizes.killing,
        "killed_after_batches": sizes.killed_after,
        "patience_seconds": sizes.patience_seconds,
    }


def answer(question: str, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    contest = Contest(question, scratch, options.quick, options.tfdata_python)
    present = _present(contest, options)
    turns: dict[str, Callable[[], float]] = {
        name: lambda name=name: contest.turn(name)  # type: ignore[misc]
        for name in present
    }
    if turns:
        interleave(turns, options.rounds)
    summary = _killed if question == "killing" else _summary
    found = {name: summary(contest, name) for name in contest.whole}
    show = _show_killing if question == "killing" else _show
    show(f"{question}: {TITLES[question]}", found)
    for name, reason in contest.left_out.items():
        print(f"left out: {name}: {reason}")
    return {
        "question": TITLES[question],
        "reference": REFERENCE,
        "peers": found,
        "left_out": contest.left_out,
    }


def _present(contest: Contest, options: argparse.Namespace) -> list[str]:
    """Those who can be asked; the others are left out, with the reason."""
    present = []
    for name, peer in PEERS.items():
        is_asked = contest.question in peer.questions
        if not is_asked and contest.question not in peer.cannot:
            continue
        reason = _reason_against(name, peer, contest, options)
        if reason:
            contest.left_out[name] = reason
        else:
            present.append(name)
    return present


def _reason_against(name: str, peer: ServePeer, contest: Contest, options: argparse.Namespace) -> str:
    if contest.question in peer.cannot:
        return peer.cannot[contest.question]
    if options.peer and name not in options.peer:
        return "not asked for"
    missing = [package for package in peer.needs if not _has(package, peer, contest)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if contest.quick and not options.peer and not peer.quick:
        return "not part of a quick run"
    return ""


def _has(package: str, peer: ServePeer, contest: Contest) -> bool:
    if peer.is_tfdata:
        return _version_in(contest.tfdata_python, package) is not None
    return version_of(package) is not None


def _summary(contest: Contest, name: str) -> dict[str, Any]:
    reports = contest.whole[name]
    figures: dict[str, Any] = {"note": PEERS[name].note}
    for figure in FIGURES:
        figures[figure] = spread([report[figure] for report in reports])
    figures["checked"] = _checked(reports)
    figures["facts"] = reports[-1]["facts"]
    figures["network_of_its_own"] = all(report["is_alone"] for report in reports)
    reference = contest.whole.get(REFERENCE, [])
    if len(reference) == len(reports):
        for figure, title in COMPARED.items():
            own = [report[figure] for report in reference]
            figures[title] = ratio([report[figure] for report in reports], own)
    return figures


def _checked(reports: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """What was so in every round."""
    first = reports[0]["checked"]
    return {name: all(report["checked"][name] for report in reports) for name in first}


def _killed(contest: Contest, name: str) -> dict[str, Any]:
    reports = contest.whole[name]
    figures: dict[str, Any] = {"note": PEERS[name].note}
    for figure in COUNTS:
        figures[figure] = spread([report[figure] for report in reports])
    for figure in ("killed", "ended", "in_defined_order"):
        figures[figure] = all(report[figure] for report in reports)
    figures["errors"] = [report["raised"] for report in reports if report["raised"]]
    figures["facts"] = reports[-1]["facts"]
    return figures


def _show(title: str, found: Mapping[str, Any]) -> None:
    rows = []
    for name, each in found.items():
        row: list[Any] = [name, each["accelerator_share"]["median"], each["batches_per_second"]["median"]]
        row.append(each.get("rate_to_headrace", {}).get("median", ""))
        row.append(1e3 * each["consumer_cpu_seconds_per_batch"]["median"])
        row.append(1e3 * each["all_cpu_seconds_per_batch"]["median"])
        row += [each["first_batch_seconds"]["median"], each["cold_first_batch_seconds"]["median"]]
        row.append(each["start_seconds"]["median"])
        row.append("defined" if each["checked"]["in_defined_order"] else _order(each["checked"]))
        row.append("yes" if each["checked"]["every_row_once"] else "no")
        rows.append(row)
    header = ["", "share", "batches/s", "to Headrace", "consumer cpu, ms", "all cpu, ms", "first batch, s"]
    header += ["cold, s", "start, s", "order", "every row once"]
    print_table(title, header, rows)


def _order(checked: Mapping[str, bool]) -> str:
    return "the same twice" if checked["same_order_twice"] else "varies"


def _show_killing(title: str, found: Mapping[str, Any]) -> None:
    rows = []
    for name, each in found.items():
        row: list[Any] = [name, "yes" if each["killed"] else "found none"]
        row += [each["rows_lost"]["median"], each["rows_twice"]["median"]]
        row += [each["stalled_seconds"]["median"], each["longest_wait_before_seconds"]["median"]]
        row += [each["end_seconds"]["median"], "yes" if each["ended"] else "no"]
        row.append("defined" if each["in_defined_order"] else "varies")
        rows.append(row)
    header = ["", "killed", "rows lost", "rows twice", "stalled, s", "longest wait before, s"]
    header += ["wait for the end, s", "ended", "order"]
    print_table(title, header, rows)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
