"""Memory is used again when nobody looks at it any more, and never before."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.rows.buffers import ALIGNMENT, BufferPool, Spec
from tests.properties import examples

SPECS: tuple[Spec, ...] = (("tokens", "int64", (4, 8)), ("mask", "bool", (4, 8)))


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def test_a_batch_that_was_let_go_gives_its_memory_to_the_next() -> None:
    pool = BufferPool(keep=2)
    first = address(pool.arrays(SPECS)["tokens"])
    for _ in range(5):
        assert address(pool.arrays(SPECS)["tokens"]) == first
    assert pool.allocated == 1


HOLDERS: dict[str, Callable[[dict[str, NDArray[Any]]], Any]] = {
    "the batch": lambda batch: batch,
    "one array": lambda batch: batch["tokens"],
    "another array of the batch": lambda batch: batch["mask"],
    "a row": lambda batch: batch["tokens"][1],
    "a view of a view": lambda batch: batch["tokens"].reshape(-1)[3:].reshape(1, -1)[:, ::2].T,
    "a view of another type": lambda batch: batch["tokens"].view(np.int32),
    "a memoryview": lambda batch: memoryview(batch["tokens"]),
    "a slice of a memoryview": lambda batch: memoryview(batch["tokens"].reshape(-1))[2:5],
    "an array from a memoryview": lambda batch: np.asarray(memoryview(batch["tokens"])),
    "an array from a buffer": lambda batch: np.frombuffer(batch["tokens"], dtype=np.uint8),
    "an iterator of its numbers": lambda batch: batch["tokens"].flat,
    "DLPack": lambda batch: np.from_dlpack(batch["tokens"]),
    "a ctypes pointer": lambda batch: batch["tokens"].ctypes,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_memory_is_kept_as_long_as_anything_looks_at_it(name: str) -> None:
    pool = BufferPool(keep=4)
    batch = pool.arrays(SPECS)
    batch["tokens"][:] = 7
    first, held = address(batch["tokens"]), HOLDERS[name](batch)
    del batch
    other = pool.arrays(SPECS)
    assert not any(first <= address(array) < first + 4 * 8 * 8 for array in other.values())
    del other, held
    assert {address(pool.arrays(SPECS)["tokens"]) for _ in range(3)} == {first}


def test_all_batches_of_a_list_have_memory_of_their_own() -> None:
    pool = BufferPool(keep=3)
    batches = []
    for number in range(20):
        batches.append(pool.arrays(SPECS))
        batches[-1]["tokens"][:] = number
    assert [set(batch["tokens"].ravel().tolist()) for batch in batches] == [{number} for number in range(20)]
    assert pool.allocated == 20


def test_after_the_first_rounds_nothing_is_allocated() -> None:
    pool = BufferPool(keep=4)
    held: list[Any] = []
    made = []
    for _ in range(200):
        held = [*held[-2:], pool.arrays(SPECS)]
        made.append(pool.allocated)
    assert made[-1] == made[5] <= 4


def test_more_than_it_keeps_is_let_go_again() -> None:
    pool = BufferPool(keep=2)
    held = [pool.arrays(SPECS) for _ in range(6)]
    del held
    held = [pool.arrays(SPECS) for _ in range(2)]
    assert pool.allocated == 6
    held.append(pool.arrays(SPECS))
    assert pool.allocated == 7


def test_a_smaller_batch_fits_where_a_larger_was_and_a_larger_one_replaces_it() -> None:
    pool = BufferPool(keep=2)
    first = address(pool.arrays([("x", "int64", (100,))])["x"])
    assert address(pool.arrays([("x", "int64", (3,))])["x"]) == first
    pool.arrays([("x", "int64", (200,))])
    assert pool.allocated == 2
    for size in (1, 100, 200):
        pool.arrays([("x", "int64", (size,))])
    assert pool.allocated == 2


DTYPES = st.sampled_from(["bool", "int8", "uint16", "int32", "int64", "float64", "complex128"])
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
LAYOUTS = st.lists(st.tuples(DTYPES, SHAPES), max_size=6)


@examples(60)
@given(st.lists(LAYOUTS, min_size=1, max_size=4), st.integers(0, 63))
def test_arrays_are_aligned_of_their_shape_and_apart_from_each_other(
    layouts: list[list[tuple[str, tuple[int, ...]]]], skew: int
) -> None:
    def allocate(count: int) -> NDArray[np.uint8]:
        return np.empty(count + skew, dtype=np.uint8)[skew:]

    pool = BufferPool(keep=3, allocate=allocate)
    for layout in layouts:
        specs = [(f"a{number}", dtype, shape) for number, (dtype, shape) in enumerate(layout)]
        arrays = pool.arrays(specs)
        assert list(arrays) == [name for name, _, _ in specs]
        for name, dtype, shape in specs:
            assert arrays[name].dtype == dtype
            assert arrays[name].shape == shape
            assert address(arrays[name]) % ALIGNMENT == 0
            assert arrays[name].flags.c_contiguous
            assert arrays[name].flags.writeable
        for number, array in enumerate(arrays.values()):
            array.reshape(-1).view(np.uint8)[:] = number
        for number, array in enumerate(arrays.values()):
            assert (array.reshape(-1).view(np.uint8) == number).all()


def test_a_batch_of_no_rows_is_no_problem() -> None:
    pool = BufferPool(keep=2)
    batch = pool.arrays([("tokens", "int64", (0, 8)), ("labels", "int64", (0, 8))])
    assert [array.shape for array in batch.values()] == [(0, 8), (0, 8)]
    assert pool.arrays([]) == {}


# Threads


class _Handover:
    """A lock that lets another thread have its turn at the moment it is released."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self._lock, self._turn, self._taken = threading.Lock(), turn, False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._taken:
            self._taken = True
            other = threading.Thread(target=self._turn)
            other.start()
            other.join()


def test_two_threads_that_ask_at_the_same_time_get_different_memory() -> None:
    pool = BufferPool(keep=4)
    pool.arrays(SPECS)
    theirs: list[dict[str, NDArray[Any]]] = []
    pool._lock = _Handover(lambda: theirs.append(pool.arrays(SPECS)))  # type: ignore[assignment]
    ours = pool.arrays(SPECS)
    assert not np.shares_memory(ours["tokens"], theirs[0]["tokens"])


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("turns", [1000, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("hasty_threads")
def test_threads_never_overwrite_what_another_one_holds(turns: int) -> None:
    pool, failures = BufferPool(keep=12), []

    def hammer(number: int) -> None:
        rng = random.Random(number)
        held: list[tuple[int, NDArray[Any]]] = []
        for turn in range(turns):
            value = turn * 16 + number
            array = pool.arrays(SPECS)["tokens"]
            array[:] = value
            held.append((value, array[1:] if turn % 2 else array))
            del array
            while len(held) > rng.randrange(3):
                wanted, found = held.pop(rng.randrange(len(held)))
                if not (found == wanted).all():
                    failures.append((number, turn))
                del found

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.allocated <= 16
