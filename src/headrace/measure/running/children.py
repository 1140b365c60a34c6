"""Runs in child processes, as their parent sees them: it starts them, listens, and ends them whatever they do."""

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
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
from headrace.workers.ending import end_all
from headrace.workers.process import WorkerProcess
from headrace.workers.wire import JSON

_INTERRUPT_SECONDS = 3.0
_START_SECONDS = 120.0
"""For starting and importing, on top of what a batch may take."""
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class TargetRun:
    """One run of one target, with settings of its own."""

    target: Target
    step: Step
    plan: Plan
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 60.0
    """For each batch and its step, including the first."""
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
    """What a child has reported, and what was seen of it from outside."""

    run: Run = field(default_factory=Run)
    memory: MemoryMb = field(default_factory=MemoryMb)
    error: str | None = None
    imported: bool = True
    """False if the error is that the target or its step cannot be imported."""
    interrupted: bool = False


Tell = Callable[[Run, int], None]
"""Called with what was measured so far, and the id of the process that is measured."""


def run_child(task: TargetRun, tell: Tell | None = None) -> Measured:
    """Never raises an error of the target, which is in `Measured.error`. Ctrl-C ends the run early."""
    return _run([(task, {})], tell)[0]


def run_ranks(task: TargetRun, ranks: int, tell: Tell | None = None) -> list[Measured]:
    """Run the target in `ranks` processes at once, each of which is given its rank as a launcher would."""
    port = _free_port()
    given = []
    for rank in range(ranks):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        variables = {name: str(value) for name, value in told.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        given.append((dataclasses.replace(task, trace=None) if rank else task, variables))
    return _run(given, tell)


def check(measured: Measured) -> Run:
    """Return the run, or raise its failure as a TargetError."""
    if measured.error is not None:
        raise TargetError(measured.error)
    return measured.run


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(given: Sequence[tuple[TargetRun, Mapping[str, str]]], tell: Tell | None) -> list[Measured]:
    """Run all of them at once; only the first is shown while it runs."""
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
    """Listen until all are done or given up, or until the deadline. All are read at once: a full connection would hold
    up its run."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            if not child.over:
                selector.register(child.connection, selectors.EVENT_READ, child)
        while selector.get_map() and clock.now() < deadline:
            _follow(selector, children[0], tell)


def _follow(selector: selectors.BaseSelector, shown: "_Child", tell: Tell | None) -> None:
    """Read from the children that have sent something, and check on the others."""
    ready = {key.data for key, _ in selector.select(_LOOK_SECONDS)}
    for child in [key.data for key in selector.get_map().values()]:
        if child in ready:
            child.read(tell if child is shown else None)
        else:
            child.look()
        if child.over:
            selector.unregister(child.connection)


class _Child:
    def __init__(self, task: TargetRun, environment: Mapping[str, str]) -> None:
        self._task = task
        self.measured = Measured()
        self.over = self._heard = False
        self._heard_at = clock.now()
        # A session of its own: Ctrl-C reaches only the parent, and killing the session ends the child's children.
        self._worker = WorkerProcess(
            "headrace.measure.running.child",
            JSON,
            environment=environment,
            keep_output=True,
            own_session=True,
        )
        self._worker.send(task.to_json())

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def connection(self) -> socket.socket:
        return self._worker.connection

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._worker.hang_up()

    def read(self, tell: Tell | None) -> None:
        self._heard, self._heard_at = True, clock.now()
        try:
            self._worker.flush()
            for message in self._worker.receive():
                self._accept(message.head, tell)
        except (EOFError, ConnectionError):
            if not self.over:
                self._give_up(self._death())

    def _accept(self, message: dict[str, Any], tell: Tell | None) -> None:
        self.measured.run = Run(**message["run"])
        match message["told"]:
            case "run" if tell is not None:
                tell(self.measured.run, self.pid)
            case "done":
                self.over = True
            case "failed":
                self.measured.imported = message["imported"]
                said = [message["error"], message["where"], self._worker.last_words()]
                self._give_up("\n".join(filter(None, said)))

    def look(self) -> None:
        """It has sent nothing for a while: check that it is alive and within its time."""
        if not self._worker.is_running():
            # The connection may still be open in a process that it has forked.
            self._give_up(self._death())
            return
        # A summary may take as long as the run was; starting and importing have a limit of their own.
        limit = self._task.timeout_seconds + self._task.plan.seconds
        if not self._heard:
            limit += _START_SECONDS
        if clock.now() - self._heard_at > limit:
            self._give_up(self._hang())

    def _give_up(self, error: str) -> None:
        self.over = True
        if not self.measured.interrupted:
            self.measured.error = error

    def interrupt(self) -> None:
        self.measured.interrupted = True
        self._worker.signal(signal.SIGINT)

    def _kill(self) -> None:
        """Kill it and everything that it has started, even in other sessions."""
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(self.pid).children(recursive=True)
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            for each in started:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        end_all([self._worker.process])

    def _hang(self) -> str:
        what = "no first batch" if self.measured.run.first_batch_seconds is None else "no batch"
        limit = self._task.timeout_seconds
        return f"{what} within {limit:g} seconds (--timeout); the process was doing this:\n{self._worker.stack()}"

    def _death(self) -> str:
        died = f"the process that ran the target {self._worker.death()}"
        return "\n".join(filter(None, [died, self._worker.last_words()]))
