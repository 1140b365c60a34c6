"""What a loop over a Loader gives: passes, loops left early, evaluation, threads that share a loop."""

import functools
import sys
import threading
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.load.loader import Loader
from tests.load import streams
from tests.properties import examples


def _loader(lengths: list[int], **options: Any) -> Loader:
    return Loader(streams.token_dataset(lengths), **{"batch_size": 2, "seq_len": 8, **options})


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_length_is_the_number_of_batches_in_every_pass(epochs: int, drop_last: bool) -> None:
    for batch_size in (1, 3, 4, 10):
        loader = _loader([8] * 10, epochs=epochs, drop_last=drop_last, batch_size=batch_size)
        for _ in range(3):
            promised = len(loader)
            assert len(list(loader)) == promised
        rows = epochs * 10
        assert promised == (rows // batch_size if drop_last else -(-rows // batch_size))


def test_an_endless_loader_has_no_length_and_goes_on_through_the_epochs() -> None:
    loader = _loader([8] * 10, epochs=None, batch_size=3)
    with pytest.raises(TypeError, match="epochs=None"):
        len(loader)
    rows = streams.flat(map(streams.rows_of, islice(loader, 20)))
    for epoch in range(6):
        assert len(set(rows[epoch * 10 : (epoch + 1) * 10])) == 10
    assert loader.epoch == 6
    wanted = streams.flat(map(streams.rows_of, _loader([8] * 10, epochs=6, batch_size=1)))
    assert rows == wanted


def test_each_pass_is_the_next_epoch_in_another_order() -> None:
    loader = _loader([8] * 40)
    passes = [streams.flat(map(streams.rows_of, loader)) for _ in range(3)]
    assert len({tuple(rows) for rows in passes}) == 3
    assert len({frozenset(rows) for rows in passes}) == 1
    together = _loader([8] * 40, epochs=3)
    assert streams.flat(map(streams.rows_of, together)) == streams.flat(passes)


def test_a_loop_left_early_is_continued_by_the_next() -> None:
    loader = _loader([8] * 20)
    first = streams.take(loader)
    second = streams.take(_resumed(loader))
    assert streams.same(streams.take(loader, 3), second[:3])
    assert len(loader) == len(second) - 3
    assert streams.same(streams.take(_resumed(loader)), second[3:])
    assert streams.same(streams.take(loader, 1), second[3:4])
    assert streams.same(streams.take(loader), second[4:])
    assert loader.epoch == 2
    assert len(loader) == len(first)


def _resumed(loader: Loader) -> Loader:
    other = _loader([8] * 20)
    other.load_state_dict(loader.state_dict())
    return other


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("taken", [0, 3])
def test_a_pass_consumed_by_its_length_is_followed_by_the_next(drop_last: bool, taken: int) -> None:
    """As Lightning does it: nobody asks for the batch after the last one."""
    stream = [streams.take(loader) for loader in [_loader([8] * 22, drop_last=drop_last)] * 3]
    loader = _loader([8] * 22, drop_last=drop_last)
    streams.take(loader, taken)
    loader.load_state_dict(loader.state_dict())
    for number, wanted in enumerate(stream):
        batches = iter(loader)
        found = []
        for _ in range(len(loader)):
            found.append(streams.kept(next(batches)))
            assert len(loader) == len(wanted) - (0 if number else taken), "the length changes on the way"
        assert streams.same(found, wanted if number else wanted[taken:])


def test_the_epoch_is_that_of_the_next_batch_even_if_too_few_rows_are_left_for_one() -> None:
    data = headrace.from_arrays({"x": np.arange(100)})
    loader, other = Loader(data, batch_size=10), Loader(data, batch_size=16)
    streams.take(loader, 9)
    other.load_state_dict(loader.state_dict())
    epochs = [{batch.info.position // 100 for batch in other} for _ in range(other.epoch, 3)]
    assert epochs == [{1}, {2}]


def test_a_loop_that_is_continued_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = _loader([8] * 20)
    streams.take(loader)
    streams.take(loader, 1)
    loader.load_state_dict(loader.state_dict())
    streams.take(loader, 1)
    assert "restart=True" not in caplog.text
    for _ in range(2):
        streams.take(loader, 1)
    assert caplog.text.count("starts with row 24 of the stream") == 1
    assert caplog.text.count("restart=True") == 1


def test_evaluation_starts_from_the_beginning_each_time() -> None:
    loader = _loader([8] * 20, restart=True)
    wanted = streams.take(_loader([8] * 20))
    for count in (2, 3, None, None):
        assert len(loader) == len(wanted)
        assert streams.same(streams.take(loader, count), wanted[:count])
    # A state is continued once.
    streams.take(loader, 2)
    loader.load_state_dict(loader.state_dict())
    assert len(loader) == len(wanted) - 2
    assert streams.same(streams.take(loader), wanted[2:])
    assert streams.same(streams.take(loader), wanted)


@pytest.mark.parametrize("prefetch", [0, 4])
def test_threads_that_share_an_iteration_get_every_batch_once(prefetch: int) -> None:
    data = headrace.from_arrays({"x": np.arange(4000)})
    wanted = [batch["x"].tolist() for batch in Loader(data, batch_size=4, prefetch=0)]
    loader = Loader(data, batch_size=4, prefetch=prefetch)
    batches, found = iter(loader), []

    def pull() -> None:
        for batch in batches:
            found.append((batch.info.position, batch["x"].tolist()))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=pull) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(found) == [(4 * step, rows) for step, rows in enumerate(wanted)]
    assert loader.state_dict()["position"] == 4000


def test_two_iterations_at_once_do_not_disturb_each_other() -> None:
    loader = _loader([8] * 20)
    older, newer = iter(loader), iter(loader)
    wanted = streams.take(_loader([8] * 20))
    for step in range(5):
        assert streams.same([streams.kept(next(older))], [wanted[step]])
    assert streams.same([streams.kept(next(newer))], [wanted[0]])
    assert loader.state_dict()["position"] == 2
    assert streams.same([streams.kept(next(older))], [wanted[5]])
    assert loader.state_dict()["position"] == 12


def test_a_look_at_a_batch_inside_a_loop_changes_nothing_for_the_loop() -> None:
    loader = _loader([8] * 40)
    wanted = streams.take(_loader([8] * 40))
    found = []
    for step, batch in enumerate(loader):
        found.append(streams.kept(batch))
        if step == 3:
            assert streams.same([streams.kept(next(iter(loader)))], wanted[4:5])
        if step == 7:
            break
    assert streams.same(found, wanted[:8])
    assert streams.same(streams.take(loader), wanted[8:])


@functools.cache
def _order_of_ten() -> list[int]:
    """Fifty epochs."""
    stream = Loader(_numbers(10), batch_size=1, epochs=50)
    return [int(batch["x"][0]) for batch in stream]


@examples(60)
@given(
    orders=st.lists(st.integers(-1, 3), max_size=60),
    drop_last=st.booleans(),
    prefetch=st.sampled_from([0, 2]),
)
def test_the_loader_stands_after_the_last_batch_whichever_loop_has_taken_it(
    orders: list[int], drop_last: bool, prefetch: int
) -> None:
    """-1 begins another loop; any other number takes a batch from that one."""
    options: dict[str, Any] = {"drop_last": drop_last, "batch_size": 3, "prefetch": prefetch}
    rows, order = 10, _order_of_ten()
    loader = Loader(_numbers(rows), **options)
    place, loops, places = 0, [], []
    for order_number in orders:
        if order_number < 0:
            loops.append(iter(loader))
            places.append((place, (place // rows + 1) * rows))
        elif order_number < len(loops):
            at, stop = places[order_number]
            batch = next(loops[order_number], None)
            after = _after(at, stop, drop_last)
            if batch is None:
                assert at == stop
                continue
            assert batch["x"].tolist() == order[at : min(at + 3, stop)]
            place = after
            places[order_number] = (after, stop)
        assert loader.state_dict()["position"] == place


def _numbers(count: int) -> headrace.Dataset:
    return headrace.from_arrays({"x": np.arange(count)})


def _after(at: int, stop: int, drop_last: bool) -> int:
    """The place after the batch of three rows that begins there: the end, if too few rows for another are left."""
    left = stop - at - 3
    return stop if left < (3 if drop_last else 1) else at + 3


def test_after_the_last_batch_of_an_epoch_the_loader_is_in_the_next() -> None:
    loader = Loader(headrace.from_arrays({"x": np.arange(25)}), batch_size=10)
    batches = iter(loader)
    next(batches)
    assert loader.epoch == 0
    next(batches)
    resumed = Loader(headrace.from_arrays({"x": np.arange(25)}), batch_size=10)
    resumed.load_state_dict(loader.state_dict())
    assert loader.epoch == resumed.epoch == 1
    taken = [sum(1 for _ in resumed) for _ in range(resumed.epoch, 3)]
    assert taken == [2, 2]
    assert resumed.epoch == 3
