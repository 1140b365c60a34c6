"""Runs in child processes, as their parent sees them: started, listened to, and ended whatever they do."""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import TargetError
from penstock.measure.resources import MemoryMb, PeakMemory
from penstock.measure.run import Plan, Run
from penstock.measure.steps import Step
from penstock.measure.targets import Target

_INTERRUPT_SECONDS = 3.0
_STACK_SECONDS = 1.0
_START_SECONDS = 120.0
_SAID_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of one target, with settings of its own."""

    target: Target
    step: Step
    plan: Plan
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 60.0
    """For each batch, the first one too."""
    trace: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target.to_json(),
            "step": self.step.to_json(),
            "plan": dataclasses.asdict(self.plan),
            "settings": dict(self.settings),
            "trace": self.trace,
        }


@dataclass
class Measured:
    """What a child has told, and what was seen of it from outside."""

    run: Run = field(default_factory=Run)
    memory: MemoryMb = field(default_factory=MemoryMb)
    error: str | None = None
    interrupted: bool = False


Tell = Callable[[Run, int], None]
"""Called with what was measured so far, and the process that is measured."""


def run_child(task: Task, tell: Tell | None = None, environment: Mapping[str, str] | None = None) -> Measured:
    """Never raises for what the target does: that is in `error`. Ctrl-C gives what was measured so far."""
    with _Child(task, environment or {}) as child, PeakMemory(child.pid) as memory:
        measured = child.listen(tell or (lambda run, pid: None))
    measured.memory = memory.peak
    return measured


def run_ranks(task: Task, ranks: int, tell: Tell | None = None) -> list[Measured]:
    """The same target in so many processes at once, each told its rank as a launcher would."""
    port = _free_port()
    with contextlib.ExitStack() as stack:
        children = []
        for rank in range(ranks):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            variables = {name: str(value) for name, value in told.items()}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            child = stack.enter_context(_Child(task, variables))
            children.append((child, stack.enter_context(PeakMemory(child.pid))))
        results = []
        for number, (child, memory) in enumerate(children):
            # One of them is shown; the others' words wait in their pipes.
            measured = child.listen((tell if number == 0 else None) or (lambda run, pid: None))
            measured.memory = memory.peak
            results.append(measured)
            if measured.interrupted:
                for other, _ in children:
                    other.interrupt()
    return results


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Child:
    def __init__(self, task: Task, environment: Mapping[str, str]) -> None:
        self._task = task
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._pipe, theirs = os.pipe()
        try:
            # A session of its own: Ctrl-C is for the parent, and ending it ends its children.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.measure.child", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs],
                start_new_session=True,
                env={**os.environ, **environment},
            )
        except BaseException:
            os.close(self._pipe)
            self._said.close()
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as given:
            given.write(json.dumps(task.to_json()).encode())
        self._measured, self._buffer = Measured(), b""
        self._over = self._silent = self._heard = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        os.close(self._pipe)
        self._said.close()

    def listen(self, tell: Tell) -> Measured:
        try:
            self._listen(tell)
        except KeyboardInterrupt:
            self._measured.interrupted = True
            self.interrupt()
            with contextlib.suppress(KeyboardInterrupt):
                self._drain(tell)
        if self._silent:
            self._measured.error = self._hang()
        elif not self._over and not self._measured.interrupted:
            self._measured.error = self._death()
        self._kill()
        return self._measured

    def _listen(self, tell: Tell) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            limit = self._task.timeout_seconds + self._task.plan.seconds
            # Importing takes as long as it takes, within reason.
            first = _START_SECONDS + limit
            while not self._over:
                if not selector.select(limit if self._heard else first):
                    self._silent = True
                    return
                if not self._read(tell):
                    return

    def _drain(self, tell: Tell) -> None:
        deadline = time.monotonic() + _INTERRUPT_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while not self._over and time.monotonic() < deadline:
                if selector.select(deadline - time.monotonic()) and not self._read(tell):
                    return

    def _read(self, tell: Tell) -> bool:
        chunk = os.read(self._pipe, 2**20)
        self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        self._heard = True
        for line in lines:
            self._accept(json.loads(line), tell)
        return bool(chunk)

    def _accept(self, message: dict[str, Any], tell: Tell) -> None:
        self._measured.run = Run(**message["run"])
        match message["told"]:
            case "run":
                tell(self._measured.run, self.pid)
            case "done":
                self._over = True
            case "failed":
                self._over, self._measured.error = True, message["error"]

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGINT)

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _hang(self) -> str:
        limit = self._task.timeout_seconds
        before = self._said.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        self._said.seek(before)
        stacks = self._said.read().decode(errors="replace").strip()
        what = (
            "no batch"
            if self._measured.run.batches or self._measured.run.first_batch_seconds
            else "no first batch"
        )
        return f"{what} within {limit:g} seconds (--timeout); it was doing this:\n{stacks or '(no stack to be had)'}"

    def _death(self) -> str:
        code = self._process.wait()
        how = f"exited with code {code}"
        if code < 0:
            names = {sign.value: sign.name for sign in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
            if -code == signal.SIGKILL:
                how += " (out of memory?)"
        return f"the process that ran the target {how}{self.said()}"

    def said(self) -> str:
        """The last lines that the target printed."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()[-_SAID_LINES:]
        return ":\n" + "\n".join(lines) if lines else ""


def check(measured: Measured) -> Run:
    """The run, or its failure as an error."""
    if measured.error is not None:
        raise TargetError(measured.error)
    return measured.run
