"""Runs jobs in worker processes on this machine, and hands each outcome to the build as it comes.

One thread a worker listens to its answers and puts them on one queue; the caller's thread takes them off, so all
decisions are made in one place. Whatever ends the run (the last job, an error, Ctrl-C), every worker is gone
when `run_jobs` returns.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import penstock
from penstock import errors
from penstock.errors import BuildError
from penstock.ingest.task import Workbench
from penstock.ingest.worker import bench_to_json, run_job

Outcome = Callable[[int, dict[str, Any]], None]
"""Called with a job's number and its outcome message."""


def run_jobs(
    jobs: Iterable[dict[str, Any]],
    bench: Workbench,
    *,
    workers: int,
    encoder_name: str,
    definition_file: Path | None,
    outcome: Outcome,
    advance: Callable[[list[int]], None],
) -> None:
    """Run all jobs. With one worker they run in this process."""
    numbered = list(enumerate(jobs))
    workers = min(workers, len(numbered))
    if workers <= 1:
        for number, job in numbered:

            def receive(message: dict[str, Any], number: int = number) -> None:
                advance(message["advance"]) if "advance" in message else outcome(number, message)

            run_job(job, bench, receive)
        return
    description = bench_to_json(bench, encoder_name, definition_file)
    with _workers(workers, description) as (processes, answers):
        _converse(numbered, processes, answers, outcome, advance)


def _converse(
    jobs: list[tuple[int, dict[str, Any]]],
    processes: list["subprocess.Popen[str]"],
    answers: "queue.Queue[tuple[int, dict[str, Any] | None]]",
    outcome: Outcome,
    advance: Callable[[list[int]], None],
) -> None:
    waiting = iter(jobs)
    running: dict[int, int] = {}

    def hand_out(worker: int) -> None:
        job = next(waiting, None)
        running.pop(worker, None)
        if job is not None:
            running[worker] = job[0]
            _write(processes[worker], job[1])

    for worker in range(len(processes)):
        hand_out(worker)
    while running:
        worker, message = answers.get()
        if message is None:
            if worker in running:
                raise BuildError(_death(processes[worker]))
        elif "advance" in message:
            advance(message["advance"])
        elif "error" in message:
            raise _error(message["error"])
        else:
            outcome(running[worker], message)
            hand_out(worker)


@contextlib.contextmanager
def _workers(
    count: int, description: dict[str, Any]
) -> Iterator[tuple[list["subprocess.Popen[str]"], "queue.Queue[tuple[int, dict[str, Any] | None]]"]]:
    answers: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    processes: list[subprocess.Popen[str]] = []
    listeners: list[threading.Thread] = []
    try:
        for number in range(count):
            process = _start()
            processes.append(process)
            listener = threading.Thread(target=_listen, args=(number, process, answers), daemon=True)
            listener.start()
            listeners.append(listener)
            _write(process, description)
        yield processes, answers
    finally:
        for process in processes:
            process.kill()
        for process, listener in zip(processes, listeners, strict=False):
            process.wait()
            listener.join()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]


def _start() -> "subprocess.Popen[str]":
    # One thread in each process: the processes already fill the cores.
    single = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    home = str(Path(penstock.__file__).parent.parent)
    search = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        # -P: files in the working directory must not shadow modules.
        [sys.executable, "-P", "-m", "penstock.ingest.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, **single, "PYTHONPATH": search},
    )


def _listen(
    number: int, process: "subprocess.Popen[str]", answers: "queue.Queue[tuple[int, dict[str, Any] | None]]"
) -> None:
    for line in process.stdout or ():
        # A worker that is killed may leave half a line.
        with contextlib.suppress(ValueError):
            answers.put((number, json.loads(line)))
    answers.put((number, None))


def _write(process: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
    if process.stdin is None:
        raise BuildError("a worker has no standard input")
    # A dead worker shows as the end of its answers, with its exit code.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _death(process: "subprocess.Popen[str]") -> str:
    code = process.wait()
    if code == -signal.SIGKILL:
        why = "was killed (often: out of memory; try fewer --workers or a smaller --shard-size)"
    elif code < 0:
        why = f"died of {signal.Signals(-code).name}"
    else:
        why = f"exited with code {code}"
    return f"a worker process {why}; what is finished is kept, the same command continues"


def _error(described: dict[str, str]) -> Exception:
    """The worker's error here: our own kinds as they are, anything else with its traceback."""
    kind = getattr(errors, described["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.PenstockError):
        return kind(described["message"])
    return BuildError(
        f"a worker failed: {described['type']}: {described['message']}\n\n{described['traceback']}"
    )
