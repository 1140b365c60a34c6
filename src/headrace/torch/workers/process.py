"""What runs in a worker process: it does the tasks that come through its socket, one after the other.

Messages to it: ("task", epoch, number, free segments, lost ones, whether someone draws a timeline) with the index as
its body, ("again", epoch, what is new), ("stop",). Its answers: ("batch", epoch, number, ...), ("end", epoch,
number, state) for an iterable that has no more, and ("begun", epoch, state) if it is to tell when it has begun.

A thread reads the socket, so that whoever sends never waits long, and so that it shows at once when the loader hangs
up or its process dies: then the worker leaves as soon as the user's code lets it, or else after a few seconds, or at
once if there is no loader any more. If some other process has inherited the other end of the socket, the parent's end
shows within a second.
"""

import os
import pickle
import queue
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

from headrace.observe.counting import Counters, now, working_for
from headrace.torch.workers import collating, parcels
from headrace.torch.workers.job import BEGUN, Fetching, Job, Outcome, seed_this_process, worker_info
from headrace.workers import wire
from headrace.workers.ending import is_orphan
from headrace.workers.segments import WorkerSegments
from headrace.workers.worker import listen

_LARGE_BYTES = 2**14
"""A longer pickle goes into shared memory as well."""
_LEAVE_SECONDS = 5.0
"""How long the user's code has to come to an end if the loader has hung up."""
_ORPHAN_SECONDS = 0.2
"""How long it has if the loader's process is gone."""
_SPANS = 256
"""The latest that it keeps until it sends a batch, for timelines."""


def run(
    connection: socket.socket, give_job: Callable[[], Job], worker: int, inherited: list[socket.socket]
) -> None:
    """The target of a worker process. `give_job` may take long: it unpickles the user's dataset."""
    for other in inherited:
        other.close()
    try:
        signal_handling._set_worker_signal_handlers()
        torch.set_num_threads(1)
        tasks = _Tasks()
        reading = threading.Thread(
            target=_read, args=(connection, tasks, os.getppid()), name="task reader", daemon=True
        )
        reading.start()
        _BatchWorker(connection, worker).run(give_job, tasks)
    except (KeyboardInterrupt, ConnectionError):
        # Ctrl-C: the parent gets it too, and tells the user. Or it has hung up.
        pass


class _Tasks:
    """What has been read and not been done."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[wire.Message | None] = queue.SimpleQueue()
        self._epoch, self._over = 0, False
        self.freed: deque[int] = deque()
        self.lost: deque[int] = deque()
        """Segments that the parent has no views of, and those of which nobody knows."""

    def put(self, message: wire.Message) -> None:
        if message.head[0] == "task":
            # Also of a task that will not be done.
            self.freed.extend(message.head[3])
            self.lost.extend(message.head[4])
        if message.head[0] == "again":
            # What waits was for the epoch before, and nobody waits for it any more.
            self._epoch = message.head[1]
        self._messages.put(message)

    def end(self) -> None:
        self._over = True
        self._messages.put(None)

    def get(self) -> wire.Message | None:
        """The next one; None when there are no more."""
        message = self._messages.get()
        if self._over or message is None or message.head[0] == "stop":
            return None
        return message

    def is_left(self, message: wire.Message) -> bool:
        """Whether it is a task of an epoch that nobody waits for any more."""
        return bool(message.head[0] == "task" and message.head[1] != self._epoch)


def _taken(numbers: deque[int]) -> list[int]:
    return [numbers.popleft() for _ in range(len(numbers))]


def _read(connection: socket.socket, tasks: _Tasks, parent: int) -> NoReturn:
    listen(connection, parent, tasks.put)
    tasks.end()
    deadline = time.monotonic() + _LEAVE_SECONDS
    # At least once: the other end of the socket closes a moment before its process is gone.
    time.sleep(_ORPHAN_SECONDS)
    while time.monotonic() < deadline and not is_orphan(parent):
        time.sleep(_ORPHAN_SECONDS)
    os._exit(0)


class _BatchWorker:
    def __init__(self, connection: socket.socket, worker: int) -> None:
        self._connection, self._worker = connection, worker
        self._where = f"in DataLoader worker process {worker}"
        self._segments = WorkerSegments()
        self._counters = Counters()

    def run(self, give_job: Callable[[], Job], tasks: _Tasks) -> None:
        failure: ExceptionWrapper | None = None
        fetching: Fetching | None = None
        try:
            job = give_job()
            seed_this_process(job, self._worker)
            torch_worker._worker_info = worker_info(job, self._worker)
            fetching = Fetching(job, self._worker, self._where)
            if fetching.init_failure is not None:
                self._answer(0, BEGUN, Outcome(fetching.init_failure))
            elif job.tell_begun:
                self._tell_begun(0, None)
        except Exception:
            failure = ExceptionWrapper(where=self._where)
            self._answer(0, BEGUN, Outcome(failure))
        while message := tasks.get():
            if tasks.is_left(message):
                self._do_in_vain(fetching, message)
                continue
            match message.head:
                case ("again", epoch, following):
                    state = fetching.begin_again(following) if fetching is not None else None
                    if following.tell_state:
                        self._tell_begun(epoch, state)
                case ("task", epoch, number, _, _, spans):
                    self._counters.keep(_SPANS if spans else None)
                    self._segments.give_back(_taken(tasks.freed))
                    self._segments.give_up(_taken(tasks.lost))
                    self._segments.begin()
                    if fetching is None:
                        self._answer(epoch, number, Outcome(failure))
                    else:
                        self._do(fetching, epoch, number, message.body)

    def _do_in_vain(self, fetching: Fetching | None, message: wire.Message) -> None:
        """A task of an epoch that was left early: it is done, and what came of it is dropped.

        Which tasks were done would otherwise depend on when the loop was left, and with that the random numbers and the
        dataset that the next epoch begins with.
        """
        if fetching is not None:
            self._segments.begin()
            with collating.lend(self._segments):
                fetching.fetch(pickle.loads(message.body))

    def _do(self, fetching: Fetching, epoch: int, number: int, index: bytes) -> None:
        with collating.lend(self._segments), working_for(self._counters):
            outcome = fetching.fetch(pickle.loads(index))
        if outcome is None:
            return
        if outcome.ended:
            self._send(("end", epoch, number, _pickled(outcome.state)))
        else:
            self._answer(epoch, number, outcome)

    def _tell_begun(self, epoch: int, state: Any) -> None:
        try:
            pickled = _pickled(state)
        except Exception:
            self._answer(epoch, 0, Outcome(ExceptionWrapper(where=self._where)))
        else:
            self._send(("begun", epoch, pickled))

    def _answer(self, epoch: int, number: int, outcome: Outcome) -> None:
        begun = now()
        try:
            state = _pickled(outcome.state)
            pickled, buffers = parcels.pack(outcome.data)
        except Exception as error:
            state = None
            pickled, buffers = parcels.pack(self._cannot_be_sent(outcome.data, error))
        large = len(pickled) > _LARGE_BYTES
        if large:
            buffers.append(memoryview(pickled))
        parcel = self._segments.place(buffers)
        inline = parcel.joined_inline()
        self._counters.add("transport", begun, now())
        spent = self._counters.take()
        head = ("batch", epoch, number, parcel.described(), large, state, spent)
        descriptors = self._segments.take_descriptors(parcel)
        self._send(head, b"" if large else pickled, inline, descriptors)

    def _cannot_be_sent(self, data: Any, error: Exception) -> ExceptionWrapper:
        """In place of a batch, or of an exception, that cannot be pickled."""
        if isinstance(data, ExceptionWrapper):
            name = getattr(data.exc_type, "__name__", str(data.exc_type))
            said = f"Caught {name} {self._where}, which cannot be pickled ({error}).\n{data.exc_msg}"
        else:
            said = (
                f"Caught {type(error).__name__} {self._where}: the batch cannot be pickled to be sent to the loader: "
                f"{error}; return something else, or use worker_kind='thread'.\n{traceback.format_exc()}"
            )
        wrapper = ExceptionWrapper((RuntimeError, RuntimeError(said), None), where=self._where)
        wrapper.exc_msg = said
        return wrapper

    def _send(
        self,
        head: tuple[Any, ...],
        body: bytes = b"",
        inline: memoryview | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        message = wire.encode(head, body, 0 if inline is None else len(inline))
        wire.send_all(self._connection, message, descriptors)
        if inline is not None:
            self._connection.sendall(inline, wire.NO_SIGNAL)


def _pickled(state: Any) -> bytes | None:
    return None if state is None else pickle.dumps(state)
