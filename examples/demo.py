"""The demo behind `make demo`: a dataset from the source files of Python's standard library, start to finish.

Prints each command before running it, so that the same can be typed by hand.
"""

import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np

import penstock

OUT = Path(".demo")
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "idlelib"}


def command(*arguments: str, shown: str | None = None) -> None:
    print(f"\n\033[1m$ penstock {shown or ' '.join(arguments)}\033[0m", flush=True)
    subprocess.run([sys.executable, "-m", "penstock", *arguments], check=True)


def sources() -> list[str]:
    """The standard library's modules and packages, without what pip has put beside them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    entries = (entry for entry in sorted(library.iterdir()) if entry.name not in SKIPPED)
    return [str(entry) for entry in entries if entry.suffix == ".py" or entry.is_dir()]


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    data, inputs = str(OUT / "stdlib"), sources()
    # A few files of the library's own tests are written in other encodings on purpose.
    options = ["--include", "*.py", "--max-bad-records", "20", "--out", data]
    shown = f"build <the standard library> {' '.join(options)}"
    command("build", *inputs, *options, shown=shown)
    command("build", *inputs, *options, shown=f"{shown}      # again: nothing has changed")
    command("inspect", data)
    command("verify", data, "--json")
    dataset = penstock.open(data)
    longest = int(dataset.lengths.argmax())
    command("show", data, str(longest), "--limit", "120")
    read_batches(dataset)


def read_batches(dataset: penstock.Dataset) -> None:
    """Random batches of documents, as a training script would take them."""
    print("\n\033[1mds = penstock.open('.demo/stdlib'); ds[[...]]  # batches of 32 random documents\033[0m")
    rng = np.random.default_rng(0)
    started, tokens = time.perf_counter(), 0
    for step in range(200):
        batch = dataset[rng.integers(0, len(dataset), size=32)]
        tokens += len(batch["tokens"].values)
        if step < 3:
            print(
                f"  step {step}: {len(batch['tokens'])} documents, lengths {batch['tokens'].lengths[:6].tolist()} ..."
            )
    seconds = time.perf_counter() - started
    print(f"  200 batches, {tokens:,} tokens, {tokens / seconds / 1e6:,.0f} million tokens/s on one thread")
    print(f"  {dataset!r}")


if __name__ == "__main__":
    main()
