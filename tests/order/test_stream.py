"""A training run as a function of the position: every source, every epoch, every row once."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.mixture import Stages
from headrace.order.shuffle import Shuffle, ShuffleKind
from headrace.order.stream import Places, RowStream
from headrace.rows import kernel
from tests.properties import examples

SHUFFLES = st.one_of(
    st.sampled_from([Shuffle(kind=ShuffleKind.GLOBAL), Shuffle(kind=ShuffleKind.NONE)]),
    st.builds(Shuffle, kind=st.just(ShuffleKind.BLOCK), block=st.integers(1, 9), window=st.integers(1, 4)),
    st.builds(Shuffle, kind=st.just(ShuffleKind.UNITS), lanes=st.integers(1, 5)),
)
SEEDS = st.integers(0, 2**64 - 1)
MIXTURES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4)


def stream_of(sources: list[tuple[int, int]], shuffle: Shuffle, seed: int) -> RowStream:
    rows, weights = zip(*sources, strict=True)
    units = tuple(units_of(each) for each in rows)
    return RowStream(rows=rows, units=units, stages=Stages.of(weights), shuffle=shuffle, seed=seed)


def units_of(rows: int) -> NDArray[np.int64] | None:
    """Units of three rows; every fourth source has none."""
    return None if rows % 4 == 0 else np.diff([*range(0, rows, 3), rows])


def listed(places: Places) -> list[tuple[int, int, int]]:
    return list(zip(places.source.tolist(), places.epoch.tolist(), places.row.tolist(), strict=True))


def rows_by_epoch(places: Places) -> dict[tuple[int, int], list[int]]:
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for source, epoch, row in listed(places):
        rows[source, epoch].append(row)
    return rows


@examples(60)
@given(MIXTURES, SHUFFLES, SEEDS, st.integers(1, 400))
def test_every_epoch_of_every_source_is_all_of_its_rows_once(
    sources: list[tuple[int, int]], shuffle: Shuffle, seed: int, length: int
) -> None:
    rows = rows_by_epoch(stream_of(sources, shuffle, seed).at(np.arange(length)))
    for (source, epoch), found in rows.items():
        size = sources[source][0]
        if (source, epoch + 1) in rows:
            assert sorted(found) == list(range(size))
        else:
            assert len(set(found)) == len(found)
            assert set(found) <= set(range(size))
        assert epoch == 0 or (source, epoch - 1) in rows
        if shuffle.kind is ShuffleKind.NONE:
            assert found == list(range(len(found)))


@examples(40)
@given(MIXTURES, SHUFFLES, SEEDS, st.lists(st.integers(0, 3000), max_size=12), st.integers(0, 2**40))
def test_positions_in_any_order_are_the_positions_one_by_one(
    sources: list[tuple[int, int]], shuffle: Shuffle, seed: int, asked: list[int], start: int
) -> None:
    stream = stream_of(sources, shuffle, seed)
    positions = np.array(asked, dtype=np.int64) + start
    together = stream.at(positions)
    alone = [listed(stream.at([position]))[0] for position in positions.tolist()]
    assert listed(together) == alone
    keys = stream.remix_keys(together)
    each = [stream.remix_keys(stream.at([position])) for position in positions.tolist()]
    if shuffle.kind is ShuffleKind.NONE:
        assert keys is None
        assert each == [None] * len(asked)
    else:
        assert keys is not None
        assert keys.tolist() == [int(key[0]) for key in each if key is not None]
    samples = stream.sample_keys(together).tolist()
    assert samples == [int(stream.sample_keys(stream.at([position]))[0]) for position in positions.tolist()]


@examples(30)
@given(MIXTURES, SHUFFLES, SEEDS)
def test_a_faster_permutation_gives_the_same_stream(
    sources: list[tuple[int, int]], shuffle: Shuffle, seed: int
) -> None:
    slow = stream_of(sources, shuffle, seed)
    fast = RowStream(
        rows=slow.rows,
        units=slow.units,
        stages=slow.stages,
        shuffle=shuffle,
        seed=seed,
        permute=kernel.permute,
    )
    positions = np.arange(300)
    assert listed(fast.at(positions)) == listed(slow.at(positions))


@examples(40)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any)),
        max_size=4,
    ),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    SEEDS,
)
def test_weights_that_change_lose_and_repeat_no_row(
    changes: list[tuple[int, list[int]]], rows: tuple[int, int], seed: int
) -> None:
    stages, position = Stages.of([1, 1]), 0
    for step, weights in changes:
        position += step
        stages = stages.then(position, weights)
    stream = RowStream(rows=rows, stages=stages, shuffle=Shuffle(), seed=seed)
    found = rows_by_epoch(stream.at(np.arange(position + 100)))
    for (source, epoch), held in found.items():
        if (source, epoch + 1) in found:
            assert sorted(held) == list(range(rows[source]))
        assert len(set(held)) == len(held)


@pytest.mark.parametrize("kind", [ShuffleKind.GLOBAL, ShuffleKind.BLOCK, ShuffleKind.UNITS])
def test_epochs_sources_and_seeds_have_orders_of_their_own(kind: ShuffleKind) -> None:
    shuffle = Shuffle(kind=kind, block=4, window=3)
    orders = set()
    for seed in (0, 1, 2**64 - 1):
        stream = stream_of([(50, 1), (50, 1)], shuffle, seed)
        found = rows_by_epoch(stream.at(np.arange(400)))
        assert len(found) == 8
        orders |= {tuple(order) for order in found.values()}
    assert len(orders) == 3 * 8


def test_keys_are_shared_by_an_epoch_and_by_nothing_else() -> None:
    stream = stream_of([(7, 1), (7, 1)], Shuffle(), 5)
    places = stream.at(np.arange(140))
    keys = stream.remix_keys(places)
    assert keys is not None
    of_epoch: dict[tuple[int, int], set[int]] = defaultdict(set)
    for (source, epoch, _), key in zip(listed(places), keys.tolist(), strict=True):
        of_epoch[source, epoch].add(key)
    assert all(len(shared) == 1 for shared in of_epoch.values())
    assert len(set.union(*of_epoch.values())) == len(of_epoch) == 20
    samples = stream.sample_keys(places).tolist()
    assert len(set(samples)) == 140
    assert not set(samples) & set(keys.tolist())


def test_sample_keys_depend_on_seed_source_epoch_and_row_alone() -> None:
    alone = stream_of([(9, 1)], Shuffle(), 3)
    mixed = RowStream(rows=(9, 4), stages=Stages.of([2, 1]), shuffle=Shuffle(kind=ShuffleKind.NONE), seed=3)
    of_row = dict(
        zip(listed(alone.at(np.arange(18))), alone.sample_keys(alone.at(np.arange(18))).tolist(), strict=True)
    )
    places = mixed.at(np.arange(27))
    for place, key in zip(listed(places), mixed.sample_keys(places).tolist(), strict=True):
        if place[0] == 0:
            assert of_row[place] == key


def test_no_positions_are_no_places() -> None:
    stream = stream_of([(5, 1), (6, 2)], Shuffle(), 0)
    places = stream.at(np.empty(0, dtype=np.int64))
    assert listed(places) == []
    assert len(stream.sample_keys(places)) == 0
    keys = stream.remix_keys(places)
    assert keys is not None
    assert len(keys) == 0


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_beyond_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(SettingsError, match=f"seed={seed}"):
        stream_of([(5, 1)], Shuffle(), seed)


def test_a_size_and_a_weight_for_each_source() -> None:
    with pytest.raises(SettingsError, match="2 sources and 1 weights"):
        RowStream(rows=(3, 4), stages=Stages.of([1]), shuffle=Shuffle(), seed=0)


def test_lanes_are_fractions_and_sources_without_units_are_spread_over_all() -> None:
    shuffle = Shuffle(kind="units", lanes=4)
    with_units = RowStream(rows=(24,), units=(np.full(8, 3),), stages=Stages.of([1]), shuffle=shuffle, seed=0)
    lanes = with_units.lanes(np.arange(48))
    assert set(lanes.tolist()) == {0, 2**14, 2**15, 3 * 2**14}
    for epoch in lanes.reshape(2, 24):
        assert np.bincount(epoch // 2**14).tolist() == [6, 6, 6, 6]
    without = RowStream(rows=(24,), stages=Stages.of([1]), shuffle=shuffle, seed=0)
    assert without.lanes([0, 1, 2, 3, 4]).tolist() == [0, 2**14, 2**15, 3 * 2**14, 0]
    assert (with_units.unit_count, without.unit_count) == (8, 1)


def test_units_must_have_the_rows_of_their_source() -> None:
    stages = Stages.of([1, 1])
    with pytest.raises(SettingsError, match="units of source 1 have 9 rows, but it has 10"):
        RowStream(rows=(3, 10), units=(None, np.array([4, 5])), stages=stages, shuffle=Shuffle(), seed=0)
    with pytest.raises(SettingsError, match="units of 1 sources, but there are 2"):
        RowStream(rows=(3, 4), units=(None,), stages=stages, shuffle=Shuffle(), seed=0)


def test_threads_share_the_orders_of_epochs() -> None:
    stream = RowStream(
        rows=(300,), units=(np.full(100, 3),), stages=Stages.of([1]), shuffle=Shuffle(kind="units"), seed=0
    )
    asked = [np.arange(first, first + 50) for first in np.random.default_rng(0).integers(0, 1500, 200)]
    alone = [stream.at(positions).row.tolist() for positions in asked]
    with ThreadPoolExecutor(8) as threads:
        together = [places.row.tolist() for places in threads.map(stream.at, asked)]
    assert together == alone
