"""How long until the first batch of a billion packed documents, and how full are the rows?

plan         the packing itself, on the histogram of web-like lengths, for three lengths of rows
first batch  a fresh process: import, open the dataset, make a Loader, take one batch; the seconds of each step,
             and the memory that is the process's own
rivals       other packers on a million documents of the same lengths, all cut to fit a row (`packing_rivals.py`)

A billion documents of a thousand tokens are 2 TB. Here the shards have real offsets, histograms and index, 12
bytes a document, but their tokens are holes in sparse files: they read as zeros and take no disk. Only the
checksums of whole shards are not right, which opening does not look at.

The child that is measured runs this file too, so everything but the standard library is imported where it is used.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import arguments, describe, memory_of, print_table, spread, write_results

SEQ_LENS = (2048, 8192, 32768)
BATCH_SIZE = 32
LONGEST = 1_000_000
DISK_BYTES_A_DOCUMENT = 20
"""8 of offsets, 4 of index, and while the index is made 4 more; the rest is to spare."""


def main() -> None:
    parser = arguments(__doc__ or "", "packing")
    parser.add_argument("--documents", type=int, help="how many documents (1 billion)")
    parser.add_argument("--shards", type=int, help="how many shards (1,000)")
    parser.add_argument("--rounds", type=int, help="plans and fresh processes for each length of rows (5)")
    parser.add_argument("--rival-documents", type=int, help="documents for other packers (1 million)")
    parser.add_argument(
        "--dataset", type=Path, help="a dataset that this benchmark made, or where to keep one"
    )
    parser.add_argument("--child", nargs=3, metavar=("PATH", "SEQ_LEN", "STARTED"), help="used by itself")
    options = parser.parse_args()
    if options.child:
        path, seq_len, started = options.child
        print(json.dumps(_child(path, int(seq_len), float(started))))
        return
    documents = options.documents or (20_000 if options.quick else 1_000_000_000)
    shards = options.shards or (4 if options.quick else 1000)
    rounds = options.rounds or (1 if options.quick else 5)
    seq_lens = SEQ_LENS[:1] if options.quick else SEQ_LENS
    machine = describe()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = options.dataset or Path(folder) / "dataset"
        made = _make(path, documents, shards)
        lengths, counts = _histogram(path)
        body = {
            "dataset": made,
            "plan": {seq_len: _measure_plan(lengths, counts, seq_len, rounds) for seq_len in seq_lens},
            "first_batch": _measure_first_batches(path, seq_lens, rounds),
            **_measure_rivals(
                Path(folder), options.rival_documents or (2000 if options.quick else 1_000_000)
            ),
        }
    write_results(options, "packing", {"machine": machine, **body})
    _show(body)


def _make(path: Path, documents: int, shards: int) -> dict[str, Any]:
    from ordering import web_like_lengths

    from headrace.format.fields import Field
    from headrace.format.finish import finish_dataset
    from headrace.store.local import LocalStore

    started = time.perf_counter()
    if not (path / "headrace.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(path).free, DISK_BYTES_A_DOCUMENT * documents
        if free < needed:
            raise SystemExit(f"{path}: {free:,} bytes are free, {needed:,} are needed; use fewer --documents")
        fields = {"tokens": Field.parse("uint16[*]")}
        bounds = [documents * number // shards for number in range(shards + 1)]
        entries = [
            _write_sparse_shard(
                path, number, web_like_lengths(bounds[number + 1] - bounds[number], number), fields
            )
            for number in range(shards)
        ]
        finish_dataset(LocalStore(path), fields, entries, "headrace benchmark")
        _write_back(path)
    files = [file.stat() for file in path.iterdir()]
    manifest = json.loads((path / "headrace.json").read_bytes())
    return {
        "documents": manifest["records"],
        "shards": len(manifest["shards"]),
        "tokens": sum(entry["elements"]["tokens"] for entry in manifest["shards"]),
        "bytes": sum(file.st_size for file in files),
        "bytes_on_disk": sum(512 * file.st_blocks for file in files),
        "read_ahead_kb": _read_ahead_kb(path),
        "made_in_seconds": time.perf_counter() - started,
    }


def _write_back(path: Path) -> None:
    """What is still to be written cannot be dropped from the page cache, and would disturb what follows."""
    for file in path.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


def _read_ahead_kb(path: Path) -> int | None:
    """How much the kernel reads around a page that is missing: it decides the figures of files not in the cache,
    and how many clean file pages count as the process's own."""
    device = path.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (place / "queue", place / "../queue"):
        with contextlib.suppress(OSError):
            return int((queue / "read_ahead_kb").read_text())
    return None


def _write_sparse_shard(path: Path, number: int, lengths: Any, fields: Mapping[str, Any]) -> Any:
    """A shard as the library's own writer would lay it out, with a hole where the tokens belong."""
    import numpy as np

    from headrace.format.checksum import checksum, header_checksum
    from headrace.format.container import Chunks, StoredFile, _encode_head
    from headrace.format.manifest import ShardEntry

    offsets = np.zeros(len(lengths) + 1, "<u8")
    np.cumsum(lengths, out=offsets[1:], dtype=offsets.dtype)
    counted = np.bincount(lengths, minlength=LONGEST + 1)
    distinct = np.flatnonzero(counted)
    sections = {
        "tokens/data": Chunks(np.dtype("<u2"), (int(offsets[-1]),), []),
        "tokens/offsets": Chunks.of(offsets),
        "tokens/lengths": Chunks.of(distinct.astype("<u4")),
        "tokens/counts": Chunks.of(counted[distinct].astype("<u4")),
    }
    described = [{"name": name, **field.to_json()} for name, field in fields.items()]
    head, places, total = _encode_head("shard", {"records": len(lengths), "fields": described}, sections)
    file = path / f"shard-{number:05d}.hdrc"
    with open(file, "wb") as out:
        out.write(head)
        for place, chunks in zip(places[:-1], sections.values(), strict=True):
            for piece in chunks.pieces:
                out.seek(place)
                out.write(piece.data)
        out.truncate(total)
    stored = StoredFile(file.name, total, checksum(head), len(head), header_checksum(head))
    return ShardEntry(stored=stored, records=len(lengths), elements={"tokens": int(offsets[-1])})


def _histogram(path: Path) -> tuple[Any, Any]:
    """Distinct lengths and their counts, added up over the shards' own histograms."""
    import numpy as np

    from headrace.format.fields import Field
    from headrace.format.manifest import parse_stored
    from headrace.format.shard import load_shard
    from headrace.store.local import LocalStore

    manifest = json.loads((path / "headrace.json").read_bytes())
    fields = {"tokens": Field.parse("uint16[*]")}
    total = np.zeros(LONGEST + 1, np.int64)
    for entry in manifest["shards"]:
        lengths, counts = load_shard(LocalStore(path), parse_stored(entry), fields).histogram("tokens")
        total[lengths] += counts
    distinct = np.flatnonzero(total)
    return distinct, total[distinct]


def _measure_plan(lengths: Any, counts: Any, seq_len: int, rounds: int) -> dict[str, Any]:
    from headrace.pack.best_fit import plan_best_fit
    from headrace.pack.overlong import cut_overlong

    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        cut = cut_overlong(lengths, counts, seq_len)
        plan = plan_best_fit(cut.lengths, cut.counts, seq_len)
        seconds.append(time.perf_counter() - started)
    rows = cut.full_rows + plan.rows
    return {
        "seconds": spread(seconds),
        "nodes": len(plan.parent),
        "rows": rows,
        "full_rows_of_long_documents": cut.full_rows,
        "efficiency": int((lengths * counts).sum()) / (rows * seq_len),
        "efficiency_of_packed_rows": plan.efficiency,
    }


def _measure_first_batches(path: Path, seq_lens: Sequence[int], rounds: int) -> dict[str, Any]:
    """Each length of rows from the page cache, after one run that fills it; the first also from the disk."""
    found: dict[str, Any] = {}
    for seq_len in seq_lens:
        _run_child(path, seq_len)
        found[f"{seq_len}"] = _summary([_run_child(path, seq_len) for _ in range(rounds)])
    cold = []
    for _ in range(rounds):
        _forget(path)
        cold.append(_run_child(path, seq_lens[0]))
    found[f"{seq_lens[0]}, files not in the page cache"] = _summary(cold)
    return found


def _summary(reports: list[Any]) -> dict[str, Any]:
    steps = {name: spread([each["seconds"][name] for each in reports]) for name in reports[0]["seconds"]}
    return {"seconds": steps, "memory_mb": reports[-1]["memory_mb"]}


def _run_child(path: Path, seq_len: int) -> Any:
    # Thread pools of BLAS would take private memory in every process that imports NumPy.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # One clock for all processes of a machine, so a child can count from before its own start.
    command = [sys.executable, __file__, "--child", str(path), str(seq_len), str(time.perf_counter())]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(ran.stdout)


def _child(path: str, seq_len: int, started: float) -> dict[str, Any]:
    memory = {"before import": memory_of()}
    begun = time.perf_counter()
    import headrace

    open_dataset, loader_class = headrace.open, headrace.Loader
    imported = time.perf_counter()
    memory["after import"] = memory_of()
    measured = time.perf_counter()
    dataset = open_dataset(path)
    opened = time.perf_counter()
    loader = loader_class(
        dataset, seq_len=seq_len, batch_size=BATCH_SIZE, packing="best-fit", shuffle="global", seed=0
    )
    made = time.perf_counter()
    batch = next(iter(loader))
    first = time.perf_counter()
    memory["after the first batch"] = memory_of()
    if batch.tokens.shape != (BATCH_SIZE, seq_len):
        raise SystemExit(f"a batch of shape {batch.tokens.shape}")
    seconds = {
        "import": imported - begun,
        "open": opened - measured,
        "make the Loader": made - opened,
        "first batch": first - made,
        "open to first batch": first - measured,
        # Without the time that looking at memory took.
        "process start to first batch": (begun - started) + (imported - begun) + (first - measured),
    }
    return {"seconds": seconds, "memory_mb": memory}


def _forget(path: Path) -> None:
    """Ask the kernel to drop the dataset's files from the page cache."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _measure_rivals(folder: Path, documents: int) -> dict[str, Any]:
    import numpy as np
    from ordering import web_like_lengths
    from packing_rivals import PACKERS, versions_of

    seq_len = SEQ_LENS[0]
    found, left_out, versions = {}, [], dict[str, str]()
    for name, rival in PACKERS.items():
        known = versions_of(rival)
        if known is None:
            left_out.append(name)
            print(f"left out, not installed: {rival.label} ({', '.join(rival.needs)})")
            continue
        versions |= known
        count = min(documents, rival.most_documents)
        file = folder / f"lengths-{count}.npy"
        if not file.exists():
            np.save(file, _cut(web_like_lengths(count, 0), seq_len))
        command = [sys.executable, Path(__file__).parent / "packing_rivals.py", name, file, str(seq_len)]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            left_out.append(name)
            print(f"left out, it failed: {rival.label}: {ran.stderr.strip().splitlines()[-1:]}")
            continue
        report = json.loads(ran.stdout.strip().splitlines()[-1])
        per_million = report["seconds"] / count * 1e6
        found[name] = {
            "label": rival.label,
            "documents": count,
            "seconds_a_million": per_million,
            **report,
        }
    return {"rivals": found, "left_out": left_out, "versions": versions}


def _cut(lengths: Any, seq_len: int) -> Any:
    """Each document in pieces of `seq_len` and a rest."""
    import numpy as np

    pieces = -(-lengths // seq_len)
    sizes = np.full(pieces.sum(), seq_len)
    sizes[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * seq_len
    return sizes


def _show(body: Mapping[str, Any]) -> None:
    made = body["dataset"]
    rows: list[list[Any]] = [
        [f"{seq_len:,}", plan["seconds"]["median"], plan["nodes"], f"{100 * plan['efficiency']:.4f} %"]
        for seq_len, plan in body["plan"].items()
    ]
    title = (
        f"{made['documents']:,} documents, {made['tokens']:,} tokens in {made['shards']:,} shards: the plan"
    )
    print_table(title, ["tokens a row", "seconds", "nodes", "full"], rows)
    rows = []
    for name, found in body["first_batch"].items():
        seconds, memory = found["seconds"], found["memory_mb"]["after the first batch"]
        milliseconds = [1000 * times["median"] for times in seconds.values()]
        rows.append([name, *milliseconds, memory["uss"], memory["anonymous"]])
    steps = list(next(iter(body["first_batch"].values()))["seconds"])
    print_table("a fresh process, milliseconds", ["tokens a row", *steps, "uss, MB", "anonymous, MB"], rows)
    rows = [
        [r["label"], r["documents"], r["seconds"], r["seconds_a_million"], f"{100 * r['efficiency']:.3f} %"]
        for r in body["rivals"].values()
    ]
    header = ["packer", "documents", "seconds", "seconds a million, if in proportion", "full"]
    print_table(f"rows of {SEQ_LENS[0]:,} tokens, documents cut to fit", header, rows)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
