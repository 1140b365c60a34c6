"""One peer that reads from a bucket, in a process of its own: `python remote_one.py QUESTION NAME WORKERS ADDRESS`.

    --prepare FOLDER    only write the data in the peer's format
    --learn FILE        read an epoch, check what comes, and keep the state after `--half` batches in a file
    --resume FILE       go on from that state, or without one read `--half` batches, and end with the next batch
    (none of these)     read an epoch

It prints a JSON line with what was measured, and with `--learn` a second one with what was checked. The first batch
counts from the start of the process, so with the interpreter and all imports. An epoch counts from the creation of the
dataset to the last batch. What goes wrong is a line with 'error'.
"""

import argparse
import importlib
import json
import os
import pickle
import signal
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from checks import _key
from one import cpu_seconds, stand_in_for_torchvision
from remote_peer import Place, RemotePeer, remote_peers_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("name")
    parser.add_argument("workers", type=int)
    parser.add_argument("address")
    parser.add_argument("--started", type=float, required=True, help="time.monotonic() when it was started")
    parser.add_argument("--cache", type=Path, help="an empty folder, for those who keep what they fetch")
    parser.add_argument("--half", type=int, default=0, help="how many batches half of an epoch has")
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--learn", type=Path)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    # Whoever hangs is ended, and the run goes on without it.
    signal.alarm(int(os.environ.get("HEADRACE_PEER_SECONDS", "120")))
    try:
        _run(remote_peers_of(options.question)[options.name], options)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {_reason(error)}"}), flush=True)
        raise


def _reason(error: Exception) -> str:
    """Its message; of an error of a DataLoader's worker, which is a traceback, the last line."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if "Traceback" in str(error) else lines[0]


def _run(peer: RemotePeer, options: argparse.Namespace) -> None:
    if "streaming" in peer.modules:
        stand_in_for_torchvision()
    if options.prepare:
        if peer.write is not None:
            peer.write(options.prepare)
        print(json.dumps({"prepared": True}), flush=True)
        return
    for module in peer.modules:
        importlib.import_module(module)
    imported = time.monotonic() - options.started
    place = Place(options.address, options.cache)
    learned = _Learned()
    if options.resume:
        report = _resume(peer, place, options)
    else:
        report = _read_epoch(peer, place, options, learned)
    print(json.dumps({**report, "import_seconds": imported}), flush=True)
    if options.learn:
        print(json.dumps(learned.found()), flush=True)


def _resume(peer: RemotePeer, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    batches = peer.start(place, options.workers)
    if peer.resumes:
        batches.load_state_dict(pickle.loads(options.resume.read_bytes()))
    iterator = iter(batches)
    if not peer.resumes:
        for _ in islice(iterator, options.half):
            pass
    _touch(next(iterator))
    return {"resume_seconds": time.monotonic() - options.started}


def _read_epoch(
    peer: RemotePeer, place: Place, options: argparse.Namespace, learned: "_Learned"
) -> dict[str, Any]:
    began, cpu = time.monotonic(), cpu_seconds()
    batches = peer.start(place, options.workers)
    first, items, count = 0.0, 0.0, 0
    for batch in batches:
        items += _touch(batch)
        count += 1
        if count == 1:
            first = time.monotonic() - options.started
        if options.learn and not peer.limit:
            learned.add(batch)
            if peer.resumes and count == options.half:
                options.learn.write_bytes(pickle.dumps(batches.state_dict()))
    seconds = time.monotonic() - began
    return {
        "first_batch_seconds": first,
        "seconds": seconds,
        "items": items,
        "batches": count,
        "cpu_seconds": cpu_seconds() - cpu,
    }


def _touch(batch: Any) -> float:
    """Read something of a batch, and count its tokens or images; of a limit, it is a share of the epoch."""
    if isinstance(batch, float):
        return batch
    if isinstance(batch, tuple):
        images, _ = batch
        images[-1][-1]
        return len(images)
    batch[-1, -1].item()
    return float(batch.numel())


class _Learned:
    """What an epoch held: the key of every row of tokens, or the label of every image."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._described: dict[str, Any] = {}

    def add(self, batch: Any) -> None:
        if isinstance(batch, tuple):
            images, labels = batch
            self._keys.extend(labels.tolist())
            self._described = {"image_type": type(images[0]).__name__}
            return
        self._keys.extend(map(_key, batch.numpy()))
        self._described = {"dtype": str(batch.dtype).removeprefix("torch."), "shape": list(batch.shape)}

    def found(self) -> dict[str, Any]:
        distinct = set(self._keys)
        ascending = self._keys == sorted(self._keys)
        return {
            **self._described,
            "rows": len(self._keys),
            "twice": len(self._keys) - len(distinct),
            **({"in_stored_order": ascending} if "image_type" in self._described else {}),
        }


if __name__ == "__main__":
    main()
