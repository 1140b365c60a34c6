"""One system and its consumer in a process of their own: `python serve_one.py QUESTION NAME`.

It prints one JSON line with what was measured; what goes wrong is a line with 'error'.

    start      from nothing to a system that can be asked
    cold       from the first consumer of that system to its first batch
    first      the same for the second consumer, when everything has been used once
"""

import argparse
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from serve_passes import FULL, QUICK, STEP_SECONDS, Consumer, Received
from serve_peer import PEERS, QUESTIONS, ServePeer
from serve_system import Settings, enter_namespace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("name", choices=list(PEERS))
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--started", type=float, help="time.monotonic() when it was started")
    options = parser.parse_args()
    # What the systems start has to find these modules too.
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent)])
    # Whoever hangs is ended, and the run goes on without it.
    signal.alarm(int(os.environ.get("HEADRACE_PEER_SECONDS", "300")))
    try:
        report = _run(PEERS[options.name], options)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        report = {"error": f"{type(error).__name__}: {reason}"}
    print(json.dumps(report), flush=True)
    # A loop that waits for a batch forever is a thread that never ends.
    os._exit(0)


def _run(peer: ServePeer, options: argparse.Namespace) -> dict[str, Any]:
    is_alone = enter_namespace()
    for module in peer.modules:
        importlib.import_module(module)
    transform = "waiting" if options.question == "waiting" else "burning"
    settings = Settings(transform=transform, scratch=options.scratch, is_alone=is_alone)
    begun = time.perf_counter()
    with peer.start(settings) as system:
        started = time.perf_counter() - begun - system.facts.get("calibration_seconds", 0.0)
        consumer = Consumer(system, QUICK if options.quick else FULL)
        report = _killing(consumer) if options.question == "killing" else _feeding(consumer)
        return {"start_seconds": started, **report, "facts": dict(system.facts), "is_alone": is_alone}


def _killing(consumer: Consumer) -> dict[str, Any]:
    consumer.first_batch_seconds()
    return consumer.interrupted()


def _feeding(consumer: Consumer) -> dict[str, Any]:
    cold = consumer.first_batch_seconds()
    first = consumer.first_batch_seconds()
    fed, received = consumer.loop(STEP_SECONDS)
    flat_out, again = consumer.loop(0.0)
    return {
        "cold_first_batch_seconds": cold,
        "first_batch_seconds": first,
        "accelerator_share": fed["accelerator_share"],
        "consumer_cpu_seconds_per_batch": fed["consumer_cpu_seconds_per_batch"],
        "all_cpu_seconds_per_batch": fed["all_cpu_seconds_per_batch"],
        "batches_per_second": flat_out["batches_per_second"],
        "checked": _checked(received, again),
    }


def _checked(one: Received, other: Received) -> dict[str, bool]:
    return {
        "every_row_once": not (one.lost or one.twice or other.lost or other.twice),
        "in_defined_order": one.in_defined_order and other.in_defined_order,
        "same_order_twice": one.relative == other.relative,
        "shape": one.is_whole and other.is_whole,
    }


if __name__ == "__main__":
    main()
