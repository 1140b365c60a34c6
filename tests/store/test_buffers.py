"""Memory that is used again must be nobody's any more."""

import gc
import pickle

import numpy as np
import pytest

from headrace.store.buffers import Buffers

LARGE = 4_000_000


def place_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_once_nobody_looks_at_it() -> None:
    buffers = Buffers()
    first = buffers.take(LARGE)
    place = place_of(first)
    first[:] = 7
    del first
    gc.collect()
    assert place_of(buffers.take(LARGE - 5)) == place


@pytest.mark.parametrize(
    "look",
    [
        lambda array: array[10:20],
        lambda array: array.data,
        lambda array: array.data.toreadonly()[5:],
        lambda array: np.frombuffer(array.data.toreadonly(), dtype=np.uint16)[3:9],
        lambda array: np.frombuffer(array.data, dtype=np.uint8)[::2].reshape(2, -1),
        lambda array: [memoryview(array)],
    ],
)
def test_any_view_keeps_it(look: object) -> None:
    buffers = Buffers()
    first = buffers.take(LARGE)
    first[:] = 7
    view = look(first)  # type: ignore[operator]
    place = place_of(first)
    del first
    gc.collect()
    for _ in range(5):
        other = buffers.take(LARGE)
        assert place_of(other) != place
        other[:] = 1
    shown = view[0] if isinstance(view, list) else view
    assert set(np.asarray(shown).view(np.uint8).ravel().tolist()) == {7}
    del view, shown
    gc.collect()
    assert place_of(buffers.take(LARGE)) in (place, place_of(other))


def test_small_and_very_large_ones_are_ordinary_memory() -> None:
    buffers = Buffers()
    for count in (0, 1, 100_000, 10_000_000):
        assert len(buffers.take(count)) == count
    assert pickle.loads(pickle.dumps(buffers.take(LARGE))).shape == (LARGE,)


def test_no_more_is_kept_than_useful() -> None:
    buffers = Buffers()
    taken = [buffers.take(LARGE) for _ in range(100)]
    del taken
    gc.collect()
    assert len(buffers._idle) == 16
