"""A thread that receives batches from workers and copies them to page-locked memory, ahead of the loop."""

import copy
import dataclasses
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from headrace.observe.counting import Counters, now, spent, working_for
from headrace.torch.workers.collating import Dataclass
from headrace.torch.workers.job import NextEpoch, WorkerResult, Workers, end_now

_JOIN_SECONDS = 5.0
_SLICE_SECONDS = 0.2
"""How long the thread listens before it looks whether it should end."""


class Pinned:
    """Workers whose batches come in page-locked memory."""

    def __init__(self, workers: Workers, device: str | None, counters: Counters | None = None) -> None:
        self._workers = workers
        self._results: queue.SimpleQueue[list[WorkerResult] | BaseException] = queue.SimpleQueue()
        self._over = threading.Event()
        number = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
        self._thread = threading.Thread(
            target=_pin_all,
            args=(workers, self._results, self._over, device, number, counters or Counters()),
            name="DataLoader-pin",
            daemon=True,
        )
        self._end = weakref.finalize(self, _end, workers, self._over, self._thread)
        self._thread.start()

    def send(self, worker: int, epoch: int, number: int, index: Any) -> None:
        self._workers.send(worker, epoch, number, index)

    def begin_again(self, epoch: int, following: NextEpoch) -> None:
        self._workers.begin_again(epoch, following)

    def stop(self, worker: int) -> None:
        self._workers.stop(worker)

    def receive(self, timeout_seconds: float | None) -> list[WorkerResult]:
        try:
            results = self._results.get(timeout=timeout_seconds)
        except queue.Empty:
            return []
        if isinstance(results, BaseException):
            raise results
        return results

    def waiting(self) -> int:
        return self._results.qsize()

    def close(self) -> None:
        end_now(self._end)

    def pids(self) -> list[int | None]:
        return self._workers.pids()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, worker: int) -> Any:
        return self._workers[worker]


def _pin_all(
    workers: Workers,
    results: "queue.SimpleQueue[list[WorkerResult] | BaseException]",
    over: threading.Event,
    device: str | None,
    number: int,
    counters: Counters,
) -> None:
    try:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(number)
        while not over.is_set():
            with working_for(counters):
                came = [_pinned(result, device, number) for result in workers.receive(_SLICE_SECONDS)]
            if came:
                results.put(came)
            # Else the thread would hold the last batch until the next one comes.
            del came
    except BaseException as error:
        results.put(error)


def _pinned(result: WorkerResult, device: str | None, number: int) -> WorkerResult:
    if result.ended or result.begun or isinstance(result.data, ExceptionWrapper):
        return result
    try:
        return result._replace(data=pin(result.data, device))
    except Exception:
        return result._replace(data=ExceptionWrapper(where=f"in pin memory thread for device {number}"))


def pin(data: Any, device: str | None) -> Any:
    """A copy of a batch in page-locked memory: PyTorch's, and dataclasses field by field."""
    begun = now()
    pinned = _copy(data, device)
    spent("pin", begun)
    return pinned


def _copy(data: Any, device: str | None) -> Any:
    if not isinstance(data, Dataclass) or hasattr(data, "pin_memory"):
        return pin_memory(data, device)
    result = copy.copy(data)
    for field in dataclasses.fields(data):  # type: ignore[arg-type]
        object.__setattr__(result, field.name, _copy(getattr(data, field.name), device))
    return result


def _end(workers: Workers, over: threading.Event, thread: threading.Thread) -> None:
    # The thread first: it listens to the workers.
    over.set()
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
    workers.close()
