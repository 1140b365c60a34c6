"""A fork of a process whose threads make batches: none of them is there, and nothing waits for them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.fork_lock import fork_lock
from headrace.rows.buffers import BufferPool
from headrace.workers.prefetch import Prefetch

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def in_a_fork(what: Callable[[], Any]) -> int:
    """How it ends there: 0 if all went well; it is killed if it does not come to an end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(90)
            what()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_lock_that_a_thread_held_is_open_in_a_fork() -> None:
    lock, held, over = fork_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert in_a_fork(lock.acquire) == 0
    assert lock.locked()
    over.set()
    thread.join()


def test_memory_can_be_had_in_a_fork_while_a_thread_takes_some() -> None:
    taking, over = threading.Event(), threading.Event()

    def allocate(count: int) -> NDArray[np.uint8]:
        if threading.current_thread() is not threading.main_thread():
            taking.set()
            over.wait()
        return np.empty(count, dtype=np.uint8)

    pool = BufferPool(keep=2, allocate=allocate)
    specs = [("x", np.int64, (4,))]
    thread = threading.Thread(target=pool.arrays, args=(specs,))
    thread.start()
    taking.wait()
    assert in_a_fork(lambda: pool.arrays(specs)) == 0
    over.set()
    thread.join()


def test_an_iteration_can_be_let_go_in_a_fork() -> None:
    source = Prefetch(lambda number: number, count=None, depth=2, threads=1, timeout_seconds=60, stage="load")
    assert next(source) == 0
    with source._shared.lock:
        assert in_a_fork(source.close) == 0
    assert next(source) == 1
    source.close()


_IMPORTS_IN_THREADS = """
    import sys, tempfile, threading
    import numpy as np
    import headrace

    class Recorder:
        found = []

        def find_spec(self, name, path=None, target=None):
            if threading.current_thread() is not threading.main_thread():
                self.found.append(name)

    folder = tempfile.mkdtemp()
    with headrace.Writer(folder + "/data", fields={"tokens": "uint16[*]", "label": "int32"}, shard_bytes=1) as writer:
        writer.write([{"tokens": np.arange(n % 9 + 1), "label": n} for n in range(40)])
    data = headrace.open(folder + "/data")
    mixture = headrace.mix({"a": (data, 1), "b": (data, 2)})
    sys.meta_path.insert(0, Recorder())
    for source in (data, mixture, [{"x": np.ones(3), "n": n} for n in range(40)]):
        rows = ({"seq_len": 16, "packing": packing} for packing in ("best-fit", "windows", "pad"))
        for options in ({}, *(() if isinstance(source, list) else rows)):
            for shuffle in ("global", "none"):
                loader = headrace.Loader(source, batch_size=2, prefetch=2, workers=2, shuffle=shuffle, **options)
                for batch in loader:
                    dict(batch)
                list(loader.map(lambda batch: dict(batch), per="batch"))
                list(loader.map(lambda sample, rng: {"x": rng.random()}))
    print(sorted(set(Recorder.found)))
"""


def test_threads_import_nothing() -> None:
    """A fork during an import leaves the child with a module that is being imported for ever."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_IMPORTS_IN_THREADS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
