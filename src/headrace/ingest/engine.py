"""A crew of worker processes on this machine that runs a build's jobs.

The processes start at once and import what they will need while the build still plans. One thread a worker listens
to its answers and puts them on one queue; the caller's thread takes them off, so all decisions are made in one
place. Whatever ends the crew (the last job, an error, Ctrl-C), every process is gone when its block ends.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import headrace
from headrace import errors
from headrace.errors import BuildError
from headrace.ingest.task import Workbench
from headrace.ingest.worker import bench_to_json, run_job

Outcome = Callable[[int, dict[str, Any]], None]
"""Called with a job's number and its outcome message."""

Answer = tuple[int, dict[str, Any] | None]
"""A worker's number and what it said; None when it says no more."""


class Crew:
    """`workers` processes, or with one worker the caller's own. `modules` are imported while they wait."""

    def __init__(self, workers: int, modules: Sequence[str]) -> None:
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []
        self._listeners: list[threading.Thread] = []
        self._workers, self._modules = workers, modules

    def __enter__(self) -> Self:
        try:
            for number in range(self._workers if self._workers > 1 else 0):
                process = _start(self._modules)
                self._processes.append(process)
                listener = threading.Thread(
                    target=_listen, args=(number, process, self._answers), daemon=True
                )
                listener.start()
                self._listeners.append(listener)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process, listener in zip(self._processes, self._listeners, strict=False):
            process.wait()
            listener.join()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]

    def run(
        self,
        jobs: Sequence[dict[str, Any]],
        bench: Workbench,
        *,
        encoder_name: str,
        definition_file: Path | None,
        outcome: Outcome,
        advance: Callable[[list[int]], None],
    ) -> None:
        """Run jobs, in any order; outcomes come in the caller's thread. Can be called again, with another bench."""
        if not self._processes:
            for number, job in enumerate(jobs):

                def receive(message: dict[str, Any], number: int = number) -> None:
                    advance(message["advance"]) if "advance" in message else outcome(number, message)

                run_job(job, bench, receive)
            return
        if jobs:
            description = bench_to_json(bench, encoder_name, definition_file)
            for process in self._processes:
                _write(process, {"bench": description})
            self._converse(jobs, outcome, advance)

    def _converse(
        self, jobs: Sequence[dict[str, Any]], outcome: Outcome, advance: Callable[[list[int]], None]
    ) -> None:
        waiting = iter(enumerate(jobs))
        running: dict[int, int] = {}

        def hand_out(worker: int) -> None:
            running.pop(worker, None)
            number, job = next(waiting, (None, None))
            if number is not None and job is not None:
                running[worker] = number
                _write(self._processes[worker], job)

        for worker in range(len(self._processes)):
            hand_out(worker)
        while running:
            worker, message = self._answers.get()
            if message is None:
                raise BuildError(_death(self._processes[worker]))
            if "advance" in message:
                advance(message["advance"])
            elif "error" in message:
                raise _error(message["error"])
            else:
                outcome(running[worker], message)
                hand_out(worker)


def _start(modules: Sequence[str]) -> "subprocess.Popen[str]":
    # One thread in each process: the processes already fill the cores.
    single = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    home = str(Path(headrace.__file__).parent.parent)
    search = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        # -P: files in the working directory must not shadow modules.
        [sys.executable, "-P", "-m", "headrace.ingest.worker", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, **single, "PYTHONPATH": search},
    )


def _listen(number: int, process: "subprocess.Popen[str]", answers: "queue.Queue[Answer]") -> None:
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
    if isinstance(kind, type) and issubclass(kind, errors.HeadraceError):
        return kind(described["message"])
    return BuildError(
        f"a worker failed: {described['type']}: {described['message']}\n\n{described['traceback']}"
    )
