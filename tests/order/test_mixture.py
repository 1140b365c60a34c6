"""Mixtures in closed form against lists that are really counted."""

import json
import logging
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.order.mixture import Stages
from headrace.order.schedule import PRECISION, Schedule
from tests.properties import examples

QUOTAS = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any)
CHANGES = st.lists(
    st.tuples(st.integers(0, 50), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any))
)


def stages_of(changes: list[tuple[int, list[int]]], weights: list[int]) -> Stages:
    """Stages of three sources; each change is (rows after the change before it, weights)."""
    stages, position = Stages.of(weights), 0
    for rows, changed in changes:
        position += rows
        stages = stages.then(position, changed)
    return stages


STAGES = st.builds(stages_of, CHANGES, st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any))
SIZES = st.lists(st.integers(1, 60), min_size=3, max_size=3)


@examples(50)
@given(QUOTAS)
def test_every_prefix_has_its_share_of_each_source_to_less_than_one_row(weights: list[int]) -> None:
    schedule = Schedule.from_weights(weights)
    divisor = math.gcd(*weights)
    assert schedule.quotas == tuple(weight // divisor for weight in weights)
    cycle = schedule.cycle
    given_rows = [0] * len(weights)
    for position, source in enumerate(schedule.source.tolist(), start=1):
        given_rows[source] += 1
        for count, quota in zip(given_rows, schedule.quotas, strict=True):
            assert abs(count * cycle - position * quota) < cycle
    assert tuple(given_rows) == schedule.quotas


@examples(40)
@given(QUOTAS, st.integers(0, 3))
def test_each_position_has_a_source_and_the_number_of_its_rows_before(weights: list[int], more: int) -> None:
    schedule = Schedule.from_weights(weights)
    stop = schedule.cycle * 2 + more
    listed = (schedule.source.tolist() * 5)[:stop]
    sources, indices = schedule.at(np.arange(stop))
    assert sources.tolist() == listed
    assert indices.tolist() == [listed[:position].count(source) for position, source in enumerate(listed)]
    counts = schedule.counts(np.arange(stop + 1))
    assert counts.shape == (stop + 1, len(weights))
    for position in range(stop + 1):
        assert counts[position].tolist() == [listed[:position].count(s) for s in range(len(weights))]


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ([0.7, 0.3], (7, 3)),
        ([0.5, 0.3, 0.2], (5, 3, 2)),
        ([1 / 3, 1 / 3, 1 / 3], (1, 1, 1)),
        ([0.333, 0.667], (333, 667)),
        ([1 / 7, 6 / 7], (1, 6)),
        ([20, 0, 60], (1, 0, 3)),
        ([0.1] * 10, (1,) * 10),
        ([np.float32(0.7), np.float32(0.3)], (7, 3)),
        ([5e-324, 5e-324], (1, 1)),
        ([1.7e308, 1.7e308], (1, 1)),
        ([3.5], (1,)),
        ([0.0, 2.0], (0, 1)),
    ],
)
def test_weights_that_are_small_fractions_are_met_exactly(
    weights: list[float], quotas: tuple[int, ...]
) -> None:
    assert Schedule.from_weights(weights).quotas == quotas
    assert Schedule.from_weights(np.array(weights)).quotas == quotas  # type: ignore[arg-type]


@examples(10)  # a cycle of 65,536 slots is most of 0.1 s
@given(st.lists(st.floats(1, 1000), min_size=1, max_size=12))
def test_other_weights_are_met_to_the_precision(weights: list[float]) -> None:
    schedule = Schedule.from_weights(weights)
    assert schedule.cycle <= PRECISION
    assert math.gcd(*schedule.quotas) == 1
    for weight, quota in zip(weights, schedule.quotas, strict=True):
        assert abs(quota / schedule.cycle - weight / sum(weights)) <= 1.01 / PRECISION


def test_the_example_in_the_module() -> None:
    schedule = Schedule.from_weights([0.5, 0.3, 0.2])
    assert schedule.source.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    assert schedule.turn.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 1]


def test_a_small_weight_still_comes_once_a_cycle_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        schedule = Schedule.from_weights([1e-9, 1.0, 0.0, 1e-300])
    assert schedule.quotas == (1, PRECISION - 2, 0, 1)
    assert "weights of sources 0, 3 are too small" in caplog.text
    assert "source 0 asks for 1e-09 of the rows and gets 1.53e-05" in caplog.text


def test_many_small_weights_make_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        schedule = Schedule.from_weights([1e-9] * 1000 + [1.0, 1.0])
    assert schedule.quotas == (1,) * 1000 + ((PRECISION - 1000) // 2,) * 2
    assert len(caplog.records) == 1
    assert "0, 1, 2, 3, 4 and 995 more" in caplog.text


def test_weights_that_are_met_make_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    Schedule.from_weights([0.7, 0.3, 0.0])
    Schedule.from_weights([math.pi, math.e, math.sqrt(2)])
    assert not caplog.records


@pytest.mark.parametrize("sources", [10, 1000])
def test_the_longest_cycle_keeps_the_shares_too(sources: int) -> None:
    weights = np.random.default_rng(0).uniform(0.5, 1.5, sources).tolist()
    schedule = Schedule.from_weights(weights)
    assert schedule.cycle == PRECISION
    positions = np.arange(PRECISION + 1)
    for source in range(0, sources, max(1, sources // 10)):
        given_rows = np.concatenate([[0], np.cumsum(schedule.source == source)])
        assert (np.abs(given_rows * PRECISION - positions * schedule.quotas[source]) < PRECISION).all()
    assert schedule.counts(3 * PRECISION + 7).sum() == 3 * PRECISION + 7


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ([], "at least one"),
        (None, "weights=None"),
        ("12", "weights='12'"),
        (3, "weights=3"),
        ([0.0, 0], "above 0"),
        ([1, math.nan], r"weights\[1\]=nan"),
        ([1, 1, math.inf], r"weights\[2\]=inf"),
        ([-0.5, 1], r"weights\[0\]=-0.5"),
        ([1, 10**400], r"weights\[1\]=10"),
        ([1, "1"], r"weights\[1\]=1:"),
        ([1, True], r"weights\[1\]=True"),
        ([[1, 2]], r"weights\[0\]=\[1, 2\]"),
        ([1] * (PRECISION + 1), "at most 65,536"),
    ],
)
def test_weights_that_cannot_work_are_refused(weights: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Schedule.from_weights(weights)
    with pytest.raises(SettingsError, match=named):
        Stages.of(weights)


@examples(30)
@given(STAGES)
def test_each_source_goes_on_where_it_was_through_all_stages(stages: Stages) -> None:
    stop = stages.starts[-1] + 100
    sources, indices = stages.at(np.arange(stop))
    given_rows = [0] * stages.sources
    for position in range(stop):
        assert stages.counts(position).tolist() == given_rows
        assert indices[position] == given_rows[sources[position]]
        given_rows[sources[position]] += 1


@examples(40)
@given(STAGES, st.data())
def test_positions_can_be_asked_for_in_any_order(stages: Stages, data: st.DataObject) -> None:
    sources, indices = stages.at(np.arange(500))
    asked = np.array(data.draw(st.lists(st.integers(0, 499), max_size=20)), np.int64)
    some = stages.at(asked)
    assert [part.dtype.name for part in some] == ["int64", "int64"]
    assert some[0].tolist() == sources[asked].tolist()
    assert some[1].tolist() == indices[asked].tolist()


@examples(40)
@given(STAGES)
def test_shares_add_up_over_the_stages_and_nothing_that_is_owed_is_forgotten(stages: Stages) -> None:
    sources = stages.at(np.arange(stages.starts[-1] + 60))[0].tolist()
    share, given_rows = [Fraction(0)] * stages.sources, [0] * stages.sources
    for position, source in enumerate(sources):
        stage = sum(start <= position for start in stages.starts) - 1
        schedule = stages.schedules[stage]
        share = [
            each + Fraction(quota, schedule.cycle) for each, quota in zip(share, schedule.quotas, strict=True)
        ]
        given_rows[source] += 1
        # Less than one within a stage. Where weights jump, several sources may be due at once.
        assert all(abs(a - b) < 2 for a, b in zip(share, given_rows, strict=True))


@pytest.mark.parametrize(("weights", "rows"), [([999, 1], 500), ([9, 1], 8), ([1, 1, 1], 1), ([97, 2, 1], 7)])
def test_a_small_source_gets_its_share_however_often_stages_follow_each_other(
    weights: list[int], rows: int
) -> None:
    stages = Stages.of(weights)
    for number in range(1, 300):
        stages = stages.then(number * rows, weights)
    total = 300 * rows
    for weight, count in zip(weights, stages.counts(total).tolist(), strict=True):
        assert abs(count - total * weight / sum(weights)) < 2


@examples(50)
@given(STAGES, SIZES)
def test_no_row_comes_twice_before_the_first_repeat(stages: Stages, sizes: list[int]) -> None:
    rows = stages.rows_before_repeat(sizes)
    assert (stages.counts(rows) <= sizes).all()
    assert (stages.counts(rows + 1) > sizes).any()


def walked_cover(stages: Stages, sizes: list[int]) -> int | None:
    """The same by walking: None if one of the sources that come is never covered."""
    comes = np.array(stages.weights).any(axis=0)
    sources, _ = stages.at(np.arange(stages.starts[-1] + 60 * 19))
    given_rows = np.cumsum(sources[:, None] == np.arange(stages.sources), axis=0)
    covered = (given_rows >= sizes)[:, comes].all(axis=1)
    return int(covered.argmax()) + 1 if covered.any() else None


@examples(40)
@given(STAGES, SIZES)
def test_a_cover_is_the_shortest_prefix_with_every_row(stages: Stages, sizes: list[int]) -> None:
    wanted = walked_cover(stages, sizes)
    if wanted is None:
        with pytest.raises(SettingsError, match="becomes 0 for good"):
            stages.rows_to_cover(sizes)
    else:
        assert stages.rows_to_cover(sizes) == wanted


def test_counts_of_rows_are_exact_for_huge_sources() -> None:
    stages = Stages.of([1, PRECISION - 1]).then(10**9, [1, 2])
    sizes = [2**48, 2**48 - 1]
    assert stages.rows_before_repeat(sizes) < stages.rows_to_cover(sizes)
    rows = stages.rows_before_repeat(sizes)
    assert (stages.counts(rows) <= sizes).all()
    assert stages.counts(rows + 1).tolist()[1] == 2**48
    rows = stages.rows_to_cover(sizes)
    assert stages.counts(rows).tolist()[0] == 2**48
    assert stages.counts(rows - 1).tolist()[0] == 2**48 - 1
    # More rows than a 64-bit number counts.
    assert Stages.of([1, PRECISION - 1]).rows_to_cover([2**48, 1]) > 2**63


def test_a_source_that_never_comes_need_not_be_covered() -> None:
    assert Stages.of([1, 0]).rows_to_cover([5, 100]) == 5
    assert Stages.of([1, 0]).rows_before_repeat([5, 100]) == 5


def test_the_error_about_a_source_that_is_never_covered_names_it() -> None:
    stages = Stages.of([1, 1]).then(10, [1, 0])
    assert stages.rows_to_cover([7, 5]) == 12
    with pytest.raises(SettingsError, match=r"sizes\[1\]=6: source 1 gives 5 rows .* position 10"):
        stages.rows_to_cover([7, 6])


def test_a_stage_at_the_same_position_replaces_the_one_before() -> None:
    stages = Stages.of([1, 1]).then(10, [1, 0]).then(10, [0, 1])
    assert (stages.starts, stages.weights) == ((0, 10), ((1, 1), (0, 1)))
    assert Stages.of([1, 1]).then(0, [1, 0]).weights == ((1, 0),)


@pytest.mark.parametrize("position", [9, -1, 1.5, True, "12", None, 2**63])
def test_a_stage_that_begins_too_early_is_refused(position: Any) -> None:
    with pytest.raises(SettingsError, match="position=.*at least 10"):
        Stages.of([1, 1]).then(10, [1, 2]).then(position, [1, 3])


def test_stages_have_the_same_sources() -> None:
    with pytest.raises(SettingsError, match="3 weights at position 5, but there are 2 sources"):
        Stages.of([1, 1]).then(5, [1, 1, 1])


@pytest.mark.parametrize("sizes", [[1], [1, 0], [1, -1], [1, 1.5], [1, True]])
def test_sizes_that_cannot_work_are_refused(sizes: list[Any]) -> None:
    with pytest.raises(SettingsError, match="sizes"):
        Stages.of([1, 1]).rows_before_repeat(sizes)
    with pytest.raises(SettingsError, match="sizes"):
        Stages.of([1, 1]).rows_to_cover(sizes)


def test_positions_before_the_beginning_are_refused() -> None:
    stages = Stages.of([1, 2])
    for asked in (stages.at, stages.counts, stages.schedules[0].at, stages.schedules[0].counts):
        with pytest.raises(SettingsError, match="position -1: must be at least 0"):
            asked(-1)


@examples(40)
@given(STAGES)
def test_stages_survive_a_trip_through_json(stages: Stages) -> None:
    back = Stages.from_json(json.loads(json.dumps(stages.to_json())))
    assert back.starts == stages.starts
    assert [each.quotas for each in back.schedules] == [each.quotas for each in stages.schedules]
    asked = np.arange(300)
    assert [part.tolist() for part in back.at(asked)] == [part.tolist() for part in stages.at(asked)]


@examples(40)
@given(STAGES)
def test_stages_with_their_counts_are_the_same_stages(stages: Stages) -> None:
    back = Stages.from_json(json.loads(json.dumps(stages.to_json_with_counts())))
    assert [each.tolist() for each in back.before] == [each.tolist() for each in stages.before]
    assert back.owed == stages.owed
    asked = np.arange(300)
    assert [part.tolist() for part in back.at(asked)] == [part.tolist() for part in stages.at(asked)]


def test_stages_with_their_counts_are_read_without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages.of([0.123, 0.456])
    for number in range(1, 50):
        stages = stages.then(70_000 * number, [0.123 + number / 1000, 0.456])
    assert not any("_known" in schedule.__dict__ for schedule in stages.schedules), (
        "slots of the past are kept"
    )
    text = json.dumps(stages.to_json_with_counts())

    def refuse(*_: Any) -> Any:
        raise AssertionError("reading works out slots")

    monkeypatch.setattr("headrace.order.schedule._first_slots", refuse)
    assert Stages.from_json(json.loads(text)).starts == stages.starts


@pytest.mark.parametrize("counts", [3, [50], [50, 51], [50, 50.0], [-1, 101], [180, -80], ["50", "50"]])
def test_counts_that_the_weights_do_not_give_are_refused(counts: Any) -> None:
    for value in ([[0, [1, 1], [0, 0]], [100, [1, 3], counts]], [[0, [1, 1], counts]]):
        with pytest.raises(SettingsError, match="counts"):
            Stages.from_json(value)


def test_slots_that_are_worked_out_little_by_little_are_those_of_the_whole_cycle() -> None:
    weights = [math.pi, math.e, math.sqrt(2)]
    whole = Schedule.from_weights(weights)
    assert whole.cycle > 10_000
    wanted = whole.source, whole.turn
    for first in (0, 1, 1023, 1024, 1025, 5000, whole.cycle - 1):
        schedule = Schedule.from_weights(weights)
        assert schedule.at(first)[0] == wanted[0][first]
        assert schedule.counts(first).sum() == first
        assert schedule.source.tolist() == wanted[0].tolist()
        assert schedule.turn.tolist() == wanted[1].tolist()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        "[[0, [1]]]",
        [[0]],
        [0, [1]],
        [[0, [1], 2]],
        [[1, [1]]],
        [["0", [1]]],
        [[0.0, [1]]],
        [[False, [1]]],
        [[0, 1]],
        [[0, []]],
        [[0, ["1"]]],
        [[0, [1]], [0, [2]]],
        [[0, [1]], [5, [2]], [3, [2]]],
        [[0, [1]], [5, [1, 2]]],
        [[0, [1]], [None, [1]]],
    ],
)
def test_json_that_is_not_stages_is_refused(value: Any) -> None:
    with pytest.raises(SettingsError):
        Stages.from_json(value)


def test_stages_can_be_cut_off_to_go_on_otherwise() -> None:
    stages = Stages.of([1, 1]).then(10, [1, 3]).then(20, [1, 0])
    assert stages.until(15).to_json() == [[0, [1, 1]], [10, [1, 3]]]
    assert stages.until(10).to_json() == stages.until(0).to_json() == [[0, [1, 1]]]
    assert (
        stages.until(15).then(15, [0, 1]).counts(18).tolist()
        == (stages.counts(15) + np.array([0, 3])).tolist()
    )


@examples(60)
@given(STAGES, st.integers(0, 300), st.integers(1, 60))
def test_a_part_of_the_stages_says_all_about_its_positions(stages: Stages, first: int, rows: int) -> None:
    asked = np.arange(first, first + rows)
    part = stages.part(first, first + rows)
    back = Stages.from_part(json.loads(json.dumps(part)))
    assert [each.tolist() for each in back.at(asked)] == [each.tolist() for each in stages.at(asked)]
    assert len(part) <= 1 + sum(first < start < first + rows for start in stages.starts)
    if back.starts[0]:
        with pytest.raises(SettingsError, match="these weights begin at position"):
            back.at([first, back.starts[0] - 1])


WHOLE = st.integers(-3, 70_000) | st.sampled_from([2**63, -(2**26), 2**26, 2**26 + 1, True, 1.5, "1", None])


@examples(200)
@given(st.lists(st.tuples(WHOLE, *(st.lists(WHOLE, max_size=3) for _ in range(3))).map(list), max_size=3))
def test_parts_from_anywhere_are_refused_or_can_be_used(value: Any) -> None:
    try:
        stages = Stages.from_part(value)
    except SettingsError:
        return
    first = stages.starts[0]
    source, index = stages.at(np.arange(first, first + 200))
    assert ((source >= 0) & (source < stages.sources) & (index >= 0)).all()


@examples(60)
@given(STAGES, st.data())
def test_parts_with_other_numbers_are_refused_or_can_be_used(stages: Stages, data: st.DataObject) -> None:
    part = stages.part(0, 300)
    stage = data.draw(st.sampled_from(part))
    which = data.draw(st.integers(1, 3))
    stage[which][data.draw(st.integers(0, 2))] = data.draw(WHOLE)
    test_parts_from_anywhere_are_refused_or_can_be_used.hypothesis.inner_test(part)
