"""How fast does text become a dataset, and how much of that is the tokenizer's own work?

The same texts and the same 2 cores for all, in turns:

limit       gigatoken alone on texts in memory, two processes with half each: through the library's own
            encoder interface, and through gigatoken's plain `encode_batch` on lists of bytes
ceiling     the same while the texts are read from Parquet or JSON lines, and nothing else
build       `headrace.build` from Parquet and from JSON lines: from the call to the manifest, fsync included
datasets    `datasets.map` with the tokenizers library, then nanoGPT's memmap, on a share of the corpus
tokenizers  the tokenizers library alone, on the same share

Asked: a build at 0.6 of the limit or more, and 20 times as fast as datasets. A build has a fixed cost too
(processes, imports, the check that the fast encoder is right), so it is measured at two sizes and told apart
from the slope. Also: the peak memory at both sizes, and how long a build takes that finds nothing left to do.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from corpus import VOCABULARY, train_tokenizer, write_corpus
from machine import PeakMemory, arguments, describe, interleave, print_table, ratio, spread, write_results

WORKERS = 2
TARGET_OF_LIMIT, TARGET_TIMES_DATASETS = 0.6, 20.0
RIVALS = Path(__file__).with_name("rivals.py")
CONTINUED_RUNS = 3
ENDINGS = {"parquet": "Parquet", "jsonl": "JSON lines"}
LIMITS = ("limit, our interface", "limit, lists of bytes")
SIZE_OF = {
    "build of a quarter from Parquet": "quarter",
    "build of a quarter from JSON lines": "quarter",
    "tokenizers alone": "share",
    "datasets.map and memmap": "share",
}


def main() -> None:
    parser = arguments(__doc__ or "", "build")
    parser.add_argument("--megabytes", type=float, help="text in the whole corpus (400)")
    parser.add_argument("--share-megabytes", type=float, help="text for the slow libraries (24)")
    parser.add_argument("--rounds", type=int, help="(5)")
    options = parser.parse_args()
    whole = options.megabytes or (0.2 if options.quick else 400)
    share = options.share_megabytes or (None if options.quick else 24)
    rounds = options.rounds or (1 if options.quick else 5)
    machine = describe()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        bench = _Bench(Path(folder), workers=1 if options.quick else WORKERS)
        # A quick run has no share of its own: the slow libraries get the whole, which is small.
        bench.prepare({"whole": whole, "quarter": whole / 4} | ({"share": share} if share else {}))
        endings = [*ENDINGS][:1] if options.quick else [*ENDINGS]
        figures = bench.compare(endings, rounds)
        bench.check_same_tokens()
        peaks = {} if options.quick else {"quarter": bench.peak_memory("quarter", endings)}
        continued, peaks["whole"] = bench.continued(endings, 1 if options.quick else CONTINUED_RUNS)
        body = {
            "workers": bench.workers,
            "corpora": bench.corpora,
            **_summary(bench, figures),
            "peak_memory_mb": peaks,
            "nothing_left_to_do_seconds": continued,
        }
    if options.quick:
        body["targets"] = {}  # nothing but fixed costs was measured
    write_results(options, "build", {"machine": machine, **body})
    _show(body)


@dataclass
class _Bench:
    folder: Path
    workers: int
    corpora: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def prepare(self, sizes: Mapping[str, float]) -> None:
        for name, megabytes in sizes.items():
            self.corpora[name] = write_corpus(self.folder / name, int(megabytes * 1e6))
        vocabulary = min(VOCABULARY, int(sizes["whole"] * 10_000))
        self.tokenizer = train_tokenizer(self.folder / "whole", 20_000_000, vocabulary)

    def compare(self, endings: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Seconds of each candidate, round by round; their CPU seconds go to `cpu`."""
        candidates: dict[str, Callable[[], dict[str, Any]]] = {
            LIMITS[0]: lambda: self._encode("interface", "whole")
        }
        for beginning, size in (("build", "whole"), ("build of a quarter", "quarter")):
            for ending in endings:
                candidates[f"{beginning} from {ENDINGS[ending]}"] = partial(self._build, size, ending)
        candidates[LIMITS[1]] = lambda: self._encode("plain", "whole")
        for ending in endings:
            candidates[f"ceiling from {ENDINGS[ending]}"] = partial(self._encode, "reading", "whole", ending)
        share = self.size_of("tokenizers alone")
        candidates["tokenizers alone"] = lambda: self._encode("huggingface", share)
        if importlib.util.find_spec("datasets"):
            candidates["datasets.map and memmap"] = self._datasets
        else:
            print("`datasets` is not installed: what people do today is left out (pip install datasets)")

        def timed(name: str) -> Callable[[], float]:
            def run() -> float:
                report = candidates[name]()
                self.reports.setdefault(name, []).append(report)
                return float(report["seconds"])

            return run

        return interleave({name: timed(name) for name in candidates}, rounds)

    def size_of(self, name: str) -> str:
        """Which of the corpora a candidate gets."""
        wanted = SIZE_OF.get(name, "whole")
        return wanted if wanted in self.corpora else "whole"

    def check_same_tokens(self) -> None:
        """All candidates must have done the same work: one number of tokens for each corpus."""
        found: dict[str, set[int]] = {}
        if "share" in self.corpora:
            found["share"] = {self._build("share", "parquet")["tokens"]}
        for name, reports in self.reports.items():
            found.setdefault(self.size_of(name), set()).update(report["tokens"] for report in reports)
        if any(len(numbers) > 1 for numbers in found.values()):
            raise SystemExit(f"candidates gave different numbers of tokens: {found}")

    def _command(self, role: str, size: str, ending: str = "parquet", *more: str) -> list[str]:
        corpus = self.folder / size / f"corpus.{ending}"
        return [
            sys.executable,
            str(RIVALS),
            role,
            str(corpus),
            str(self.tokenizer),
            "--workers",
            str(self.workers),
            *more,
        ]

    def _build(self, size: str, ending: str) -> dict[str, Any]:
        with self._fresh("built") as out:
            report = _run(self._command("build", size, ending, "--out", str(out)))
        if report["documents"] != self.corpora[size]["documents"] or report["encoder"] != "gigatoken":
            raise SystemExit(f"not the build that was to be measured: {report}")
        return dict(report)

    def _encode(self, encoder: str, size: str, ending: str = "parquet") -> dict[str, Any]:
        """Seconds until the slower of two processes has encoded its half, loading left out."""
        count = self.workers
        shares = [("--encoder", encoder, "--share", str(part), str(count)) for part in range(count)]
        processes = [_start(self._command("encode", size, ending, *share)) for share in shares]
        for process in processes:
            _read(process)
        for process in processes:
            _pipe(process.stdin).write("go\n")
            _pipe(process.stdin).flush()
        reports = [_read(process) for process in processes]
        for process in processes:
            process.communicate()
        return {
            "seconds": max(report["encode_seconds"] for report in reports),
            "with_load_seconds": max(report["load_seconds"] + report["encode_seconds"] for report in reports),
            "cpu_seconds": sum(report["cpu_seconds"] for report in reports),
            # A build ends every document with a token; an encoder alone does not.
            "tokens": sum(report["tokens"] for report in reports) + self.corpora[size]["documents"],
        }

    def _datasets(self) -> dict[str, Any]:
        with self._fresh("datasets") as out:
            out.mkdir()
            # nanoGPT writes in 1,024 pieces whatever the size: give a share its share of that cost.
            share = self.size_of("datasets.map and memmap")
            part = self.corpora[share]["text_bytes"] / self.corpora["whole"]["text_bytes"]
            pieces = ("--write-batches", str(max(1, round(1024 * part))))
            report = _run(self._command("datasets", share, "parquet", "--out", str(out), *pieces))
        return dict(report)

    def peak_memory(self, size: str, endings: Sequence[str]) -> dict[str, dict[str, float]]:
        """Of the process that calls `headrace.build` and its workers. Sampling slows it: a run of its own."""
        peaks = {}
        for ending in endings:
            with self._fresh("watched") as out:
                peaks[ending] = _watched(self._command("build", size, ending, "--out", str(out)))
        return peaks

    def continued(
        self, endings: Sequence[str], runs: int
    ) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        """A finished build, run again: everything is looked at, nothing is done. And the peak memory of the first."""
        found, peaks = {}, {}
        for ending in endings:
            with self._fresh("continued") as out:
                command = self._command("build", "whole", ending, "--out", str(out))
                peaks[ending] = _watched(command)
                reports = [_run(command) for _ in range(runs)]
            if any(report["built_tasks"] for report in reports):
                raise SystemExit("a continued build did something")
            found[ending] = spread([report["seconds"] for report in reports])
        return found, peaks

    @contextlib.contextmanager
    def _fresh(self, name: str) -> Any:
        out = self.folder / name
        try:
            yield out
        finally:
            shutil.rmtree(out, ignore_errors=True)


def _start(command: Sequence[str]) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _watched(command: Sequence[str]) -> dict[str, float]:
    """Its peak memory."""
    process = _start(command)
    with PeakMemory(process.pid, 0.05) as peak:
        process.communicate()
    return peak.mb


def _run(command: Sequence[str]) -> Any:
    process = _start(command)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[1:3])} failed")
    return json.loads(output.splitlines()[-1])


def _read(process: "subprocess.Popen[str]") -> Any:
    return json.loads(_pipe(process.stdout).readline())


def _pipe(stream: Any) -> Any:
    if stream is None:
        raise SystemExit("a process has no pipe")
    return stream


def _summary(bench: _Bench, figures: Mapping[str, list[float]]) -> dict[str, Any]:
    sizes = {name: bench.size_of(name) for name in figures}
    megabytes = {name: bench.corpora[size]["text_bytes"] / 1e6 for name, size in sizes.items()}
    speeds = {name: [megabytes[name] / s for s in seconds] for name, seconds in figures.items()}
    cpu = {name: [report["cpu_seconds"] for report in reports] for name, reports in bench.reports.items()}
    return {
        "candidates": {
            name: {
                "text_mb": round(megabytes[name], 1),
                "seconds": spread(seconds),
                "mb_per_second": {"median": statistics.median(speeds[name]), "best": max(speeds[name])},
                "mb_per_cpu_second": megabytes[name] / statistics.median(cpu[name]),
                "measured_on_a_share": sizes[name] == "share",
            }
            for name, seconds in figures.items()
        },
        **_compared(bench, speeds, cpu, megabytes),
        "stages_of_datasets": bench.reports.get("datasets.map and memmap", [None])[-1],
    }


def _compared(
    bench: _Bench,
    speeds: Mapping[str, list[float]],
    cpu: Mapping[str, list[float]],
    megabytes: Mapping[str, float],
) -> dict[str, Any]:
    """Ratios, and what a build costs apart from its fixed cost, against the faster limit of each round."""
    limit = [max(pair) for pair in zip(*(speeds[name] for name in LIMITS), strict=True)]
    limit_with_load = [
        megabytes[LIMITS[0]] / report["with_load_seconds"] for report in bench.reports[LIMITS[0]]
    ]
    limit_cpu = min(statistics.median(cpu[name]) for name in LIMITS) / megabytes[LIMITS[0]]
    ratios, targets, costs = {}, {}, {}
    for kind in ENDINGS.values():
        name, quarter = f"build from {kind}", f"build of a quarter from {kind}"
        if name not in speeds:
            continue
        of_limit = ratios[f"{name} / limit"] = ratio(speeds[name], limit)
        ratios[f"{name} / limit with its load"] = ratio(speeds[name], limit_with_load)
        ratios[f"ceiling from {kind} / limit"] = ratio(speeds[f"ceiling from {kind}"], limit)
        ratios[f"{name} / ceiling"] = ratio(speeds[name], speeds[f"ceiling from {kind}"])
        targets[f"{name} at {TARGET_OF_LIMIT} of the limit"] = of_limit["median"] >= TARGET_OF_LIMIT
        if "datasets.map and memmap" in speeds:
            times = ratios[f"{name} / datasets"] = ratio(speeds[name], speeds["datasets.map and memmap"])
            targets[f"{name} {TARGET_TIMES_DATASETS:.0f} times datasets"] = (
                times["median"] >= TARGET_TIMES_DATASETS
            )
        whole_cpu, quarter_cpu = statistics.median(cpu[name]), statistics.median(cpu[quarter])
        slope = max((whole_cpu - quarter_cpu) / (megabytes[name] - megabytes[quarter]), 1e-9)
        costs[kind] = {
            "fixed_cpu_seconds": whole_cpu - slope * megabytes[name],
            "mb_per_cpu_second_beyond_that": 1 / slope,
            "of_limit_beyond_that": limit_cpu / slope,
        }
    return {"ratios": ratios, "targets": targets, "build_costs": costs}


def _show(body: Mapping[str, Any]) -> None:
    rows = [
        [name, c["text_mb"], c["seconds"]["median"], *c["mb_per_second"].values(), c["mb_per_cpu_second"]]
        for name, c in body["candidates"].items()
    ]
    header = ["", "MB of text", "seconds", "MB/s, median", "MB/s, best", "MB per CPU second"]
    print_table(f"{body['workers']} processes; each row's rounds alternate with the others'", header, rows)
    rows = [[name, *ratios.values()] for name, ratios in body["ratios"].items()]
    print_table("ratios of speed", ["", "median", "lowest", "highest"], rows)
    rows = [[kind, *costs.values()] for kind, costs in body["build_costs"].items()]
    header = ["a build from", "fixed CPU seconds", "MB per CPU second beyond", "of the limit's beyond"]
    print_table("CPU time, which a busy machine changes less", header, rows)
    rows = [
        [f"{size}, {ending}", *peak.values()]
        for size, endings in body["peak_memory_mb"].items()
        for ending, peak in endings.items()
    ]
    print_table("peak memory of all processes of a build", ["MB", "uss", "pss", "anonymous"], rows)
    for ending, seconds in body["nothing_left_to_do_seconds"].items():
        print(f"\n  nothing left to do, {ending}: {seconds['median']:.2f} s", end="")
    print()
    for target, met in body["targets"].items():
        print(f"  {'met' if met else 'NOT MET'}: {target}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
