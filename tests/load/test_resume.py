"""Every kind of stream resumes at every step, also on other ranks, batch sizes and numbers of workers."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.load.loader import Loader
from headrace.rows import recipe as recipe_module
from headrace.rows import token_batches
from tests.load import streams
from tests.properties import examples

LENGTHS = [n % 13 + 1 for n in range(60)]
BLOCKS = headrace.Shuffle(kind="block", block=3, window=2)


def _tokens(**options: Any) -> Loader:
    return Loader(streams.token_dataset(LENGTHS), **{"batch_size": 4, "seq_len": 10, **options})


def _records(**options: Any) -> Loader:
    columns = {
        "x": np.arange(60.0).reshape(30, 2),
        "words": [np.arange(n, 2 * n, dtype=np.uint16) for n in range(30)],
        "name": [b"n" * (n % 5) for n in range(30)],
    }
    return Loader(headrace.from_arrays(columns), **{"batch_size": 4, **options})


def _mixture(**options: Any) -> Loader:
    small, large = streams.token_dataset(LENGTHS[:20]), streams.token_dataset(LENGTHS, first=10_000)
    mixture = headrace.mix(
        {"small": (small, 0.4), "large": (large, 0.6)}, stages={17: {"small": 1, "large": 9}}
    )
    return Loader(mixture, **{"batch_size": 3, "seq_len": 10, **options})


STREAMS: dict[str, Callable[[], Loader]] = {
    "best fit": _tokens,
    "best fit, stored order": lambda: _tokens(shuffle=False),
    "best fit, blocks": lambda: _tokens(shuffle=BLOCKS),
    "best fit, truncated": lambda: _tokens(overlong="truncate"),
    "windows": lambda: _tokens(packing="windows"),
    "windows, aligned": lambda: _tokens(packing="windows", align_documents=True),
    "windows, no boundaries": lambda: _tokens(packing="windows", boundaries=False),
    "pad": lambda: _tokens(packing="pad"),
    "several epochs": lambda: _tokens(epochs=3, batch_size=7),
    "the last batch kept": lambda: _tokens(drop_last=False, batch_size=7),
    "at once": lambda: _tokens(prefetch=0),
    "far ahead": lambda: _tokens(prefetch=64, workers=3, batch_size=1),
    "one of three ranks": lambda: _tokens(rank=1, world_size=3, batch_size=2, drop_last=False, epochs=2),
    "records": lambda: _records(epochs=2),
    "records, the last batch kept": lambda: _records(drop_last=False),
    "own samples": lambda: Loader(streams.Numbers(23), batch_size=3, epochs=2),
    "mixture": _mixture,
    "mixture, all of it": lambda: Loader(
        headrace.mix({"a": (streams.Numbers(20), 1), "b": (streams.Numbers(5), 3)}, stop="all"), batch_size=4
    ),
    "transform": lambda: Loader(streams.Numbers(23), batch_size=3, epochs=2).map(streams.noisy),
    "transform of batches": lambda: _records(fields=["x"]).map(streams.noisy, per="batch"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_it_resumes_at_every_step(name: str) -> None:
    streams.resumes_at_every_step(STREAMS[name])


def test_many_shards_resume_at_every_step(tmp_path: Path) -> None:
    path = streams.write_tokens(tmp_path / "data", LENGTHS)
    for options in ({}, {"group_shards": 2}, {"packing": "windows"}):
        streams.resumes_at_every_step(
            lambda options=options: Loader(path, batch_size=5, seq_len=10, **options)
        )


def test_an_endless_stream_resumes_at_every_step() -> None:
    # More than two epochs of the one, and of the other some steps after its weights have changed.
    streams.resumes_at_every_step(lambda: _tokens(epochs=None, batch_size=9), steps=12)
    streams.resumes_at_every_step(lambda: _mixture(epochs=None, batch_size=9), steps=12)


def test_worker_processes_resume() -> None:
    loader = Loader(streams.Numbers(10), batch_size=4, drop_last=False)
    wanted = streams.take(loader.map(streams.noisy))
    stopped, resumed = (loader.map(streams.noisy, processes=1) for _ in range(2))
    assert streams.same(streams.take(stopped, 1), wanted[:1])
    resumed.load_state_dict(streams.through_json(stopped.state_dict()))
    assert streams.same(streams.take(resumed), wanted[1:])


@pytest.mark.soak
def test_worker_processes_resume_at_every_step() -> None:
    loader = Loader(streams.Numbers(40), batch_size=4, drop_last=False)
    streams.resumes_at_every_step(lambda: loader.map(streams.noisy, processes=1))


LEGS = st.tuples(
    st.sampled_from([(1, 1), (1, 5), (2, 2), (3, 4), (4, 1), (5, 3)]),
    st.sampled_from([0, 1, 5]),
    st.integers(1, 3),
    st.integers(0, 12),
)
"""A leg of a run: world size and batch size, prefetch, threads, and how many steps."""


@examples(20)
@given(
    st.sampled_from([_tokens, _mixture]),
    st.sampled_from(["best-fit", "windows", "pad"]),
    st.integers(1, 3),
    st.lists(LEGS, max_size=6),
)
def test_it_resumes_on_another_world_any_number_of_times(
    make: Callable[..., Loader], packing: str, epochs: int, legs: list[Any]
) -> None:
    options: dict[str, Any] = {"packing": packing, "epochs": epochs, "drop_last": False}
    stream = streams.flat(map(streams.rows_of, make(batch_size=1, **options)))
    found: list[streams.Row] = []
    state: dict[str, Any] = make(**options).state_dict()
    for (size, batch_size), prefetch, workers, steps in (*legs, ((2, 4), 2, 2, None)):
        ranks, states = [], []
        for rank in range(size):
            other = {"batch_size": batch_size, "prefetch": prefetch, "workers": workers}
            loader = make(rank=rank, world_size=size, **options, **other)
            loader.load_state_dict(state)
            left = -(-(len(stream) - len(found)) // (size * batch_size))
            assert not left or len(loader) == left
            count = left if steps is None else min(left, steps)
            ranks.append([streams.rows_of(batch) for batch in streams.take(loader, count)])
            if steps is not None:
                states.append(streams.through_json(loader.state_dict()))
        assert all(each == states[0] for each in states), "ranks save different states"
        state = states[0] if states else state
        found += [row for step in zip(*ranks, strict=True) for rows in step for row in rows]
    assert found == stream


@functools.cache
def _twelve_epochs() -> list[streams.Row]:
    return streams.flat(map(streams.rows_of, _tokens(batch_size=1, epochs=12)))


@examples(20)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 30))
def test_the_number_of_epochs_may_change_on_the_way(before: int, after: int, steps: int) -> None:
    """The rest of the pass that is under way, in passes of the new length."""
    rows = _tokens().rows_per_epoch
    stream = _twelve_epochs()
    loader = _tokens(epochs=before, drop_last=False)
    streams.take(loader, steps)
    position = min(4 * steps, before * rows)
    assert loader.state_dict()["position"] == position
    resumed = _tokens(epochs=after, drop_last=False)
    resumed.load_state_dict(loader.state_dict())
    found = streams.flat(map(streams.rows_of, resumed))
    assert found == stream[position : position + len(found)]
    assert (position + len(found)) % (after * rows) == 0


def test_a_pass_that_was_resumed_is_followed_by_the_next_one() -> None:
    passes = _tokens()
    wanted = [streams.take(passes) for _ in range(3)]
    loader = _tokens()
    streams.take(loader)
    streams.take(loader, 3)
    resumed = _tokens()
    resumed.load_state_dict(loader.state_dict())
    assert streams.same(streams.take(resumed), wanted[1][3:])
    assert len(resumed) == len(wanted[2])
    assert streams.same(streams.take(resumed), wanted[2])


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("sees_the_end", [True, False])
def test_after_the_last_batch_of_a_pass_comes_the_next_pass(drop_last: bool, sees_the_end: bool) -> None:
    """Whether or not the loop has asked for one batch more, in the same process and from a state."""
    options: dict[str, Any] = {"batch_size": 7, "drop_last": drop_last}
    loader = _tokens(**options)
    wanted = [streams.take(loader) for _ in range(2)]
    ended = _tokens(**options)
    batches = iter(ended)
    for _ in wanted[0]:
        next(batches)
    if sees_the_end:
        assert next(batches, None) is None
    resumed = _tokens(**options)
    resumed.load_state_dict(ended.state_dict())
    assert len(resumed) == len(wanted[1])
    for goes_on in (resumed, ended):
        assert goes_on.epoch == 1
        assert streams.same(streams.take(goes_on), wanted[1])


def test_rows_too_few_for_a_batch_come_if_a_smaller_one_is_chosen_before_the_last_batch() -> None:
    stream = streams.flat(map(streams.rows_of, _tokens(batch_size=1, epochs=2)))
    rows = _tokens().rows_per_epoch
    loader = _tokens(batch_size=(rows - 1) // 2)
    batches = iter(loader)
    next(batches)
    smaller = _tokens(batch_size=1)
    smaller.load_state_dict(loader.state_dict())
    assert streams.flat(map(streams.rows_of, smaller)) == stream[(rows - 1) // 2 : rows]
    # After the last batch the pass is over, and its last row is dropped with it.
    next(batches)
    smaller.load_state_dict(loader.state_dict())
    assert streams.flat(map(streams.rows_of, smaller)) == stream[rows:]


def test_a_rest_that_is_too_small_for_a_batch_is_not_an_empty_loop() -> None:
    rows = _tokens().rows_per_epoch
    stream = streams.flat(map(streams.rows_of, _tokens(batch_size=1, epochs=2)))
    loader = _tokens(batch_size=1)
    streams.take(loader, rows - 2)
    larger = _tokens(batch_size=3)
    larger.load_state_dict(loader.state_dict())
    assert len(larger) == rows // 3
    assert streams.flat(map(streams.rows_of, larger)) == stream[rows : rows + rows // 3 * 3]


def test_the_state_is_that_of_the_batch_handed_out_last_however_much_was_made_ahead() -> None:
    for prefetch in (0, 1, 16):
        loader = _tokens(prefetch=prefetch, batch_size=2, rank=1, world_size=2)
        for step, _ in enumerate(loader, 1):
            assert loader.state_dict()["position"] == 4 * step


def test_saving_and_resuming_cost_as_much_late_in_the_stream_as_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in rows that are planned or looked up, not in time."""
    looked_up = 0
    real = token_batches.stretches_at

    def counted(stream: Any, sources: Any, positions: Any) -> Any:
        nonlocal looked_up
        looked_up += len(positions)
        return real(stream, sources, positions)

    monkeypatch.setattr(token_batches, "stretches_at", counted)
    data, costs = streams.token_dataset([10] * 5000), []
    for position in (0, 100, 4900, 5_000_000, 10**12):
        loader = Loader(data, batch_size=4, seq_len=10, epochs=None, prefetch=0)
        loader.load_state_dict({**loader.state_dict(), "position": position})
        looked_up = 0
        batch = next(iter(loader))
        assert batch.info.position == position
        costs.append(looked_up)
    assert costs == [4] * 5


def test_resuming_asks_a_users_data_for_the_samples_that_come_and_no_others() -> None:
    class Counted(streams.Numbers):
        asked = 0

        def __getitem__(self, index: int) -> dict[str, Any]:
            Counted.asked += 1
            return super().__getitem__(index)

    loader = Loader(Counted(1000), batch_size=4, prefetch=0)
    loader.load_state_dict({**loader.state_dict(), "position": 900})
    next(iter(loader))
    assert Counted.asked == 4


def test_saving_a_state_does_not_read_the_data_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = recipe_module.object_fingerprint

    def counted(data: Any) -> str:
        nonlocal calls
        calls += 1
        return real(data)

    monkeypatch.setattr(recipe_module, "object_fingerprint", counted)
    loader = Loader(streams.Numbers(100), batch_size=1)
    for _ in loader:
        loader.state_dict()
    assert calls == 1


def test_a_dataset_rebuilt_between_saving_and_resuming_is_refused() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = streams.write_tokens(Path(directory) / "data", LENGTHS)
        loader = Loader(path, batch_size=4, seq_len=10)
        streams.take(loader, 2)
        state = streams.through_json(loader.state_dict())
        streams.write_tokens(path, LENGTHS, first=7, overwrite=True)
        with pytest.raises(headrace.HeadraceError, match="it was rebuilt, or it is other data"):
            Loader(path, batch_size=4, seq_len=10).load_state_dict(state)
        # The same content again, wherever it lies, is the same data.
        moved = streams.write_tokens(Path(directory) / "moved", LENGTHS)
        resumed = Loader(moved, batch_size=4, seq_len=10)
        resumed.load_state_dict(state)
        assert streams.same(streams.take(resumed), streams.take(Loader(moved, batch_size=4, seq_len=10))[2:])
