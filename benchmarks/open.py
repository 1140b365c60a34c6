"""How long does opening a large dataset take, and what does it hold afterwards?

Asked of 100 million documents in 1,000 shards: below 100 ms, below 50 MB of private memory, no file
descriptors. Each measurement is a fresh process; files are in the page cache. The limit beside it does the
least that checking a dataset can do: read the manifest's bytes and stat every file it names.
"""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import arguments, describe, interleave, memory_of, print_table, ratio, spread, write_results

TARGET_MS, TARGET_MB = 100, 50
RANDOM_READS = 1000


def main() -> None:
    parser = arguments(__doc__ or "", "open")
    parser.add_argument("--documents", type=int, help="how many documents (100 million)")
    parser.add_argument("--shards", type=int, help="how many shards (1,000)")
    parser.add_argument("--rounds", type=int, help="fresh processes a candidate (9)")
    parser.add_argument("--child", nargs=2, metavar=("ROLE", "PATH"), help="used by the benchmark itself")
    options = parser.parse_args()
    if options.child:
        role, path = options.child
        print(json.dumps({"open": _child_open, "limit": _child_limit}[role](path)))
        return
    documents = options.documents or (20_000 if options.quick else 100_000_000)
    shards = options.shards or (20 if options.quick else 1000)
    rounds = options.rounds or (1 if options.quick else 9)
    machine = describe()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        made = _make(Path(folder) / "dataset", documents, shards)
        body = _measure(str(Path(folder) / "dataset"), rounds)
    write_results(options, "open", {"machine": machine, "dataset": made, **body})
    _show(made, body)


def _make(path: Path, documents: int, shards: int) -> dict[str, Any]:
    """Short documents, so that the disk holds mostly index: 8 bytes of offset and 4 of ordering each."""
    import numpy as np

    from headrace.format.fields import Field
    from headrace.format.finish import finish_dataset
    from headrace.format.ragged import Ragged
    from headrace.format.shard import ShardBuilder
    from headrace.store.local import LocalStore

    path.mkdir(parents=True)
    random = np.random.default_rng(0)
    fields = {"tokens": Field.parse("uint16[*]")}
    entries = []
    for number in range(shards):
        count = documents * (number + 1) // shards - documents * number // shards
        # Lengths with a heavy tail, as of web pages, but a hundred times shorter.
        lengths = np.minimum(random.lognormal(1.8, 0.8, count), 2000).astype(np.int64) + 1
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        tokens = random.integers(0, 2**16, offsets[-1], dtype=np.uint16)
        builder = ShardBuilder(fields)
        builder.append({"tokens": Ragged(tokens, offsets)})
        entries.append(builder.write(LocalStore(path)))
    manifest = finish_dataset(LocalStore(path), fields, entries, "headrace benchmark")
    on_disk = sum(file.stat().st_size for file in path.iterdir())
    return {
        "documents": manifest.records,
        "shards": shards,
        "tokens": sum(entry.elements["tokens"] for entry in entries),
        "bytes_on_disk": on_disk,
        "manifest_bytes": (path / "headrace.json").stat().st_size,
    }


def _measure(path: str, rounds: int) -> dict[str, Any]:
    reports: dict[str, list[Any]] = {"open": [], "limit": []}

    def once(role: str) -> float:
        reports[role].append(_run_child(role, path))
        return float(reports[role][-1]["seconds"])

    once("open"), once("limit")
    reports = {"open": [], "limit": []}
    seconds = interleave({"open": lambda: once("open"), "limit": lambda: once("limit")}, rounds)
    last = reports["open"][-1]
    opened_ms = 1000 * spread(seconds["open"])["median"]
    private_mb = max(report["memory_mb"]["after open"]["uss"] for report in reports["open"])
    return {
        "rounds": rounds,
        "open_seconds": spread(seconds["open"]),
        "limit_seconds": spread(seconds["limit"]),
        "open_to_limit": ratio(seconds["open"], seconds["limit"]),
        "import_seconds": spread([report["import_seconds"] for report in reports["open"]]),
        "random_read_us": spread([report["random_read_us"] for report in reports["open"]]),
        "memory_mb": last["memory_mb"],
        "file_descriptors": last["file_descriptors"],
        "pickled_bytes": last["pickled_bytes"],
        "targets": {
            f"opens in less than {TARGET_MS} ms": opened_ms < TARGET_MS,
            f"private memory less than {TARGET_MB} MB": private_mb < TARGET_MB,
        },
    }


def _run_child(role: str, path: str) -> Any:
    command = [sys.executable, __file__, "--child", role, path]
    # Thread pools of BLAS would take private memory in every process that imports NumPy.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    )


def _child_limit(path: str) -> dict[str, Any]:
    names = [entry["file"] for entry in json.loads(Path(path, "headrace.json").read_bytes())["shards"]]
    started = time.perf_counter()
    Path(path, "headrace.json").read_bytes()
    for name in names:
        os.stat(f"{path}/{name}")
    return {"seconds": time.perf_counter() - started}


def _child_open(path: str) -> dict[str, Any]:
    memory = {"before import": memory_of()}
    started = time.perf_counter()
    import headrace

    open_dataset = headrace.open
    imported = time.perf_counter()
    memory["after import"] = memory_of()
    descriptors = {"before": _descriptors()}
    started_opening = time.perf_counter()
    dataset = open_dataset(path)
    opened = time.perf_counter()
    memory["after open"] = memory_of()
    descriptors["after open"] = _descriptors()
    import numpy as np

    numbers = np.random.default_rng(1).integers(0, len(dataset), RANDOM_READS).tolist()
    started_reading = time.perf_counter()
    for number in numbers:
        dataset[number]
    read = time.perf_counter()
    memory[f"after {RANDOM_READS:,} random documents"] = memory_of()
    descriptors[f"after {RANDOM_READS:,} random documents"] = _descriptors()
    return {
        "seconds": opened - started_opening,
        "import_seconds": imported - started,
        "random_read_us": (read - started_reading) / RANDOM_READS * 1e6,
        "memory_mb": memory,
        "file_descriptors": descriptors,
        "pickled_bytes": len(pickle.dumps(dataset)),
    }


def _descriptors() -> int:
    # Listing the folder holds one itself.
    return len(os.listdir("/proc/self/fd")) - 1


def _show(made: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    size = (
        f"{made['documents']:,} documents in {made['shards']:,} shards, {made['bytes_on_disk'] / 1e9:.2f} GB"
    )
    rows = []
    for name, label in (("open", "headrace.open"), ("limit", "limit: read manifest, stat files")):
        times = body[f"{name}_seconds"]
        rows.append([label, *(1000 * times[which] for which in ("median", "best", "worst"))])
    times = body["import_seconds"]
    rows.append(
        ["import headrace (with NumPy)", *(1000 * times[which] for which in ("median", "best", "worst"))]
    )
    print_table(size, ["milliseconds", "median", "best", "worst"], rows)
    rows = [
        [when, *sizes.values(), body["file_descriptors"].get(when, "")]
        for when, sizes in body["memory_mb"].items()
    ]
    print_table("what the process holds", ["MB", "uss", "pss", "anonymous", "file descriptors"], rows)
    print(
        f"\n  pickled: {body['pickled_bytes']:,} bytes; a random document, first touch: "
        f"{body['random_read_us']['median']:.1f} us; "
        f"open is {body['open_to_limit']['median']:.1f} times the limit"
    )
    for target, met in body["targets"].items():
        print(f"  {'met' if met else 'NOT MET'}: {target}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
