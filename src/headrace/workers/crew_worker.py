"""A worker process of a crew: how it is started, what it runs, and what the messages (`wire.py`) between them hold.

The result {"x": five int32, "name": "a", "y": three float64} travels as

    body    [("x", ("<i4", (5,), 0), None), ("name", None, "a"), ("y", ("<f8", (3,), 64), None)]
    arrays  x in bytes 0 to 20, y in bytes 64 to 88: each begins at a multiple of 64

and the arrays' bytes are either in the slot of shared memory that came with the task, and then nothing of them is
sent, or they follow the body through the socket. The other side makes views of those bytes either way.
"""

import contextlib
import faulthandler
import itertools
import mmap
import multiprocessing
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.spawn import prepare
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.observe.counting import Spent, now
from headrace.workers.wire import NO_SIGNAL, Inbox, Message, aligned, encode, round_up

NO_SLOT = -1
REMEDY = "define it at the top level of a module, or use threads"
_PARENT_CHECK_MILLISECONDS = 1000
_ENDING_SECONDS = 5.0
"""From the moment a process closes its socket to its end: less than a moment, unless the machine is very busy."""

Work = Callable[[Any], Mapping[str, Any]]
Place = tuple[str, tuple[int, ...], int]
"""An array among the bytes of a result: dtype, shape, first byte."""


def is_array(value: Any) -> bool:
    """Whether a value goes as bytes: numbers and booleans. Other kinds of arrays (masked, of objects) are pickled."""
    return type(value) in (np.ndarray, np.memmap) and value.dtype.kind in "biufc"


def lay_out(result: Mapping[str, Any]) -> tuple[bytes, list[tuple[Place, NDArray[Any]]], int]:
    """The body of a result, its arrays with their places, and how many bytes they take."""
    entries: list[tuple[str, Place | None, Any]] = []
    arrays: list[tuple[Place, NDArray[Any]]] = []
    used = 0
    for name, value in result.items():
        if is_array(value):
            place = (value.dtype.str, value.shape, used)
            used += round_up(value.nbytes)
            arrays.append((place, value))
            entries.append((name, place, None))
        else:
            entries.append((name, None, value))
    return pickle.dumps(entries), arrays, used


def open_result(body: bytes, memory: NDArray[np.uint8]) -> dict[str, Any]:
    """The result again; its arrays are views of `memory`."""
    return {
        name: value if place is None else _view(memory, place) for name, place, value in pickle.loads(body)
    }


def open_error(body: bytes) -> BaseException | None:
    """The exception behind a failure, if it can be unpickled here."""
    with contextlib.suppress(Exception):
        chain: list[BaseException] = pickle.loads(body)
        for error, cause in itertools.pairwise(chain):
            error.__cause__ = cause
        return chain[0]
    return None


def _view(memory: NDArray[np.uint8], place: Place) -> NDArray[Any]:
    dtype, shape, first = place
    return np.ndarray(shape, dtype, buffer=memory, offset=first)


def spawn(descriptor: int, stacks: int) -> "subprocess.Popen[bytes]":
    """Start a worker with its end of a socket and a file for its stacks. It then expects the start message."""
    numbers = [str(number) for number in (descriptor, stacks, os.getpid())]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # -P and the whole search path: it imports what this process would, and nothing that lies in the directory.
    home = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join([*(path or os.getcwd() for path in sys.path), home])
    # One thread in each process, unless the user says otherwise: the processes already fill the cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search}
    command = [sys.executable, *flags, "-P", "-m", "headrace.workers.crew_worker", *numbers]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor, stacks], env=environment)


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """While workers are started: they inherit it, and it would hit them before they can ignore it."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def ending(process: "subprocess.Popen[bytes]") -> str:
    """How a process ended that says no more."""
    try:
        code = process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its socket"
    if code >= 0:
        return f"exited with code {code}"
    names = {sign.value: sign.name for sign in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def start_message(work: Work) -> bytes:
    """The function, and what a worker needs to be like this process."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SettingsError(
            "a worker process imports the script that started it, and the script starts workers again; "
            'put what it does under `if __name__ == "__main__":`'
        )
    main = _main_module()
    try:
        pickled = pickle.dumps(work)
        if not main and b"__main__" in pickled:
            raise pickle.PicklingError("it was defined interactively")
    except Exception as error:
        raise SettingsError(f"{short(work)}: cannot be sent to a process ({error}); {REMEDY}") from error
    preparation: dict[str, Any] = {"sys_path": sys.path, "sys_argv": sys.argv}
    # Only if it was chosen: to ask for the default would choose it, and forbid the user to.
    if method := multiprocessing.get_start_method(allow_none=True):
        preparation["start_method"] = method
    return encode(("start", preparation, main, os.environ.get("PYTHONPATH")), pickled)


def _main_module() -> dict[str, str]:
    """How a worker can import the script that runs here; nothing if there is none."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return {"init_main_from_name": main.__spec__.name}
    path = getattr(main, "__file__", None)
    return {"init_main_from_path": os.path.abspath(path)} if path and os.path.isfile(path) else {}


def short(value: Any) -> str:
    try:
        shown = repr(value)
    except Exception:
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


class _Worker:
    """Does tasks, one after the other, and answers each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._main: dict[str, str] = {}
        self._work: Work = _no_work
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0

    def run(self, messages: "queue.SimpleQueue[Message]") -> NoReturn:
        while True:
            message = messages.get()
            match message.head:
                case ("start", preparation, main, environment):
                    self._start(message.body, preparation, main, environment)
                case ("memory", slot_bytes, slots):
                    self._map(message.descriptors[0], slot_bytes, slots)
                case ("task", slot):
                    self._do(message.body, slot)

    def _start(
        self, work: bytes, preparation: dict[str, Any], main: dict[str, str], environment: str | None
    ) -> None:
        # The search path was lent by environment to find this module; the user's own processes get theirs back.
        if environment is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = environment
        try:
            prepare(preparation)
            self._main = main
            self._work = self._open(work)
        except BaseException as error:
            self._answer(*_failure(error))
        else:
            self._answer(("ready",))

    def _map(self, descriptor: int, slot_bytes: int, slots: int) -> None:
        try:
            self._memory, self._slot_bytes = mmap.mmap(descriptor, slot_bytes * slots), slot_bytes
        except OSError:
            # No address space: results go through the socket instead.
            self._memory, self._slot_bytes = None, 0
        finally:
            os.close(descriptor)

    def _do(self, task: bytes, slot: int) -> None:
        try:
            result = self._work(self._open(task))
            begun = now()
            if not isinstance(result, Mapping):
                raise TypeError(f"returned {type(result).__name__}: must return a mapping of names to values")
            body, arrays, used = lay_out(result)
            in_slot, memory = self._room(slot, used)
            for place, values in arrays:
                np.copyto(_view(memory, place), values)
        except BaseException as error:
            self._answer(*_failure(error))
        else:
            self._answer(("done", in_slot, used, self._spent(begun)), body, None if in_slot else memory)

    def _spent(self, begun: int) -> Spent:
        """What this batch has cost: the stages that made it, if the work counts them, and putting it here."""
        ended, take = now(), getattr(self._work, "take_spent", None)
        totals, spans = take() if take is not None else ([], [])
        spans.append(("transport", begun, ended, ended - begun, ""))
        return [*totals, ("transport", 1, ended - begun)], spans

    def _room(self, slot: int, used: int) -> tuple[bool, NDArray[np.uint8]]:
        """Where to put that many bytes: in the slot, or if there is none or it is too small, here."""
        if slot == NO_SLOT or self._memory is None or used > self._slot_bytes:
            return False, aligned(used)
        return True, np.frombuffer(self._memory, np.uint8, self._slot_bytes, slot * self._slot_bytes)

    def _open(self, pickled: bytes) -> Any:
        """Unpickle; the user's script is imported for the first object that comes from it, and only then."""
        if self._main and b"__main__" in pickled:
            process: Any = multiprocessing.current_process()
            # As in multiprocessing: a script that starts processes while it is imported by one is told so.
            process._inheriting = True
            try:
                prepare(self._main)
            finally:
                del process._inheriting
            self._main = {}
        return pickle.loads(pickled)

    def _answer(
        self, head: tuple[Any, ...], body: bytes = b"", arrays: NDArray[np.uint8] | None = None
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            # This process ends without the interpreter's own clean-up, so what was printed goes out now.
            with contextlib.suppress(Exception):
                stream.flush()
        try:
            self._connection.sendall(encode(head, body, 0 if arrays is None else len(arrays)), NO_SIGNAL)
            if arrays is not None:
                self._connection.sendall(arrays.data, NO_SIGNAL)
        except OSError:
            os._exit(0)


def _no_work(task: Any) -> NoReturn:
    raise RuntimeError("a task came before the function to do it with")


def _failure(error: BaseException) -> tuple[tuple[Any, ...], bytes]:
    try:
        # Pickling an exception leaves out what it was raised from.
        pickled = pickle.dumps(list(_chain(error)))
    except Exception:
        pickled = b""
    try:
        said = str(error)
    except Exception:
        said = "(its message cannot be shown)"
    return ("failed", type(error).__name__, said, "".join(traceback.format_exception(error))), pickled


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _read(connection: socket.socket, messages: "queue.SimpleQueue[Message]", parent: int) -> None:
    """The only reader of the socket: it ends the process with the crew, even while the user's function is busy."""
    inbox, waiting = Inbox(connection), select.poll()
    waiting.register(connection, select.POLLIN)
    try:
        while True:
            # A process forked from the parent may keep the other end open after the parent is gone.
            if not waiting.poll(_PARENT_CHECK_MILLISECONDS):
                if os.getppid() != parent:
                    break
            elif message := inbox.receive():
                messages.put(message)
    except (EOFError, OSError):
        # The crew has hung up, as it does when it is closed.
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(descriptor: int, stacks: int, parent: int) -> NoReturn:
    # Ctrl-C is the parent's matter. It was blocked until here so that it cannot hit a worker that starts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for inherited in (descriptor, stacks):
        os.set_inheritable(inherited, False)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    connection = socket.socket(fileno=descriptor)
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(
        target=_read, args=(connection, messages, parent), name="crew reader", daemon=True
    ).start()
    _Worker(connection).run(messages)


if __name__ == "__main__":
    # This module again, under its own name: `__main__` is to become the user's script.
    from headrace.workers import crew_worker

    crew_worker.main(*map(int, sys.argv[1:]))
