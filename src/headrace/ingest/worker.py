"""A process that runs jobs for a build: JSON lines in, JSON lines out.

A line describes the workbench or is a job. A worker is an ordinary subprocess, not a fork
of the caller and not a re-import of the caller's script, so `headrace.build` can be called from anywhere. When
its standard input ends, the build is over or its parent has died, and the worker exits at once.
"""

import contextlib
import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.format.fields import Field
from headrace.ingest.gather import gather_shard
from headrace.ingest.plan import Slice, Task
from headrace.ingest.task import (
    Result,
    Workbench,
    read_options_from_json,
    read_options_to_json,
    run_task,
    still_holds,
)
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.parity import load_encoder

_SECONDS_BETWEEN_REPORTS = 0.1


def bench_to_json(bench: Workbench, encoder_name: str, definition_file: Path | None) -> dict[str, Any]:
    definition = bench.definition
    return {
        "directory": str(bench.directory),
        "fields": [{"name": name, **field.to_json()} for name, field in bench.fields.items()],
        "options": read_options_to_json(bench.options),
        "largest_shard_bytes": bench.largest_shard_bytes,
        "max_bad_records": bench.max_bad_records,
        "standard_input": str(bench.standard_input),
        "encoder": encoder_name,
        "definition": _definition_to_json(definition) if definition else None,
        "definition_file": str(definition_file) if definition_file else None,
    }


def _definition_to_json(definition: Definition) -> dict[str, Any]:
    return {"name": definition.name, **definition.identity, "special_tokens": dict(definition.special_tokens)}


def bench_from_json(value: Any) -> Workbench:
    definition = None
    if value["definition"]:
        file = value["definition_file"]
        definition = Definition(**value["definition"], content=Path(file).read_bytes() if file else b"")
    return Workbench(
        directory=Path(value["directory"]),
        fields={entry["name"]: Field.from_json(entry) for entry in value["fields"]},
        options=read_options_from_json(value["options"]),
        largest_shard_bytes=value["largest_shard_bytes"],
        max_bad_records=value["max_bad_records"],
        standard_input=Path(value["standard_input"]),
        definition=definition,
        encoder=load_encoder(definition, value["encoder"]) if definition and value["encoder"] else None,
    )


Send = Callable[[dict[str, Any]], None]


def run_job(job: Any, bench: Workbench, send: Send) -> None:
    """Carry out one job and send its outcome; progress goes out at most ten times a second."""
    waiting = [0, 0, 0]
    last = time.monotonic()
    left = job.get("input_bytes", 0)

    def advance(input_bytes: int, records: int, elements: int) -> None:
        nonlocal last, left
        # A compressed input counts by its size on disk, and readers tell what they unpacked.
        input_bytes = min(input_bytes, left)
        left -= input_bytes
        waiting[:] = [waiting[0] + input_bytes, waiting[1] + records, waiting[2] + elements]
        if time.monotonic() - last > _SECONDS_BETWEEN_REPORTS:
            send({"advance": list(waiting)})
            waiting[:] = [0, 0, 0]
            last = time.monotonic()

    if "check" in job:
        outcome: dict[str, Any] = {"holds": still_holds(Result.from_json(job["check"]), bench)}
    elif "gather" in job:
        start, stop = job["gather"]
        entry = gather_shard(Path(job["stage"]), bench.directory, start, stop, job["seed"])
        outcome = {"entry": entry.to_json()}
    else:
        task = Task(tuple(Slice.from_json(piece) for piece in job["slices"]), job["input_bytes"])
        outcome = {"result": run_task(task, bench, advance).to_json()}
    send({"advance": [waiting[0] + left, *waiting[1:]]})
    send(outcome)


def _main() -> None:
    # Whatever a library prints must not get into the conversation.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    for module in sys.argv[1:]:
        # What is missing is told when it is needed.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    bench: Workbench | None = None
    while True:
        try:
            message = json.loads(lines.get())
            if "bench" in message:
                bench = bench_from_json(message["bench"])
            elif bench is not None:
                run_job(message, bench, send)
        except KeyboardInterrupt:
            return
        except BaseException as error:
            send(
                {
                    "error": {
                        "type": type(error).__name__,
                        "message": str(error),
                        "traceback": traceback.format_exc(),
                    }
                }
            )


if __name__ == "__main__":
    _main()
