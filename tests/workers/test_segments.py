"""A worker's shared memory and the parent's view of it, in one process: both sides, without what is between."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.segments import INLINE, Parcel, ParentSegments, WorkerSegments
from tests.properties import examples


class Line:
    """What a socket does: takes a parcel and its descriptors to the parent, and words of free memory back."""

    def __init__(self) -> None:
        self.worker, self.parent = WorkerSegments(), ParentSegments()

    def send(self, contents: list[bytes], collated: int = 0) -> tuple[Parcel, list[Any]]:
        """Buffers to the parent, the first `collated` of them written where the worker has room for them."""
        self.worker.give_back(self.parent.take_freed())
        self.worker.begin()
        buffers = []
        for number, content in enumerate(contents):
            memory = self.worker.memory(len(content)) if number < collated and content else None
            if memory is None:
                memory = np.empty(len(content), np.uint8)
            memory[:] = np.frombuffer(content, np.uint8)
            buffers.append(memory.data)
        parcel = self.worker.place(buffers)
        descriptors = self.worker.take_descriptors(parcel)
        joined = parcel.joined_inline()
        inline = np.zeros(0, np.uint8) if joined is None else np.frombuffer(joined, np.uint8)
        return parcel, self.parent.receive(parcel.described(), descriptors, inline)


def _bytes(number: int, size: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()


SIZES = st.lists(st.sampled_from([0, 1, 63, 64, 4096, 40_000, 100_000, 300_000]), max_size=4)


@examples(60)
@given(
    st.lists(st.tuples(SIZES, st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=25), st.randoms()
)
def test_whatever_is_held_stays_what_it_was(batches: list[Any], rng: Any) -> None:
    line, held = Line(), {}
    for number, (sizes, collated, let_go) in enumerate(batches):
        contents = [_bytes(100 * number + place, size) for place, size in enumerate(sizes)]
        _, views = line.send(contents, collated)
        assert [view.tobytes() for view in views] == contents
        assert all(view.ctypes.data % 64 == 0 for view in views if len(view))
        held[number] = (contents, views)
        del views
        for _ in range(min(let_go, len(held))):
            del held[rng.choice(sorted(held))]
        for contents, kept in held.values():
            assert [view.tobytes() for view in kept] == contents


def test_a_loop_that_lets_go_uses_the_same_memory_over_and_over() -> None:
    line, numbers = Line(), set()
    for turn in range(50):
        parcel, views = line.send([_bytes(turn, 200_000)], collated=1)
        numbers.update(number for number, _, _ in parcel.places)
        del views
    assert len(numbers) <= 2


def test_what_was_collated_there_is_not_copied_again() -> None:
    line = Line()
    line.send([bytes(200_000)])
    line.worker.give_back(line.parent.take_freed())
    line.worker.begin()
    memory = line.worker.memory(100_000)
    assert memory is not None
    memory[:] = 7
    parcel = line.worker.place([memory.data])
    assert (parcel.made, parcel.inline) == ([], [])
    # The parent sees what the worker writes now: it is the same memory.
    (view,) = line.parent.receive(parcel, [], np.zeros(0, np.uint8))
    memory[0] = 9
    assert view[0] == 9


def test_memory_that_the_worker_still_holds_is_not_used_again() -> None:
    line, kept = Line(), []
    line.send([bytes(200_000)])
    for turn in range(20):
        line.worker.give_back(line.parent.take_freed())
        line.worker.begin()
        memory = line.worker.memory(150_000)
        assert memory is not None
        memory[:] = turn
        kept.append(memory)
        parcel = line.worker.place([memory.data])
        line.parent.receive(parcel, line.worker.take_descriptors(parcel), np.zeros(0, np.uint8))
    assert [int(memory[0]) for memory in kept] == list(range(20))


def test_a_batch_that_came_to_nothing_gives_its_memory_back() -> None:
    line, numbers = Line(), set()
    for turn in range(30):
        line.worker.begin()
        memory = line.worker.memory(100_000)
        del memory
        parcel, views = line.send([_bytes(turn, 150_000)], collated=1)
        numbers.update(number for number, _, _ in parcel.places)
        del views
    assert len(numbers) <= 3


def test_small_batches_come_with_their_message() -> None:
    before = len(os.listdir("/proc/self/fd"))
    line, held = Line(), []
    for turn in range(100):
        parcel, views = line.send([_bytes(turn, 300), b""])
        assert {number for number, _, _ in parcel.places} == {INLINE}
        held.append(views)
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_held_batches_cost_no_open_files() -> None:
    before = len(os.listdir("/proc/self/fd"))
    line = Line()
    held = [line.send([bytes(100_000)])[1] for _ in range(200)]
    assert len(held) == 200
    assert len(os.listdir("/proc/self/fd")) == before


def test_segments_of_a_size_that_is_no_use_are_unmapped() -> None:
    line = Line()
    line.send([bytes(50_000_000)])
    for turn in range(100):
        line.send([_bytes(turn, 100_000)])
    with open("/proc/self/maps") as maps:
        mapped = [entry for entry in maps if "headrace" in entry]
    sizes = [int(b, 16) - int(a, 16) for a, b in (entry.split()[0].split("-") for entry in mapped)]
    assert max(sizes, default=0) < 10_000_000


def test_the_parent_is_told_when_the_last_view_of_a_view_dies() -> None:
    line = Line()
    _, views = line.send([bytes(200_000)])
    last = views[0][5:].view(np.int8)[::2]
    watched = weakref.ref(views[0])
    del views
    gc.collect()
    assert line.parent.take_freed() == []
    del last
    assert watched() is None
    assert len(line.parent.take_freed()) == 1


def test_without_memory_it_comes_with_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    before = len(os.listdir("/proc/self/fd"))
    line = Line()
    for turn in range(5):
        contents = [_bytes(turn, 400_000), _bytes(-turn % 7, 10)]
        _, views = line.send(contents, collated=2)
        assert [view.tobytes() for view in views] == contents
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_memory_cannot_be_anonymous_it_is_an_unlinked_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    line = Line()
    content = _bytes(3, 200_000)
    _, views = line.send([content])
    assert views[0].tobytes() == content
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert list(tmp_path.iterdir()) == []
