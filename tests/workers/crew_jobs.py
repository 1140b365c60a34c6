"""Functions for crews in tests: worker processes import them from here."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from typing import Any

import numpy as np

DTYPES = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 >i4 >f8 f16".split()
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (3, 0, 2), (2, 3, 4), (1, 1, 1, 7)]


def filled(task: tuple[int, int]) -> dict[str, Any]:
    """As many numbers as the task says, all different, and different for every task."""
    first, count = task
    return {"x": np.arange(first, first + count, dtype=np.int64), "first": first}


def everything(seed: int) -> dict[str, Any]:
    """Arrays of every kind and shape, and values that are not arrays."""
    rng = np.random.default_rng(seed)
    result: dict[str, Any] = {"name": f"seed {seed}", "list": [1, "two", None]}
    for dtype in DTYPES:
        for shape in SHAPES:
            result[f"{dtype} {shape}"] = np.asarray(rng.integers(0, 100, shape)).astype(dtype)
    grid = rng.random((6, 8))
    result["transposed"], result["every other"], result["fortran"] = (
        grid.T,
        grid[::2, ::-3],
        np.asfortranarray(grid),
    )
    result["objects"] = np.array([1, "a", None], dtype=object)
    result["words"] = np.array(["a", "bcd"])
    result["days"] = np.array(["2020-02-02"], dtype="datetime64[D]")
    result["masked"] = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    result["number"] = np.float32(1.5)
    return result


def sizes(kept: bytes, task: bytes) -> dict[str, Any]:
    return {"sizes": (len(kept), len(task))}


def nothing(task: Any) -> dict[str, Any]:
    return {}


def picky(task: int) -> dict[str, Any]:
    if task % 5 == 3:
        raise PickyError(task, "not this one")
    return {"x": np.full(100, task)}


class PickyError(ValueError):
    """Cannot be unpickled: it takes two arguments and keeps one."""

    def __init__(self, task: int, why: str) -> None:
        super().__init__(f"{why}: {task}")


def fails_plainly(task: int) -> dict[str, Any]:
    raise KeyError(f"row {task}")


def leaves(task: int) -> dict[str, Any]:
    raise SystemExit(task)


def a_list(task: int) -> Any:
    return [task]


def unpicklable_value(task: int) -> dict[str, Any]:
    return {"f": lambda: task}


class OnlyThere:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return (pickle.loads, (b"broken",))


def cannot_be_opened(task: int) -> dict[str, Any]:
    return {"x": np.zeros(10), "thing": OnlyThere()}


def exits(task: int) -> dict[str, Any]:
    if task == 2:
        os._exit(3)
    return {"x": np.full(10, task)}


def crashes(task: int) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.005)


def hangs(task: str) -> dict[str, Any]:
    """Says so in a file first, unless it has nothing to say."""
    if task:
        leave_a_mark(task)
        a_long_wait()
    return {"x": np.full(10, 1)}


def a_long_wait() -> None:
    time.sleep(600)


def never_lets_go(task: tuple[str, str]) -> dict[str, Any]:
    """Keeps the interpreter to itself: no other thread of the worker can run."""
    mark, text = task
    leave_a_mark(mark)
    return {"found": re.match(r"(a+)+$", text)}


def dies_but_leaves_a_child_with_its_socket(path: str) -> dict[str, Any]:
    """The child writes its number into that file, and stays until it is killed."""
    with warnings.catch_warnings():
        # This process has a thread that reads its socket; newer Pythons warn of a fork then.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        a_long_wait()
    with open(path, "w") as file:
        file.write(str(child))
    os._exit(7)


class HangsWhenItIsLoaded:
    """As a function does whose module waits for something that never comes."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, task: Any) -> dict[str, Any]:
        return {}

    def __reduce__(self) -> Any:
        return (hangs, (self.mark,))


LIST_OPEN_FILES = """
import os
paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
found = [os.readlink(path) for path in paths if os.path.lexists(path)]
"""


def open_files(task: Any) -> dict[str, Any]:
    """What this worker has open, and what a process that it starts gets."""
    own: dict[str, Any] = {}
    exec(LIST_OPEN_FILES, own)
    program = [sys.executable, "-c", f"{LIST_OPEN_FILES}\nprint(*found)"]
    child = subprocess.run(program, close_fds=False, capture_output=True, text=True, check=True)
    return {"own": own["found"], "child": child.stdout.split(), "x": np.zeros(10)}


def surroundings(task: Any) -> dict[str, Any]:
    """What a worker inherits from the process that started it."""
    return {
        "cwd": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv,
        "search": os.environ.get("PYTHONPATH"),
        "main": os.path.basename(sys.modules["__main__"].__file__ or ""),
    }


def leave_a_mark(path: str) -> dict[str, Any]:
    with open(path, "w"):
        pass
    return {"x": np.zeros(8)}


def waits_for_a_mark(paths: tuple[str, str]) -> dict[str, Any]:
    """Leaves one when it begins, and waits for the other."""
    begun, may_end = paths
    leave_a_mark(begun)
    wait_for_file(may_end)
    return {"x": np.zeros(8)}


def perform(task: tuple[str, Any]) -> dict[str, Any]:
    """Another of these functions, by its name: so that one crew can serve many tests."""
    name, argument = task
    result: dict[str, Any] = globals()[name](argument)
    return result
