"""tf.data service as a system: a dispatcher and two workers, each a process of its own.

    python serve_tfdata.py dispatcher             prints where it listens
    python serve_tfdata.py worker ADDRESS PORT    works for the dispatcher at that address
    python serve_tfdata.py calibration            finds how many operations take 10 ms

Its documentation says that Python functions are not supported (`tf.data.experimental.service`, 'Limitations'). So the
10 ms of processor time are spent by operations of a graph, whose number is found by a measurement before each turn; and
a function that waits cannot be had. The mode is DYNAMIC, the only one in which several workers share the rows of a
dataset: 'data is produced non-deterministically', 'at-most once visitation guarantees' (`ShardingPolicy`).
"""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.append(os.path.join(os.path.dirname(__file__), os.pardir))

from serve_rows import BATCH_SIZE, BLOCK, BURN_SECONDS
from serve_system import WORKERS, Settings

SIDE = 32
"""Of the matrices that are multiplied to spend time; larger ones would be shared between threads."""
FIRST_LOOPS = 500
CALIBRATION_BATCHES = 40
CALIBRATION_TRIES = 5
RESTART_SECONDS = 1.0
"""How soon a supervisor starts a killed worker again."""


class TfData:
    def __init__(self, dispatcher: str, workers: list["Worker"], loops: int, restarts: bool) -> None:
        self._dispatcher, self._workers = dispatcher, workers
        self._loops, self._restarts = loops, restarts
        self.facts: dict[str, Any] = {}

    def batches(self, first: int, count: int) -> Iterator[Any]:
        import tensorflow as tf

        service = tf.data.experimental.service
        dataset = tf.data.Dataset.range(first, first + count).map(making(self._loops))
        # Without compression: these bytes are random, and the network is this machine's own.
        remote = service.distribute(
            processing_mode=service.ShardingPolicy.DYNAMIC, service=self._dispatcher, compression=None
        )
        dataset = dataset.apply(remote).prefetch(tf.data.AUTOTUNE)
        yield from dataset.as_numpy_iterator()

    def kill_worker(self) -> bool:
        """One of the two. It starts again at the same address if there is a supervisor, which the service has not."""
        worker = self._workers[0]
        worker.kill()
        if self._restarts:
            threading.Timer(RESTART_SECONDS, worker.start).start()
        return True


class Worker:
    """A worker's process, which can be started again at its address."""

    def __init__(self, dispatcher: str) -> None:
        self._dispatcher, self._port = dispatcher, _free_port()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False

    def start(self) -> None:
        with self._lock:
            if not self._is_over:
                self._process = _run("worker", self._dispatcher, str(self._port))
        _first_line(self._process)

    def kill(self) -> None:
        with self._lock:
            _end(self._process)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            _end(self._process)


@contextlib.contextmanager
def start(settings: Settings, restarts: bool) -> Iterator[TfData]:
    if not settings.is_alone:
        raise RuntimeError("needs a network namespace of its own, because it listens on all addresses")
    begun = time.monotonic()
    loops, seconds = calibrated()
    passed = time.monotonic() - begun
    dispatcher = _run("dispatcher")
    workers: list[Worker] = []
    try:
        address = _first_line(dispatcher)
        for _ in range(WORKERS):
            workers.append(Worker(address.partition("://")[2]))
            workers[-1].start()
        system = TfData(address, workers, loops, restarts)
        system.facts |= {"transform_cpu_seconds": seconds, "calibration_seconds": passed}
        yield system
    finally:
        for worker in workers:
            worker.close()
        _end(dispatcher)


def making(loops: int) -> Callable[[Any], dict[str, Any]]:
    """The graph of a batch: its rows, and so many multiplications."""
    import tensorflow as tf

    def make_and_burn(number: Any) -> dict[str, Any]:
        rows = number * BATCH_SIZE + tf.range(BATCH_SIZE, dtype=tf.int64)
        burnt = burning(number, loops)
        # The multiplications count for nothing, but what nothing depends on would be left out.
        return {"row": rows + burnt, "x": tf.tile(tf.constant(BLOCK)[None], [BATCH_SIZE, 1])}

    return make_and_burn


def burning(number: Any, loops: int) -> Any:
    """0, after so many multiplications."""
    import tensorflow as tf

    matrix = tf.fill([SIDE, SIDE], 0.01 + 1e-9 * tf.cast(number, tf.float32))

    def is_not_over(done: Any, _: Any) -> Any:
        return done < loops

    def multiply(done: Any, matrix: Any) -> Any:
        # The cosine keeps the numbers from becoming so small that each operation takes longer.
        return done + 1, tf.cos(tf.matmul(matrix, matrix))

    _, matrix = tf.while_loop(is_not_over, multiply, (0, matrix), parallel_iterations=1)
    return tf.cast(0.0 * tf.reduce_sum(matrix), tf.int64)


def calibrated() -> tuple[int, float]:
    """How many multiplications take 10 ms of processor time, and how long so many took at last. As many processes find
    it out as there will be workers: on processors that share a core, the same work takes longer then."""
    processes = [_run("calibration") for _ in range(WORKERS)]
    found = [_first_line(process).split() for process in processes]
    for process in processes:
        _end(process)
    loops = statistics.mean(int(loops) for loops, _ in found)
    return round(loops), statistics.mean(float(seconds) for _, seconds in found)


def calibrate() -> None:
    """Prints what this process finds. It has one thread: others would spend processor time on looking for work."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    loops, each = FIRST_LOOPS, []
    for _ in range(CALIBRATION_TRIES):
        each.append(_burn_seconds(loops) / loops)
        loops = max(1, round(BURN_SECONDS / statistics.median(each)))
    print(loops, _burn_seconds(loops), flush=True)


def _burn_seconds(loops: int) -> float:
    """Of the processor, for a batch."""
    import tensorflow as tf

    burnt = iter(tf.data.Dataset.range(CALIBRATION_BATCHES + 1).map(lambda number: burning(number, loops)))
    next(burnt)
    begun = time.process_time()
    for _ in burnt:
        pass
    return (time.process_time() - begun) / CALIBRATION_BATCHES


def _free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        port: int = any_socket.getsockname()[1]
        return port


def _run(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)


def _first_line(process: "subprocess.Popen[str] | None") -> str:
    if process is None or process.stdout is None:
        return ""
    return process.stdout.readline().strip()


def _end(process: "subprocess.Popen[str] | None") -> None:
    if process is not None:
        process.kill()
        process.wait()


def serve(role: str, dispatcher: str = "", port: str = "0") -> None:
    """What a process of the service does, until it is killed."""
    import tensorflow as tf

    service = tf.data.experimental.service
    if role == "dispatcher":
        server = service.DispatchServer(service.DispatcherConfig(port=0))
        said = server.target
    else:
        address = f"127.0.0.1:{port}"
        config = service.WorkerConfig(dispatcher_address=dispatcher, worker_address=address, port=int(port))
        server = service.WorkerServer(config)
        said = "ready"
    print(said, flush=True)
    server.join()


if __name__ == "__main__":
    if sys.argv[1] == "calibration":
        calibrate()
    else:
        serve(*sys.argv[1:])
