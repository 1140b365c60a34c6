"""What a Loader hands out: every row once, the same rows whatever the ranks, batches that stay what they are."""

import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import RebuiltError
from headrace.load.loader import Loader
from headrace.rows import token_batches
from headrace.rows.settings import TOKEN_FIELDS
from headrace.rows.token_rows import PackingReport
from tests.load import streams
from tests.properties import examples
from tests.rows.parts_in_ram import in_parts

LENGTHS = st.lists(st.integers(0, 23), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) >= 9)
SHUFFLES = [
    False,
    "global",
    headrace.Shuffle(kind="block", block=2, window=2),
    headrace.Shuffle(kind="block", block=5, window=1),
]
PACKINGS: list[dict[str, Any]] = [
    {"packing": "best-fit"},
    {"packing": "best-fit", "overlong": "truncate"},
    {"packing": "best-fit", "overlong": "drop"},
    {"packing": "best-fit", "group_shards": 2},
    {"packing": "windows"},
    {"packing": "windows", "align_documents": True},
    {"packing": "pad"},
    {"packing": "pad", "overlong": "truncate"},
    {"packing": "pad", "overlong": "drop"},
]
WORLDS = st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (2, 2), (1, 4), (3, 2), (5, 3), (1, 7)])
"""Batch size and world size."""


def _make(data: Any, **options: Any) -> Callable[[int, int], Loader]:
    return lambda rank, world_size: Loader(
        data, rank=rank, world_size=world_size, **{"batch_size": 1, **options}
    )


def _loader(lengths: list[int], **options: Any) -> Loader:
    return Loader(streams.token_dataset(lengths), **{"batch_size": 2, "seq_len": 8, **options})


@examples(25)
@given(
    LENGTHS,
    st.integers(2, 9),
    st.sampled_from(PACKINGS),
    st.sampled_from(SHUFFLES),
    WORLDS,
    st.booleans(),
    st.integers(1, 3),
)
def test_every_row_comes_once_an_epoch_on_any_number_of_ranks(
    lengths: list[int],
    seq_len: int,
    packing: dict[str, Any],
    shuffle: Any,
    world: tuple[int, int],
    drop_last: bool,
    epochs: int,
) -> None:
    data, _ = in_parts([lengths[first : first + 5] for first in range(0, len(lengths), 5)])
    kept = [n for n in lengths if n <= seq_len] if packing.get("overlong") == "drop" else lengths
    if not any(kept):
        return
    options = {"seq_len": seq_len, "shuffle": shuffle, "epochs": epochs, **packing}
    stream = streams.flat(streams.rows_of_ranks(_make(data, **options), 1))
    loader = Loader(data, batch_size=1, **options)
    each = loader.rows_per_epoch
    assert len(stream) == len(loader) == epochs * each
    wanted = _wanted_tokens(lengths, seq_len, packing)
    for epoch in range(epochs):
        tokens = streams.tokens_of(stream[epoch * each : (epoch + 1) * each])
        report = loader.report()
        assert isinstance(report, PackingReport)
        assert len(tokens) == len(set(tokens)) == report.tokens
        assert set(tokens) == wanted if wanted is not None else set(tokens) <= set(range(sum(lengths) + 1))
    batch_size, world_size = world
    whole = len(stream) // (batch_size * world_size) * batch_size * world_size
    if drop_last and not whole:
        return
    ranks = _make(data, batch_size=batch_size, drop_last=drop_last, **options)
    steps = streams.rows_of_ranks(ranks, world_size)
    assert streams.flat(steps) == (stream[:whole] if drop_last else stream)
    assert len(ranks(world_size - 1, world_size)) == len(steps)
    assert all(len(step) == batch_size * world_size for step in steps[:-1])


def _wanted_tokens(lengths: list[int], seq_len: int, packing: dict[str, Any]) -> set[int] | None:
    """The tokens that an epoch holds; None if that is not simple (aligned windows)."""
    if packing.get("align_documents"):
        return None
    documents = [tokens.tolist() for tokens in streams.documents(lengths)]
    if packing.get("overlong") == "truncate":
        documents = [tokens[:seq_len] for tokens in documents]
    if packing.get("overlong") == "drop":
        documents = [tokens for tokens in documents if len(tokens) <= seq_len]
    return {token for tokens in documents for token in tokens}


@pytest.mark.parametrize("packing", ["best-fit", "windows", "pad"])
def test_the_data_of_a_step_does_not_depend_on_how_many_ranks_share_it(packing: str) -> None:
    data = streams.token_dataset([n % 13 + 1 for n in range(100)])
    options: dict[str, Any] = {"seq_len": 8, "packing": packing, "epochs": 2, "drop_last": False}
    steps = [
        streams.rows_of_ranks(_make(data, batch_size=12 // size, **options), size) for size in (1, 2, 3, 12)
    ]
    assert all(each == steps[0] for each in steps)


def test_a_last_incomplete_batch_is_shared_evenly_and_every_rank_has_all_fields() -> None:
    data = streams.token_dataset([8] * 9)
    for world_size, shares in ((2, [0, 1]), (3, [1, 1, 1]), (4, [0, 0, 0, 1])):
        ranks = [
            streams.take(_make(data, seq_len=8, batch_size=2, drop_last=False)(rank, world_size))
            for rank in range(world_size)
        ]
        assert [len(batches[-1]["tokens"]) for batches in ranks] == shares
        for batches in ranks:
            last = batches[-1]
            assert set(last) == set(TOKEN_FIELDS)
            assert last["tokens"].shape == last["labels"].shape == (len(last["tokens"]), 8)
            assert last["cu_seqlens"].tolist() == list(range(0, 8 * len(last["tokens"]) + 1, 8))


def test_a_rank_without_rows_in_the_last_batch_still_has_the_fields_of_records_and_samples() -> None:
    records = headrace.from_arrays({"x": np.arange(9.0), "words": [np.arange(n) for n in range(9)]})
    for data, wanted in (
        (records, {"x", "words", "words_offsets"}),
        (streams.Numbers(9), {"x", "number", "text"}),
    ):
        loader = Loader(data, batch_size=2, rank=0, world_size=4, drop_last=False)
        last = streams.take(loader)[-1]
        assert set(last) == wanted
        assert len(last["x"]) == 0


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_a_rank_without_rows_in_the_last_batch_does_not_fail_in_a_transform(per: str) -> None:
    for data in (streams.Numbers(9), headrace.from_arrays({"x": np.arange(9.0)})):
        loader = Loader(data, batch_size=2, rank=0, world_size=4, drop_last=False)
        counts = [len(batch["y"]) for batch in loader.map(streams.doubled, per=per)]
        assert counts == [2, 0]


def test_best_fit_composes_documents_anew_each_epoch_and_stored_order_does_not() -> None:
    lengths = [n % 7 + 1 for n in range(200)]
    for shuffle, alike in (("global", False), (False, True)):
        loader = _loader(lengths, shuffle=shuffle, drop_last=False)
        epochs = [{row[0] for row in streams.flat(map(streams.rows_of, loader))} for _ in range(2)]
        assert (epochs[0] == epochs[1]) == alike
        assert sorted(map(len, epochs[0])) == sorted(map(len, epochs[1]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": "windows", "dtype": "int32", "labels": "unshifted"},
        {"cu_seqlens": "row"},
        {"cu_seqlens": "row", "max_documents": 9},
        {"max_documents": 40, "rank": 1, "world_size": 2, "drop_last": False},
    ],
)
def test_prefetch_and_threads_do_not_change_the_batches(options: dict[str, Any]) -> None:
    lengths = [n % 11 + 1 for n in range(300)]
    wanted = streams.take(_loader(lengths, prefetch=0, workers=1, epochs=2, batch_size=3, **options))
    for prefetch, workers in ((None, 2), (1, 1), (1, 3), (2, 2), (16, 1), (16, 3)):
        loader = _loader(lengths, prefetch=prefetch, workers=workers, epochs=2, batch_size=3, **options)
        assert streams.same(streams.take(loader), wanted), (prefetch, workers)


@pytest.mark.parametrize("prefetch", [0, 1, 4, 16])
def test_batches_that_are_kept_stay_what_they_are(prefetch: int) -> None:
    lengths = [n % 11 + 1 for n in range(400)]
    wanted = streams.take(_loader(lengths, prefetch=0))
    assert streams.same([dict(batch) for batch in _loader(lengths, prefetch=prefetch)], wanted)
    rows = [batch.tokens[0, 1:5] for batch in _loader(lengths, prefetch=prefetch)]
    for row, batch in zip(rows, wanted, strict=True):
        np.testing.assert_array_equal(row, batch["tokens"][0, 1:5])
    records = headrace.from_arrays({"x": np.arange(100)})
    held = list(Loader(records, batch_size=2, shuffle=False, prefetch=prefetch))
    assert [batch.x.tolist() for batch in held] == [[n, n + 1] for n in range(0, 100, 2)]


@pytest.mark.parametrize(("prefetch", "more_bytes"), [(0, 20_000), (4, 200_000)])
def test_a_loop_that_lets_go_of_its_batches_uses_the_same_memory_again(
    prefetch: int, more_bytes: int
) -> None:
    loader = _loader([64] * 400, seq_len=64, batch_size=4, prefetch=prefetch, workers=2, epochs=None)
    batches = iter(loader)
    addresses = {next(batches).tokens.ctypes.data for _ in range(300)}
    assert len(addresses) <= 2 * (prefetch + 2) + 2
    tracemalloc.start()
    try:
        # Plans of a few thousand rows are kept: go on until there are as many as there will be.
        for _ in range(1000):
            next(batches)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(1000):
            next(batches)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Threads may find all buffers in use for the first time only now, and make one more.
    assert after - before < more_bytes, "memory grows with the batches"
    assert peak - before < 2_000_000, "much is allocated on the way"


@pytest.fixture
def restless_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that take turns every few instructions, and plans of few rows: races that are rare become common."""
    before = sys.getswitchinterval()
    monkeypatch.setattr(token_batches, "_ROWS_PLANNED_AT_ONCE", 64)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("turns", [3, pytest.param(60, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("restless_threads")
def test_threads_never_share_memory_or_read_what_is_not_there_yet(turns: int, tmp_path: Path) -> None:
    path = streams.write_tokens(tmp_path / "data", [n % 13 + 1 for n in range(200)])
    numbers = headrace.from_arrays({"x": np.arange(2000)})
    for turn in range(turns):
        packing = ("best-fit", "windows", "pad")[turn % 3]
        options: dict[str, Any] = {
            "packing": packing,
            "batch_size": turn % 4 + 1,
            "seed": turn,
            "epochs": 2,
            "seq_len": 8,
        }
        wanted = streams.take(Loader(path, prefetch=0, **options))
        found = [dict(batch) for batch in Loader(path, prefetch=turn % 7 + 1, workers=4, **options)]
        assert streams.same(found, wanted)
        at = 0
        for batch in Loader(numbers, batch_size=4, shuffle=False, workers=4, prefetch=16, epochs=2):
            assert batch.x.tolist() == [(at + row) % 2000 for row in range(4)]
            at += 4


@examples(15)
@given(st.sets(st.sampled_from(TOKEN_FIELDS), min_size=1), st.sampled_from(["best-fit", "windows", "pad"]))
def test_a_batch_holds_the_fields_that_were_asked_for_and_no_others(asked: set[str], packing: str) -> None:
    lengths = [n % 11 + 1 for n in range(60)]
    whole = streams.take(_loader(lengths, packing=packing))
    some = streams.take(_loader(lengths, packing=packing, fields=asked))
    assert all(set(batch) == asked for batch in some)
    for batch, every in zip(some, whole, strict=True):
        assert streams.same([batch], [{name: every[name] for name in batch}])


def test_a_batch_says_where_in_the_stream_it_stands() -> None:
    loaders = [_loader([8] * 22, rank=rank, world_size=2, drop_last=False, batch_size=4) for rank in (0, 1)]
    infos = [[(b.info.step, b.info.position, b.info.rows) for b in loader] for loader in loaders]
    assert infos[0] == [(0, 0, 4), (1, 8, 4), (2, 16, 3)]
    assert infos[1] == [(0, 4, 4), (1, 12, 4), (2, 19, 3)]


def test_the_seed_decides_the_order() -> None:
    first, again, other = (streams.take(_loader([8] * 40, seed=seed)) for seed in (1, 1, 2))
    assert streams.same(first, again)
    assert not streams.same(first, other)


def test_data_can_be_a_path_or_an_open_dataset(tmp_path: Path) -> None:
    lengths = [n % 11 + 1 for n in range(60)]
    path = streams.write_tokens(tmp_path / "data", lengths)
    wanted = streams.take(_loader(lengths))
    for data in (path, str(path), headrace.open(path), headrace.open(path, in_memory=True)):
        assert streams.same(streams.take(Loader(data, seq_len=8, batch_size=2)), wanted)


def test_rows_longer_than_any_document_hold_several() -> None:
    loader = _loader([3, 4, 5] * 10, seq_len=100, batch_size=1, drop_last=False)
    rows = streams.flat(map(streams.rows_of, loader))
    assert len(rows) == 2
    assert sorted(streams.tokens_of(rows)) == list(range(1, 121))


@pytest.mark.parametrize("rebuilds", [1, 2])
@pytest.mark.parametrize(
    ("packing", "workers"), [("best-fit", 0), ("windows", 0), ("pad", 0), ("best-fit", 1), ("windows", 2)]
)
def test_a_dataset_rebuilt_under_a_running_loader_is_never_mixed_with_the_old_one(
    packing: str, workers: int, rebuilds: int, tmp_path: Path
) -> None:
    """The files of the version before are kept, so that the Loader can finish; a second rebuild deletes them."""
    lengths, shuffle = [8] * 100, headrace.Shuffle(kind="block", block=4, window=1)
    path = streams.write_tokens(tmp_path / "data", lengths)
    options: dict[str, Any] = {"seq_len": 8, "batch_size": 2, "packing": packing, "shuffle": shuffle}
    wanted = streams.take(Loader(path, **options))
    ahead = {"workers": workers, "prefetch": 2} if workers else {"prefetch": 0}
    loader = Loader(path, **ahead, **options)
    batches = iter(loader)
    found = [streams.kept(next(batches)) for _ in range(2)]
    for rebuild in range(rebuilds):
        streams.write_tokens(path, lengths, first=5000 + rebuild, overwrite=True)
    try:
        for batch in batches:
            found.append(streams.kept(batch))
    except RebuiltError:
        assert rebuilds == 2
        assert loader.state_dict()["position"] == 2 * len(found)
    else:
        # Threads that plan ahead may have mapped every shard by then; without them that cannot be.
        assert workers or rebuilds == 1, "shards that were not mapped are gone"
        assert len(found) == len(wanted)
    assert streams.same(found, wanted[: len(found)])
    with pytest.raises(headrace.HeadraceError, match="it was rebuilt, or it is other data"):
        Loader(path, **options).load_state_dict(loader.state_dict())


def test_a_loader_that_has_mapped_everything_goes_on_with_the_old_data(tmp_path: Path) -> None:
    lengths = [8] * 40
    path = streams.write_tokens(tmp_path / "data", lengths)
    loader = Loader(path, seq_len=8, batch_size=2)
    wanted = [streams.take(loader) for _ in range(2)][1]
    again = Loader(path, seq_len=8, batch_size=2)
    streams.take(again)
    streams.write_tokens(path, lengths, first=5000, overwrite=True)
    assert streams.same(streams.take(again), wanted)


def test_an_interrupt_between_two_batches_ends_the_iteration_and_its_state_stays_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = Loader(headrace.from_arrays({"x": np.arange(40)}), batch_size=4, shuffle=False)
    batches = iter(loader)
    next(batches)
    inner = batches._batches  # type: ignore[attr-defined]
    take = inner._shared.take

    def interrupted(timeout_seconds: float) -> Any:
        take(timeout_seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(inner._shared, "take", interrupted)
    handed = 1

    def count() -> None:
        nonlocal handed
        for _ in batches:
            handed += 1

    with pytest.raises(KeyboardInterrupt):
        count()
    assert list(batches) == []
    assert loader.state_dict()["position"] == 4 * handed
    loader.load_state_dict(loader.state_dict())
    assert next(iter(loader)).x.tolist() == [4 * handed + row for row in range(4)]


def test_large_records_are_prefetched_less_than_small_ones() -> None:
    large = headrace.from_arrays({"x": np.zeros((64, 2**20), dtype=np.float32)})
    small = headrace.from_arrays({"x": np.zeros((64, 2), dtype=np.float32)})
    assert Loader(large, batch_size=8)._recipe.row_bytes == 2**22
    assert Loader(small, batch_size=8)._recipe.row_bytes == 8


def test_a_loader_can_be_pickled_while_it_is_used() -> None:
    loader = Loader(headrace.from_arrays({"x": np.arange(20)}), batch_size=5, shuffle=False)
    batches = iter(loader)
    next(batches)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.state_dict() == loader.state_dict()
