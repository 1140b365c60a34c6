"""Where servers on a Ray cluster are, for a client.

Ray is asked by a process of its own (`lookup.py`). Ray ends processes that have lost their cluster, changes how they
take signals, and does not survive a fork. None of this may happen to a training job, which only wants addresses.
"""

import contextlib
import importlib.util
import os
import select
import sys
import time
import weakref
from typing import Any

from headrace.errors import MissingExtraError, SettingsError, how_to_install
from headrace.workers import wire
from headrace.workers.process import WorkerProcess, ctrl_c_waits, end_workers

_ANSWER_SECONDS = 60.0
"""How long an answer may take, with the time in which Ray connects."""
_AGAIN_SECONDS = 10.0
"""How long to wait before Ray is asked again, if it could not be."""


class RayServers:
    """The addresses of the servers of a name. It is called by one thread."""

    def __init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError(f"an address like ray:NAME needs Ray: {how_to_install('ray')}")
        self._processes: list[WorkerProcess] = []
        """The process that asks, if it is there."""
        self._failed_at: float | None = None
        self._problem = ""
        self._end = weakref.finalize(self, end_workers, self._processes, os.getpid())

    def __call__(self, name: str) -> list[str]:
        """A SettingsError if Ray cannot be asked, or does not know the name."""
        if self._failed_at is not None and time.monotonic() - self._failed_at < _AGAIN_SECONDS:
            raise SettingsError(self._problem)
        what, told = self._answer_of(name)
        if what == "failed":
            self._give_up(told)
            raise SettingsError(told)
        if what == "unavailable":
            raise SettingsError(told)
        if what == "unknown":
            raise SettingsError(
                "no servers of this name run on the Ray cluster; start them with headrace serve --engine ray "
                f"--name {name}"
            )
        return [str(address) for address in told]

    def _answer_of(self, name: str) -> tuple[str, Any]:
        try:
            if not self._processes:
                self._start()
            self._processes[0].send(["look", name])
            what, told = self._receive(self._processes[0])
        except TimeoutError:
            return "failed", f"Ray has not answered for {_ANSWER_SECONDS:g} seconds"
        except (EOFError, OSError) as error:
            return "failed", f"the process that asks Ray {self._death(error)}"
        return what, told

    def _start(self) -> None:
        with ctrl_c_waits():
            process = WorkerProcess(
                "headrace.serve.ray.lookup", wire.JSON, keep_output=True, own_session=True
            )
        self._processes.append(process)
        process.send(["connect", _address_here()])

    def _receive(self, process: WorkerProcess) -> list[Any]:
        waiting = select.poll()
        waiting.register(process.connection, select.POLLIN)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            waiting.poll(1000)
            for message in process.receive():
                return list(message.head)
        raise TimeoutError

    def _death(self, error: Exception) -> str:
        if not self._processes:
            return f"cannot be started: {error}"
        process = self._processes[0]
        return f"{process.death()}; {process.last_words()}"

    def _give_up(self, problem: str) -> None:
        """Start from the beginning in a while: the cluster may be another one then."""
        self._problem, self._failed_at = problem, time.monotonic()
        end_workers(self._processes, os.getpid())
        self._processes.clear()


def _address_here() -> str | None:
    """The cluster that this process is connected to, if it is."""
    ray = sys.modules.get("ray")
    with contextlib.suppress(Exception):
        if ray is not None and ray.is_initialized():
            return str(ray.get_runtime_context().gcs_address)
    return None
