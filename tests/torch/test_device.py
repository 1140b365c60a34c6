"""Copies ahead of the step, against a device that does nothing until it is told to: as late as real ones may be."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import headrace
from headrace.errors import StageError
from tests.properties import examples

pytest.importorskip("torch", reason="needs torch")

from torch import Tensor

from headrace.rows.settings import TOKEN_FIELDS
from headrace.torch import Loader
from headrace.torch.device import CopyAhead
from tests.samples import doubled
from tests.torch.late_device import (
    HostBatches,
    LateEvent,
    LateStreams,
    arrays,
    assert_same,
    dataset,
    label_of,
    late_loader,
    numbered,
)


def test_the_order_of_calls_for_three_batches() -> None:
    streams = LateStreams()
    ahead = CopyAhead(HostBatches(numbered(3)), streams)
    for number in range(3):
        next(ahead)
        streams.calls.append(f"hand out {number}")
    assert streams.calls == [
        *("side stream", "copy 0", "back", "mark 0"),
        *("side stream", "copy 1", "back", "mark 1"),
        *("wait 0", "keep", "hand out 0"),
        *("side stream", "copy 2", "back", "mark 2"),
        *("wait 1", "keep", "hand out 1"),
        *("wait 2", "keep", "hand out 2"),
    ]
    with pytest.raises(StopIteration):
        next(ahead)
    assert streams.calls[-3:] == ["synchronize 0", "synchronize 1", "synchronize 2"]


def test_nobody_waits_for_the_batch_after_the_one_that_is_due() -> None:
    """One batch in ten is late. The step before it begins at once, and its own copy when it is due."""
    late = set(range(9, 40, 10))
    host, streams = HostBatches(numbered(40), late), LateStreams()
    ahead = CopyAhead(host, streams)
    for handed in range(40):
        assert next(ahead)["longest"] == handed
        waits_for_next = handed + 1 in late
        assert host.taken == min(40, handed + (1 if waits_for_next else 2))
        copies = [call for call in streams.calls if call.startswith("copy")]
        assert copies == [f"copy {number}" for number in range(host.taken)]
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_slow_batch_of_a_loader_does_not_hold_up_the_step_before_it() -> None:
    """The step on batch 8 is what batch 9 waits for: if batch 8 were handed out only after it, neither would come."""
    stepped = threading.Event()

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        made.append(len(made))
        if len(made) == 10:
            assert stepped.wait(100), "batch 8 was not handed out before batch 9 was there"
        return batch

    made: list[int] = []
    streams = LateStreams()
    loader = late_loader(streams, prefetch=2, workers=1, epochs=2).map(slow, per="batch")
    for number, _ in enumerate(loader):
        if number == 8:
            stepped.set()
    assert number > 9


def test_a_field_that_was_not_used_before_is_copied_when_it_is() -> None:
    plain = list(headrace.Loader(dataset(), seq_len=16, batch_size=4, fields=TOKEN_FIELDS))
    streams = LateStreams()
    found = list(late_loader(streams, prefetch=0))
    before = len([call for call in streams.calls if call.startswith("copy")])
    assert before == len(plain), "only the tokens"
    streams.run(10**6)
    for batch, wanted in zip(found, plain, strict=True):
        # At once, without the device's being told: nobody knows when it will be used.
        assert np.array_equal(batch.labels.numpy(), wanted.labels)
        assert id(batch.labels) in streams.kept
        assert_same(batch, arrays(wanted))


def test_one_batch_is_ahead_and_no_more() -> None:
    host = HostBatches(numbered(5))
    ahead = CopyAhead(host, LateStreams())
    assert host.taken == 0
    for handed in range(1, 6):
        next(ahead)
        assert host.taken == min(handed + 1, 5)


def test_what_is_no_array_is_handed_over_as_it_is() -> None:
    streams = LateStreams()
    batches = list(_all(CopyAhead(HostBatches(numbered(2)), streams)))
    assert [(batch["longest"], batch["names"]) for batch in batches] == [(0, ["0"]), (1, ["1"])]
    assert all(id(batch["x"]) in streams.kept for batch in batches)


def _all(ahead: CopyAhead) -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield next(ahead)
        except StopIteration:
            return


def test_host_memory_is_held_until_its_copy_is_done_and_no_longer() -> None:
    streams, made = LateStreams(), list[weakref.ref[Any]]()

    def make() -> Iterator[dict[str, Any]]:
        for _ in range(5):
            array = np.zeros(3)
            made.append(weakref.ref(array))
            batch = {"x": array}
            del array
            yield batch
            del batch

    def held() -> list[bool]:
        return [reference() is not None for reference in made]

    ahead = CopyAhead(HostBatches(make()), streams)
    next(ahead)
    next(ahead)
    next(ahead)
    assert held() == [True] * 4
    streams.run(2)
    next(ahead)
    assert held() == [False, False, True, True, True]
    streams.run(9)
    next(ahead)
    assert held() == [False] * 5


@examples(20)
@given(
    st.lists(st.integers(0, 12), min_size=40, max_size=40),
    st.sampled_from([{"prefetch": 0}, {"prefetch": 1, "workers": 1}, {"prefetch": 4}]),
    st.booleans(),
)
def test_no_buffer_is_filled_again_before_its_copy_is_done(
    progress: list[int], options: dict[str, Any], keep_batches: bool
) -> None:
    """The device makes so many copies after each hand-out; in the end it has made all, and all are right."""
    wanted = [arrays(batch) for batch in headrace.Loader(dataset(), seq_len=16, batch_size=4)]
    streams = LateStreams()
    handed = []
    for batch, jobs in zip(late_loader(streams, **options), progress, strict=False):
        assert all(id(value) in streams.kept for value in batch.values() if isinstance(value, Tensor))
        streams.run(jobs)
        handed.append(batch if keep_batches else dict(batch))
    streams.run(10**6)
    assert len(handed) == len(wanted)
    for found, expected in zip(handed, wanted, strict=True):
        assert_same(found, expected)


def test_buffers_are_used_again_when_the_device_keeps_up() -> None:
    streams = LateStreams()
    loader = late_loader(streams, prefetch=0, epochs=4)
    for _ in loader:
        streams.run(100)
    assert len(loader) > 40
    assert streams.allocated <= 3


def test_a_batch_on_the_device_says_where_in_the_stream_it_stands() -> None:
    plain = [batch.info for batch in headrace.Loader(dataset(), seq_len=16, batch_size=4)]
    found = list(late_loader(LateStreams()))
    assert [batch.info for batch in found] == plain
    assert all(isinstance(batch, headrace.Batch) for batch in found)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_state_is_that_of_the_batch_handed_out_and_not_of_the_one_ahead(prefetch: int) -> None:
    plain = headrace.Loader(dataset(), seq_len=16, batch_size=4, epochs=2)
    wanted = [arrays(batch) for batch in plain]
    loader = late_loader(LateStreams(), prefetch=prefetch, epochs=2)
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    for step in (0, 1, 7, len(wanted) - 1):
        streams = LateStreams()
        other = late_loader(streams, prefetch=prefetch, epochs=2)
        other.load_state_dict(states[step])
        rest = list(other)
        streams.run(10**6)
        assert len(rest) == len(wanted) - step
        for found, expected in zip(rest, wanted[step:], strict=True):
            assert_same(found, expected)


def test_an_error_comes_after_the_batch_before_it() -> None:
    host = HostBatches([*numbered(2), StageError("batch 2 could not be made"), *numbered(1)])
    ahead = CopyAhead(host, LateStreams())
    assert [next(ahead)["longest"], next(ahead)["longest"]] == [0, 1]
    with pytest.raises(StageError, match="batch 2"):
        next(ahead)
    assert host.closed
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_failed_copy_is_an_error_in_its_turn_and_what_was_begun_is_waited_for() -> None:
    class FullStreams(LateStreams):
        def copy(self, tensor: Tensor) -> Tensor:
            if label_of(tensor) == 2:
                raise RuntimeError("CUDA out of memory")
            return super().copy(tensor)

    streams = FullStreams()
    ahead = CopyAhead(HostBatches(numbered(4)), streams)
    assert [next(ahead)["longest"], next(ahead)["longest"]] == [0, 1]
    with pytest.raises(RuntimeError, match="out of memory"):
        next(ahead)
    assert streams.calls[-3:] == ["synchronize 0", "synchronize 1", "synchronize 2"]


def test_ctrl_c_while_the_next_batch_is_awaited_ends_the_iteration() -> None:
    host = HostBatches([*numbered(2), KeyboardInterrupt(), *numbered(1)])
    ahead = CopyAhead(host, LateStreams())
    next(ahead)
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    assert host.closed
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_device_that_has_failed_does_not_hide_the_error_that_the_user_saw() -> None:
    class Broken(LateEvent):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    streams = LateStreams()
    with mock.patch.object(streams, "mark", return_value=Broken(streams, 0, 10**9)):
        ahead = CopyAhead(HostBatches(numbered(4)), streams)
        next(ahead)
        ahead.close()


def _leave_by_break(loader: Loader) -> None:
    for _ in loader:
        break


def _leave_by_error(loader: Loader) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError


def _leave_by_close(loader: Loader) -> None:
    iteration: Any = iter(loader)
    next(iteration)
    iteration.close()
    assert list(iteration) == []


def _leave_by_exhaustion(loader: Loader) -> None:
    for _ in loader:
        pass


def _leave_at_once(loader: Loader) -> None:
    iter(loader)


@pytest.mark.parametrize(
    "leave", [_leave_by_break, _leave_by_error, _leave_by_close, _leave_by_exhaustion, _leave_at_once]
)
def test_nothing_is_left_behind(leave: Callable[[Loader], None]) -> None:
    buffers: list[weakref.ref[Any]] = []

    class Watched(LateStreams):
        def allocate(self, count: int) -> NDArray[np.uint8]:
            owner = super().allocate(count)
            buffers.append(weakref.ref(owner))
            return owner

    streams = Watched()
    leave(late_loader(streams, prefetch=2, workers=1))
    gc.collect()
    assert [reference for reference in buffers if reference() is not None] == []
    assert streams.done == len(streams._jobs)
    assert not any(thread.name.startswith("headrace-load") for thread in threading.enumerate())


def test_a_pass_left_early_is_continued() -> None:
    wanted = [arrays(batch) for batch in headrace.Loader(dataset(), seq_len=16, batch_size=4)]
    streams = LateStreams()
    loader = late_loader(streams)
    found = [next(iter(loader)) for _ in range(2)] + list(loader)
    streams.run(10**6)
    for batch, expected in zip(found, wanted, strict=True):
        assert_same(batch, expected)
    assert len(loader) == len(wanted)


def test_mapped_loaders_copy_on_the_same_stream() -> None:
    streams = LateStreams()
    loader = late_loader(streams, fields=("tokens",)).map(doubled, per="batch", processes=1)
    wanted = [
        2 * batch["tokens"]
        for batch in headrace.Loader(dataset(), seq_len=16, batch_size=4, fields=("tokens",))
    ]
    found = list(loader)
    streams.run(10**6)
    for batch, tokens in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(batch.tokens.numpy(), tokens)


def test_pinning_and_copying_are_counted() -> None:
    loader = late_loader(LateStreams())
    count = sum(1 for _ in loader)
    stages = loader.stats().stages
    assert stages["pin"].count == stages["copy"].count == count
    assert loader.stats().batches == count
