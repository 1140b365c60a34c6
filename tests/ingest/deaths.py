"""Processes that die at a chosen moment: a program for tests of what they leave behind.

A moment is a number: just before the so-manieth change that the process makes to the disk. So the tests need no
clock, and can go through every moment there is. One interpreter serves many deaths; each happens in a fork of it.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import headrace
import headrace.ingest.build
import headrace.ingest.writer  # both before the first fork, so that not every one of them imports them again
from headrace.cli.main import main
from tests.scripts import scripts_with

IMPORTED = (
    "psutil",
    "headrace.cli.main",
    "headrace.format.verify",
    "headrace.ingest.build",
    "headrace.ingest.writer",
)
ROOT = Path(__file__).parents[2]
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR


def run(program: str, **order: Any) -> list[dict[str, Any]]:
    """For tests: run one of the programs below; one answer for each of its deaths."""
    return run_program("tests.ingest.deaths", program, json.dumps(order, default=str))


def run_program(module: str, *words: object) -> list[dict[str, Any]]:
    """Run a module of the tests, in a process that has imported what it needs; its answers, one for each line."""
    # That process began with the environment of another test.
    code = f"import os, runpy, sys; os.environ.clear(); os.environ.update({dict(os.environ)!r}); "
    code += f"sys.path.insert(0, {str(ROOT)!r}); "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = scripts_with(*IMPORTED).run("-c", *words, code=code, folder=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def build(folder: str, deaths: list[tuple[str, int]], **settings: Any) -> None:
    """Build from a folder, and die; again for each of (output, moment)."""
    for out, moment in deaths:
        die_at(moment, kill, lambda out=out: headrace.build(folder, out, **settings))


def command(words: list[str], moment: int, blow: str) -> None:
    """Run `headrace` with these words; at the moment one of the blows falls."""
    die_at(moment, BLOWS[blow], lambda: main(words))


def write(out: str, moments: list[int], records: int) -> None:
    """Write records, die, and go on in the same place."""
    for moment in moments:
        die_at(moment, kill, lambda: write_records(out, records))


def write_records(out: str, records: int) -> None:
    fields = {"x": "float32[2]", "tokens": "uint16[*]", "name": "bytes"}
    with headrace.Writer(out, fields=fields, shard_bytes=4000, resume=True) as writer:
        for number in range(len(writer), records):
            tokens = np.arange(number % 17)
            writer.write({"x": [number, -number], "tokens": tokens, "name": f"record {number}"})


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_a_worker() -> None:
    psutil.Process().children()[0].kill()


def interrupt() -> None:
    """As Ctrl-C does: all processes of the terminal are told."""
    os.killpg(0, signal.SIGINT)


BLOWS = {"kill a worker": kill_a_worker, "interrupt": interrupt}


def die_at(moment: int, blow: Callable[[], None], work: Callable[[], Any]) -> None:
    """Work in a fork that receives the blow at a moment (0: never), and print what became of it."""
    process = os.fork()
    if process == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        changes, error = 0, None

        def count() -> None:
            nonlocal changes
            changes += 1
            if changes == moment:
                blow()

        call_at_changes(count)
        with redirect_stderr(io.StringIO()) as complaint:
            try:
                work()
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
        said = complaint.getvalue()
        _print(session=os.getpid(), killed=False, changes=changes, error=error, complaint=said)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        _print(session=process, killed=True)


def _print(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def wait_until_gone(session: int) -> None:
    """Until no process of a session is left."""
    while survivors := [process for process in psutil.process_iter() if _is_alive_in(session, process)]:
        psutil.wait_procs(survivors, timeout=0.1)


def _is_alive_in(session: int, process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def call_at_changes(call: Callable[[], None]) -> None:
    """Call before each change to the disk that this process makes."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        if writing or event in CHANGES:
            call()

    flush = os.fsync

    def counted_flush(descriptor: Any) -> None:
        call()
        flush(descriptor)

    sys.addaudithook(hook)
    os.fsync = counted_flush


if __name__ == "__main__":
    {"build": build, "command": command, "write": write}[sys.argv[1]](**json.loads(sys.argv[2]))
