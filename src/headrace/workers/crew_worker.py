"""A worker process of a crew: what it runs, and what its messages (`wire.py`) hold.

The result {"x": five int32, "name": "a", "y": three float64} travels as

    body      [("x", ("<i4", (5,)), None), ("name", None, "a"), ("y", ("<f8", (3,)), None)]
    buffers   the bytes of x, the bytes of y

and the buffers are in shared memory (`segments.py`), or follow the body if they are small. In both cases the other side
makes views of them.
"""

import contextlib
import importlib
import itertools
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.spawn import prepare
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError, SettingsError
from headrace.observe.counting import NOTHING_FETCHED, Spent, now
from headrace.workers.segments import WorkerSegments
from headrace.workers.worker import Link, attach, flush_output

_IMPORTLIB = os.path.dirname(importlib.__file__) + os.sep
_OWN_CODE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
REMEDY = "define it at the top level of a module, or use threads"

Work = Callable[[Any], Mapping[str, Any]]
ArrayType = tuple[str, tuple[int, ...]]
"""The dtype and the shape of an array."""


def is_array(value: Any) -> bool:
    """Whether a value is sent as bytes: arrays of numbers and booleans. Other arrays (masked, objects) are pickled."""
    return type(value) in (np.ndarray, np.memmap) and value.dtype.kind in "biufc"


def lay_out(result: Mapping[str, Any]) -> tuple[bytes, list[memoryview]]:
    """The body of a result, and the bytes of its arrays."""
    entries: list[tuple[str, ArrayType | None, Any]] = []
    buffers: list[memoryview] = []
    for name, value in result.items():
        if is_array(value):
            entries.append((name, (value.dtype.str, value.shape), None))
            buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        else:
            entries.append((name, None, value))
    return pickle.dumps(entries), buffers


def open_result(body: bytes, buffers: Sequence[NDArray[np.uint8]]) -> dict[str, Any]:
    """Restore a result, with arrays that are views of the buffers."""
    left = iter(buffers)
    return {
        name: value if kind is None else next(left).view(kind[0]).reshape(kind[1])
        for name, kind, value in pickle.loads(body)
    }


def open_error(body: bytes) -> BaseException | None:
    """The exception behind a failure, with its causes, as far as they can be unpickled here."""
    chain: list[BaseException] = []
    with contextlib.suppress(Exception):
        for pickled in pickle.loads(body):
            chain.append(pickle.loads(pickled))
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    return chain[0] if chain else None


def start_message(work: Any) -> tuple[tuple[Any, ...], bytes]:
    """The function, and what a worker needs to import the same modules as this process."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SettingsError(
            "a worker process imports the script that started it, and the script starts workers again; "
            'put the code of the script under `if __name__ == "__main__":`'
        )
    main = _main_module()
    try:
        pickled = pickle.dumps(work)
        if not main and b"__main__" in pickled:
            raise pickle.PicklingError("it was defined interactively")
    except Exception as error:
        raise SettingsError(f"{short(work)}: cannot be sent to a process ({error}); {REMEDY}") from error
    preparation: dict[str, Any] = {"sys_path": sys.path, "sys_argv": sys.argv}
    # Only if the user has chosen it: asking for the default would fix it, and the user could not change it.
    if method := multiprocessing.get_start_method(allow_none=True):
        preparation["start_method"] = method
    return ("start", preparation, main), pickled


def _main_module() -> dict[str, str]:
    """How a worker can import the script that runs here; empty if there is none."""
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


class _TicketWorker:
    """Does tasks one after another, and answers each."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._main: dict[str, str] = {}
        self._work: Work = _no_work
        self._segments = WorkerSegments()

    def run(self) -> NoReturn:
        while True:
            message = self._link.messages.get()
            match message.head:
                case ("start", preparation, main):
                    self._start(message.body, preparation, main)
                case ("task", freed, lost):
                    self._segments.give_back(freed)
                    self._segments.give_up(lost)
                    self._do(message.body)

    def _start(self, work: bytes, preparation: dict[str, Any], main: dict[str, str]) -> None:
        try:
            prepare(preparation)
            self._main = main
            self._work = self._open(work)
        except BaseException as error:
            self._fail(error)
        else:
            self._link.send(("ready",))

    def _do(self, task: bytes) -> None:
        try:
            result = self._work(self._open(task))
            begun = now()
            if not isinstance(result, Mapping):
                raise TypeError(
                    f"returned {type(result).__name__}; it must return a mapping of names to values"
                )
            body, buffers = lay_out(result)
            self._segments.begin()
            parcel = self._segments.place(buffers)
        except BaseException as error:
            self._fail(error)
            return
        flush_output()
        head = ("done", parcel.described(), self._spent(begun))
        descriptors = self._segments.take_descriptors(parcel)
        self._link.send(head, body, parcel.joined_inline(), descriptors)

    def _spent(self, begun: int) -> Spent:
        """The cost of this batch: the stages that made it, if the function counts them, and its transport."""
        ended, take = now(), getattr(self._work, "take_spent", None)
        totals, spans, fetched = take() if take is not None else ([], [], NOTHING_FETCHED)
        spans.append(("transport", begun, ended, ended - begun, ""))
        return [*totals, ("transport", 1, ended - begun)], spans, fetched

    def _fail(self, error: BaseException) -> None:
        flush_output()
        self._link.send(*_failure(error))

    def _open(self, pickled: bytes) -> Any:
        """Unpickle an object. The user's script is imported with the first object that comes from it."""
        if self._main and b"__main__" in pickled:
            import_script(self._main)
            self._main = {}
        return pickle.loads(pickled)


def import_script(main: dict[str, str]) -> None:
    """Import the script of the process that started this one."""
    process: Any = multiprocessing.current_process()
    # As in multiprocessing, so that a script which starts processes during this import gets an error.
    process._inheriting = True
    try:
        prepare(main)
    finally:
        del process._inheriting


def _no_work(task: Any) -> NoReturn:
    raise RuntimeError("a task came before the function to do it with")


def _failure(error: BaseException) -> tuple[tuple[Any, ...], bytes]:
    try:
        said = str(error)
    except Exception:
        said = "(its message cannot be shown)"
    return ("failed", f"{type(error).__name__}: {said}", trace_of(error)), _pickled_chain(error)


def _pickled_chain(error: BaseException) -> bytes:
    """Pickling an exception leaves out what it was raised from, so the causes follow it, each on its own: one that
    cannot be pickled, or not be unpickled later, does not cost those before it."""
    chain: list[bytes] = []
    with contextlib.suppress(Exception):
        for each in _chain(error):
            chain.append(pickle.dumps(each))
    return pickle.dumps(chain)


def trace_of(error: BaseException) -> str:
    """The traceback of the user's error, from the user's code on. An error of ours explains itself."""
    shown = error.__cause__ if isinstance(error, HeadraceError) else error
    if shown is None:
        return ""
    frames = shown.__traceback__
    while frames is not None and _is_not_the_users(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    if frames is None and isinstance(error, HeadraceError):
        # It happened before any line of the user's was reached.
        is_syntax = isinstance(shown, SyntaxError)
        return "".join(traceback.format_exception_only(shown)).rstrip() if is_syntax else ""
    return "".join(traceback.format_exception(type(shown), shown, frames or shown.__traceback__)).rstrip()


def _is_not_the_users(filename: str) -> bool:
    return filename.startswith((_OWN_CODE, _IMPORTLIB, "<frozen importlib"))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def main() -> NoReturn:
    _TicketWorker(attach(sys.argv[1:])).run()


if __name__ == "__main__":
    # Import this module under its own name, because `__main__` will become the user's script.
    from headrace.workers import crew_worker

    crew_worker.main()
