"""The demo behind `make demo`: builds, inspects, loads and measures a dataset of Python's standard library.

It prints each command before running it, so that you can type the same commands yourself.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import headrace

OUT = Path(".demo")
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "idlelib"}


def command(*arguments: str, shown: str | None = None) -> None:
    print(f"\n\033[1m$ headrace {shown or ' '.join(arguments)}\033[0m", flush=True)
    subprocess.run([sys.executable, "-m", "headrace", *arguments], check=True)


def sources() -> list[str]:
    """The standard library's modules and packages, without the packages that pip has installed beside them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    entries = (entry for entry in sorted(library.iterdir()) if entry.name not in SKIPPED)
    return [str(entry) for entry in entries if entry.suffix == ".py" or entry.is_dir()]


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    data, inputs = str(OUT / "stdlib"), sources()
    # A few files of the library's own tests use other encodings on purpose.
    options = ["--include", "*.py", "--max-bad-records", "20", "--out", data]
    shown = f"build <the standard library> {' '.join(options)}"
    command("build", *inputs, *options, shown=shown)
    command("build", *inputs, *options, shown=f"{shown}      # again: nothing has changed")
    command("inspect", data)
    command("verify", data, "--json")
    dataset = headrace.open(data)
    longest = int(dataset.lengths.argmax())
    command("show", data, str(longest), "--limit", "120")
    command("show", data, "--row", "-200", "--seq-len", "2048", "--limit", "60")
    load_batches(dataset)
    command("verify-resume", data, "--seq-len", "2048", "--batch-size", "16", "--rows", "4000")
    # Its memory maps would keep the files in memory, but the first batch should be measured with a cold cache.
    del dataset
    step = ["--seq-len", "2048", "--batch-size", "16", "--compute-ms", "10"]
    command("bench", data, *step, "--runs", "2", "--seconds", "1", "--html", str(OUT / "bench.html"))
    command("doctor", data, *step, "--seconds", "1")


def load_batches(dataset: headrace.Dataset) -> None:
    """Run an epoch as a training script would, then stop in the middle and resume on another number of ranks."""
    print("\n\033[1mheadrace.Loader(dataset, seq_len=2048, batch_size=16)\033[0m")
    loader = headrace.Loader(dataset, seq_len=2048, batch_size=16, rank=0, world_size=1)
    print(f"  {loader!r}\n  {loader.report()}")
    started, tokens = time.perf_counter(), 0
    for step, batch in enumerate(loader):
        tokens += batch.tokens.size
        if step < 3:
            print(
                f"  step {step}: tokens {batch.tokens.shape}, {len(batch.cu_seqlens) - 1} documents or padding"
            )
    seconds = time.perf_counter() - started
    print(
        f"  {step + 1} steps, {tokens:,} tokens, {tokens / seconds / 1e6:,.0f} million tokens/s (using `tokens` only)"
    )
    stop_and_resume(dataset)


def stop_and_resume(dataset: headrace.Dataset) -> None:
    loader = headrace.Loader(dataset, seq_len=2048, batch_size=16, rank=0, world_size=1)
    batches = iter(loader)
    for _ in range(100):
        next(batches)
    state = json.dumps(loader.state_dict())
    print(f"  stopped after 100 steps of 16 rows: the state has {len(state)} bytes")
    resumed = headrace.Loader(dataset, seq_len=2048, batch_size=4, rank=3, world_size=8)
    resumed.load_state_dict(json.loads(state))
    first = next(iter(resumed))
    print(
        f"  resumed on 8 ranks with batches of 4: rank 3 continues with row {first.info.position} of the stream"
    )


if __name__ == "__main__":
    main()
