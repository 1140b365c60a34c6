"""Runs in child processes, as their parent sees them: started, listened to, and ended whatever they do."""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from headrace.errors import TargetError
from headrace.measure import clock
from headrace.measure.running.resources import MemoryMb, PeakMemory
from headrace.measure.running.run import Plan, Run
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import Target

_INTERRUPT_SECONDS = 3.0
_STACK_LOOKS, _STACK_PAUSE_SECONDS = 250, 0.02
_OUTERMOST = "in _run_module_as_main"
"""Ends the stacks of a child: the main thread comes last, and it was started with `-m`."""
_START_SECONDS = 120.0
"""For starting and importing, beside what a batch may take."""
_LOOK_SECONDS = 0.5
_SAID_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of one target, with settings of its own."""

    target: Target
    step: Step
    plan: Plan
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 60.0
    """For each batch and its step, the first one too."""
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


def run_child(task: Task, tell: Tell | None = None) -> Measured:
    """Never raises for what the target does: that is in `error`. Ctrl-C gives what was measured so far."""
    return _run([(task, {})], tell)[0]


def run_ranks(task: Task, ranks: int, tell: Tell | None = None) -> list[Measured]:
    """The same target in so many processes at once, each told its rank as a launcher would."""
    port = _free_port()
    given = []
    for rank in range(ranks):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        variables = {name: str(value) for name, value in told.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        given.append((dataclasses.replace(task, trace=None) if rank else task, variables))
    return _run(given, tell)


def check(measured: Measured) -> Run:
    """The run, or its failure as an error."""
    if measured.error is not None:
        raise TargetError(measured.error)
    return measured.run


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(given: Sequence[tuple[Task, Mapping[str, str]]], tell: Tell | None) -> list[Measured]:
    """All at once; the first is the one that is shown."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_Child(task, variables)) for task, variables in given]
        watched = [stack.enter_context(PeakMemory(child.pid)) for child in children]
        try:
            _listen(children, tell)
        except KeyboardInterrupt:
            for child in children:
                child.interrupt()
            with contextlib.suppress(KeyboardInterrupt):
                _listen(children, None, clock.now() + _INTERRUPT_SECONDS)
    for child, memory in zip(children, watched, strict=True):
        child.measured.memory = memory.peak
    return [child.measured for child in children]


def _listen(children: Sequence["_Child"], tell: Tell | None, deadline: float = float("inf")) -> None:
    """Until all are done or given up, or for so long. Every pipe is read at once: a full one would hold its run up."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            if not child.over:
                selector.register(child.pipe, selectors.EVENT_READ, child)
        while selector.get_map() and clock.now() < deadline:
            ready = {key.data for key, _ in selector.select(_LOOK_SECONDS)}
            for child in [key.data for key in selector.get_map().values()]:
                if child in ready:
                    child.read(tell if child is children[0] else None)
                else:
                    child.look()
                if child.over:
                    selector.unregister(child.pipe)


class _Child:
    def __init__(self, task: Task, environment: Mapping[str, str]) -> None:
        self._task = task
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.pipe, theirs = os.pipe()
        try:
            # A session of its own: Ctrl-C is for the parent, and ending it ends its children.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.measure.running.child", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs],
                start_new_session=True,
                env={**os.environ, **environment},
            )
        except BaseException:
            os.close(self.pipe)
            self._said.close()
            raise
        finally:
            os.close(theirs)
        self.measured, self._buffer = Measured(), b""
        self.over = self._heard = False
        self._heard_at = clock.now()
        # It stays open: when this process ends, however it does, the child sees it closed, and ends too.
        line: Any = self._process.stdin
        self._line = line
        with contextlib.suppress(BrokenPipeError):
            line.write(json.dumps(task.to_json()).encode() + b"\n")
            line.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        with contextlib.suppress(BrokenPipeError):
            self._line.close()
        os.close(self.pipe)
        self._said.close()

    def read(self, tell: Tell | None) -> None:
        chunk = os.read(self.pipe, 2**20)
        self._buffer += chunk
        self._heard, self._heard_at = True, clock.now()
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except json.JSONDecodeError:
                # It was broken off, and the one after it tells the same and more.
                continue
            self._accept(message, tell)
        if not chunk and not self.over:
            self._give_up(self._death())

    def _accept(self, message: dict[str, Any], tell: Tell | None) -> None:
        self.measured.run = Run(**message["run"])
        match message["told"]:
            case "run" if tell is not None:
                tell(self.measured.run, self.pid)
            case "done":
                self.over = True
            case "failed":
                self._give_up(
                    "\n".join(filter(None, [message["error"], message["where"], self._last_said()]))
                )

    def look(self) -> None:
        """It has said nothing for a while: is it still there, and not too late?"""
        if self._process.poll() is not None:
            # Its pipe may be open in a process that it has forked.
            self._give_up(self._death())
            return
        # A summary may take as long as the run was; starting and importing have a limit of their own.
        limit = self._task.timeout_seconds + self._task.plan.seconds + (0 if self._heard else _START_SECONDS)
        if clock.now() - self._heard_at > limit:
            self._give_up(self._hang())

    def _give_up(self, error: str) -> None:
        self.over = True
        if not self.measured.interrupted:
            self.measured.error = error

    def interrupt(self) -> None:
        self.measured.interrupted = True
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGINT)

    def _kill(self) -> None:
        """With all that it has started, also what has a session of its own."""
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(self.pid).children(recursive=True)
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            for each in started:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _hang(self) -> str:
        stacks = self._stacks() or "(no stack to be had)"
        what = "no first batch" if self.measured.run.first_batch_seconds is None else "no batch"
        limit = self._task.timeout_seconds
        return f"{what} within {limit:g} seconds (--timeout); it was doing this:\n{stacks}"

    def _stacks(self) -> str:
        """What its threads are doing, if it says so soon."""
        before = self._said.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
        stacks = ""
        for _ in range(_STACK_LOOKS):
            time.sleep(_STACK_PAUSE_SECONDS)
            self._said.seek(before)
            stacks = self._said.read().decode(errors="replace").strip()
            if stacks.endswith(_OUTERMOST) or self._process.poll() is not None:
                break
        return stacks

    def _death(self) -> str:
        code = self._process.wait()
        how = f"exited with code {code}"
        if code < 0:
            names = {sign.value: sign.name for sign in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
            if -code == signal.SIGKILL:
                how += " (out of memory?)"
        return "\n".join(filter(None, [f"the process that ran the target {how}", self._last_said()]))

    def _last_said(self) -> str:
        """The last lines that the target printed."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()[-_SAID_LINES:]
        return "\n".join(["it said:", *lines]) if lines else ""
