"""One peer in a process of its own: `python one.py QUESTION NAME WORKERS FOLDER`, told the rest by options.

It prints one JSON line when it has been measured, and with `--check FOLDER` a second one: whether an epoch of that
smaller data holds every row (document, image) exactly once. What goes wrong is a line with 'error'.

    first batch   from the start of the process, so with the interpreter and all imports
    rate          batches over `--seconds`, after a stretch that does not count; where an epoch ends, the clock stands
                  still until the first batch of the next one
    cpu           of all processes, over the same time
"""

import argparse
import importlib
import importlib.machinery
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import checks
from machine import cpu_seconds
from peer import Peer, peers_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("name")
    parser.add_argument("workers", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--started", type=float, required=True, help="time.monotonic() when it was started")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--unmeasured", type=int, default=32, help="batches that do not count")
    parser.add_argument("--check", type=Path, help="smaller data, to be read once and checked")
    parser.add_argument("--prepare", action="store_true", help="only write the data in the peer's format")
    options = parser.parse_args()
    # Whoever hangs is ended, and the run goes on without it.
    signal.alarm(int(os.environ.get("HEADRACE_PEER_SECONDS", "120")))
    try:
        _run(peers_of(options.question)[options.name], options)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        raise


def _run(peer: Peer, options: argparse.Namespace) -> None:
    if "streaming" in peer.modules:
        stand_in_for_torchvision()
    if options.prepare:
        assert peer.prepare is not None
        peer.prepare(options.folder)
        print(json.dumps({"prepared": True}), flush=True)
        return
    for module in peer.modules:
        importlib.import_module(module)
    imported = time.monotonic() - options.started
    loader = peer.start(options.folder, options.workers, False)
    report = measure(loader, options.started, options.seconds, options.unmeasured)
    print(json.dumps({**report, "import_seconds": imported}), flush=True)
    if options.check:
        del loader
        fresh = peer.start(options.check, options.workers, True)
        print(json.dumps(checks.CHECKS[options.question](peer, fresh, options.check)), flush=True)


def measure(loader: Iterable[Any], started: float, seconds: float, unmeasured: int) -> dict[str, Any]:
    laps = _Laps(loader)
    laps.next()
    first = time.monotonic() - started
    settled = time.perf_counter() + 0.3 * seconds
    done = 0
    while done < unmeasured or time.perf_counter() < settled:
        laps.next()
        done += 1
    laps.paused_seconds = laps.paused_cpu = 0.0
    batches, cpu, begun = 0, cpu_seconds(), time.perf_counter()
    while True:
        laps.next()
        batches += 1
        elapsed = time.perf_counter() - begun
        passed = elapsed - laps.paused_seconds
        # Small data of a quick run may be little else than epochs that begin.
        if passed >= seconds or elapsed >= 10 * seconds:
            break
    return {
        "first_batch_seconds": first,
        "batches_per_second": batches / passed,
        "cpu_seconds_per_batch": (cpu_seconds() - cpu - laps.paused_cpu) / batches,
        "epochs_ended": laps.ended,
    }


class _Laps:
    """Batches over and over, with the time spent between one epoch's end and the next one's first batch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._iterator = loader, iter(loader)
        self.ended, self.paused_seconds, self.paused_cpu = 0, 0.0, 0.0

    def next(self) -> None:
        try:
            checks.touch(next(self._iterator))
        except StopIteration:
            begun, cpu = time.perf_counter(), cpu_seconds()
            self._iterator = iter(self._loader)
            checks.touch(next(self._iterator))
            self.ended += 1
            self.paused_seconds += time.perf_counter() - begun
            self.paused_cpu += cpu_seconds() - cpu


def stand_in_for_torchvision() -> None:
    """MosaicML's package imports two names of it for its image datasets, which nobody uses here. The real one comes
    with gigabytes of CUDA, or does not load beside torch for the CPU."""
    names = (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    )
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        # transformers, which it imports too, looks for torchvision's.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})  # type: ignore[attr-defined]
    modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
    sys.modules.update(modules)


if __name__ == "__main__":
    main()
