"""Mixtures on the real Loader: exact shares in every prefix, and no row of any source lost or repeated."""

import json
import math
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import SettingsError
from headrace.load.loader import Loader
from headrace.rows.mix import Mixture
from tests.load import streams
from tests.properties import examples

APART = 1_000_000
"""Tokens of source s are s * APART on: rows tell their source, and in stored order also their number."""


def _source(number: int, rows: int, dtype: Any = np.uint32) -> headrace.Dataset:
    """Rows of four tokens."""
    return streams.token_dataset([4] * rows, first=number * APART, dtype=dtype)


def _mixture(weights: dict[str, float], rows: dict[str, int], **more: Any) -> Mixture:
    data = {name: _source(number, count) for number, (name, count) in enumerate(rows.items())}
    return headrace.mix({name: (data[name], weights[name]) for name in rows}, **more)


def _loader(mixture: Any, **options: Any) -> Loader:
    return Loader(
        mixture, **{"batch_size": 2, "seq_len": 4, "packing": "windows", "shuffle": False, **options}
    )


def _numbers(batches: Any) -> list[tuple[int, int]]:
    """(source, row) of each row, in stored order."""
    first = [int(token) for batch in batches for token in batch["tokens"][:, 0]]
    return [(token // APART, token % APART // 4) for token in first]


def _each_source_goes_on(rows: list[tuple[int, int]], sizes: list[int]) -> None:
    """In stored order: 0, 1, 2, ... and again, with nothing lost or repeated."""
    for source, size in enumerate(sizes):
        came = [row for which, row in rows if which == source]
        assert came == [number % size for number in range(len(came))]


@examples(30)
@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=5),
    st.lists(st.integers(1, 30), min_size=5, max_size=5),
    st.integers(1, 4),
)
def test_no_source_is_a_whole_row_away_from_its_share_in_any_prefix(
    weights: list[int], sizes: list[int], batch_size: int
) -> None:
    names = [f"s{number}" for number in range(len(weights))]
    mixture = _mixture(dict(zip(names, weights, strict=True)), dict(zip(names, sizes, strict=False)))
    loader = _loader(mixture, batch_size=batch_size, epochs=None)
    rows = _numbers(islice(loader, 60))
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    counts = Counter[int]()
    for position, (source, _) in enumerate(rows, 1):
        counts[source] += 1
        assert all(abs(counts[s] - position * share) < 1 for s, share in enumerate(shares))
    _each_source_goes_on(rows, sizes[: len(weights)])
    assert loader.rows_seen == {name: counts[number] for number, name in enumerate(names)}
    assert loader.epochs_seen == {name: counts[number] / sizes[number] for number, name in enumerate(names)}


def test_an_epoch_ends_before_the_first_source_repeats_or_once_all_are_through() -> None:
    rows = {"a": 30, "b": 10}
    for stop in ("first", "all"):
        loader = _loader(_mixture({"a": 1, "b": 1}, rows, stop=stop), batch_size=1)
        came = Counter(_numbers(loader))
        if stop == "first":
            assert set(came.values()) == {1}
            assert len(loader) in (20, 21)
        else:
            assert len(came) == 40
            assert loader.epoch == 1
        assert len(loader) == loader.rows_per_epoch


def test_a_small_source_goes_through_its_own_epochs_each_in_another_order() -> None:
    loader = _loader(
        _mixture({"large": 1, "small": 1}, {"large": 500, "small": 12}), shuffle=True, epochs=None
    )
    rows = _numbers(islice(loader, 120))
    small = [row for source, row in rows if source == 1]
    assert len(small) == 120
    epochs = [tuple(small[n : n + 12]) for n in range(0, 120, 12)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(epochs)) == 10
    large = [row for source, row in rows if source == 0]
    assert len(set(large)) == len(large)


def test_sources_with_equal_content_do_not_march_in_step() -> None:
    data = _source(0, 100)
    loader = _loader(headrace.mix({"one": (data, 1), "two": (data, 1)}), shuffle=True, batch_size=1)
    rows = [row for _, row in _numbers(loader)]
    assert rows[0::2] != rows[1::2]


def test_stages_change_the_weights_at_their_positions() -> None:
    stages = {10: {"a": 0, "b": 1}, 20: {"a": 1, "b": 1}}
    loader = _loader(_mixture({"a": 1, "b": 0}, {"a": 15, "b": 15}, stages=stages), batch_size=1, epochs=None)
    rows = _numbers(islice(loader, 60))
    assert [source for source, _ in rows[:20]] == [0] * 10 + [1] * 10
    assert Counter(source for source, _ in rows[20:40]) == {0: 10, 1: 10}
    _each_source_goes_on(rows, [15, 15])


def test_stages_fall_inside_batches_and_on_all_ranks_alike() -> None:
    mixture = _mixture({"a": 3, "b": 1}, {"a": 40, "b": 40}, stages={7: {"a": 1, "b": 4}})
    whole = _numbers(_loader(mixture, batch_size=12))
    parts = [_loader(mixture, batch_size=4, rank=rank, world_size=3) for rank in range(3)]
    together = [batch for step in zip(*map(streams.take, parts), strict=True) for batch in step]
    assert _numbers(together) == whole


def _run(loader: Loader, steps: int) -> list[tuple[int, int]]:
    return _numbers(islice(loader, steps))


def test_new_weights_hold_from_the_next_row_on_also_after_saving_and_resuming_twice() -> None:
    sizes = {"a": 37, "b": 23}
    mixture = _mixture({"a": 1, "b": 1}, sizes)
    loader = _loader(mixture, epochs=None, batch_size=3)
    rows = _run(loader, 5)
    loader.reweight({"a": 4, "b": 1})
    rows += _run(loader, 10)
    state = streams.through_json(loader.state_dict())
    resumed = _loader(mixture, epochs=None, batch_size=5)
    resumed.load_state_dict(state)
    assert resumed.rows_seen == loader.rows_seen
    rows += _run(resumed, 6)
    resumed.reweight({"a": 0, "b": 1})
    rows += _run(resumed, 2)
    again = _loader(mixture, epochs=None, batch_size=1)
    again.load_state_dict(streams.through_json(resumed.state_dict()))
    rows += _run(again, 10)
    _each_source_goes_on(rows, list(sizes.values()))
    came = [Counter(source for source, _ in part) for part in (rows[:14], rows[15:75], rows[75:])]
    assert came[0] == {0: 7, 1: 7}
    assert came[1] == {0: 48, 1: 12}
    assert came[2] == {1: 20}


@examples(30)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(1, 4), st.booleans()), max_size=6),
    st.booleans(),
)
def test_weights_may_change_and_jobs_restart_in_any_order(legs: list[Any], staged: bool) -> None:
    sizes = {"a": 17, "b": 11}
    stages = {5: {"a": 1, "b": 2}} if staged else None
    mixture = _mixture({"a": 1, "b": 1}, sizes, stages=stages)
    loader = _loader(mixture, epochs=None, batch_size=2)
    rows: list[tuple[int, int]] = []
    for weight, steps, batch_size, restart in legs:
        if restart:
            state = loader.state_dict()
            loader = _loader(mixture, epochs=None, batch_size=batch_size)
            loader.load_state_dict(state)
        else:
            loader.reweight({"a": weight, "b": 3})
        if steps:
            rows += _run(loader, steps)
    _each_source_goes_on(rows, list(sizes.values()))


def test_weights_changed_before_the_first_row_survive_saving_and_resuming() -> None:
    mixture = _mixture({"a": 1, "b": 1}, {"a": 30, "b": 30})
    loader = _loader(mixture, epochs=None)
    loader.reweight({"a": 1, "b": 0})
    rows = _run(loader, 5)
    assert {source for source, _ in rows} == {0}
    resumed = _loader(mixture, epochs=None)
    resumed.load_state_dict(streams.through_json(loader.state_dict()))
    _each_source_goes_on(rows + _run(resumed, 5), [30, 30])


def test_weights_changed_where_a_stage_begins_survive_saving_and_resuming() -> None:
    mixture = _mixture({"a": 1, "b": 1}, {"a": 30, "b": 30}, stages={10: {"a": 1, "b": 3}})
    loader = _loader(mixture, epochs=None)
    rows = _run(loader, 5)
    loader.reweight({"a": 1, "b": 0})
    rows += _run(loader, 5)
    resumed = _loader(mixture, epochs=None)
    resumed.load_state_dict(streams.through_json(loader.state_dict()))
    _each_source_goes_on(rows + _run(resumed, 5), [30, 30])


def test_ranks_that_change_their_weights_at_the_same_step_stay_together() -> None:
    mixture = _mixture({"a": 1, "b": 1}, {"a": 31, "b": 31})
    loaders = [_loader(mixture, rank=rank, world_size=3, epochs=None) for rank in range(3)]
    rows: list[tuple[int, int]] = []
    for weight in (1, 5, 0):
        for loader in loaders:
            loader.reweight({"a": weight, "b": 1})
        steps = zip(*(streams.take(loader, 4) for loader in loaders), strict=True)
        rows += _numbers(batch for step in steps for batch in step)
    _each_source_goes_on(rows, [31, 31])
    assert Counter(source for source, _ in rows[24:48]) == {0: 20, 1: 4}
    assert len({str(loader.state_dict()) for loader in loaders}) == 1


def test_new_weights_replace_stages_that_were_to_come() -> None:
    mixture = _mixture({"a": 1, "b": 1}, {"a": 30, "b": 30}, stages={20: {"a": 1, "b": 0}})
    loader = _loader(mixture, epochs=None)
    rows = _run(loader, 3)
    loader.reweight({"a": 0, "b": 1})
    rows += _run(loader, 4)
    resumed = _loader(mixture, epochs=None)
    resumed.load_state_dict(streams.through_json(loader.state_dict()))
    rows += _run(resumed, 20)
    assert {source for source, _ in rows[6:]} == {1}
    _each_source_goes_on(rows, [30, 30])


def test_a_loader_that_was_reweighted_can_go_back_to_a_state_from_before() -> None:
    mixture = _mixture({"a": 1, "b": 1}, {"a": 30, "b": 30})
    loader = _loader(mixture, epochs=None)
    wanted = _run(loader, 10)
    loader = _loader(mixture, epochs=None)
    _run(loader, 3)
    state = loader.state_dict()
    loader.reweight({"a": 5, "b": 1})
    _run(loader, 3)
    loader.load_state_dict(state)
    assert _run(loader, 7) == wanted[6:]


def test_an_iteration_under_way_goes_on_with_the_new_weights_and_its_state_follows() -> None:
    mixture = _mixture({"a": 1, "b": 1}, {"a": 50, "b": 50})
    wanted = _run(_loader(mixture, epochs=None), 5)
    for workers in (1, 3):
        loader = _loader(mixture, epochs=None, workers=workers)
        batches = iter(loader)
        rows = _numbers(islice(batches, 5))
        loader.reweight({"a": 0, "b": 1})
        after = _numbers(islice(batches, 5))
        assert rows == wanted
        assert {source for source, _ in after} == {1}
        resumed = _loader(mixture, epochs=None)
        resumed.load_state_dict(streams.through_json(loader.state_dict()))
        assert _run(resumed, 3) == _numbers(islice(batches, 3))
        loader.reweight({"a": 1, "b": 0})
        assert {source for source, _ in _numbers(islice(batches, 2))} == {0}


def test_after_a_state_was_loaded_a_loop_that_is_left_is_continued() -> None:
    mixture = _mixture({"a": 1, "b": 1}, {"a": 20, "b": 20})
    wanted = _numbers(iter(_loader(mixture)))
    loader = _loader(mixture)
    taken = _numbers(islice(loader, 3))
    other = _loader(mixture)
    other.load_state_dict(loader.state_dict())
    peeked = _numbers(islice(other, 1))
    rest = _numbers(iter(other))
    assert taken + peeked + rest == wanted
    assert len(other) == len(_loader(mixture)), "the next pass is a whole one"


def test_reweighting_makes_no_epoch_longer_or_shorter() -> None:
    for epochs in (1, None):
        loader = _loader(_mixture({"a": 1, "b": 1}, {"a": 30, "b": 30}), epochs=epochs)
        untouched = _loader(_mixture({"a": 1, "b": 1}, {"a": 30, "b": 30}), epochs=epochs)
        _run(loader, 5)
        loader.reweight({"a": 9, "b": 1})
        assert loader.rows_per_epoch == untouched.rows_per_epoch


def test_extreme_weights_leave_no_source_out_and_crash_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loader = _loader(_mixture({"a": 1, "b": 1e-6}, {"a": 10, "b": 3}), epochs=None, batch_size=4096)
    rows = _numbers(islice(loader, 17))
    rare = sum(source for source, _ in rows)
    assert 1 <= rare <= 2
    assert "too small for a mixture" in caplog.text
    _each_source_goes_on(rows, [10, 3])
    huge = _loader(_mixture({"a": 1e300, "b": 1e300}, {"a": 10, "b": 3}), epochs=None)
    assert Counter(source for source, _ in _run(huge, 50)) == {0: 50, 1: 50}


def test_sources_may_store_their_tokens_in_different_types() -> None:
    kinds = {"small": np.uint16, "large": np.uint32, "signed": np.int64}
    data = {
        name: (streams.token_dataset([5, 3, 9] * 10, first=1 + 1000 * number, dtype=dtype), 1)
        for number, (name, dtype) in enumerate(kinds.items())
    }
    loader = Loader(headrace.mix(data), batch_size=1, seq_len=8, drop_last=False)
    tokens = streams.tokens_of(streams.flat(map(streams.rows_of, loader)))
    assert len(tokens) == len(set(tokens))
    wanted = {1000 * number + n for number in range(3) for n in range(1, 171)}
    assert set(tokens) <= wanted
    assert len(wanted) - len(tokens) < 3 * 8


def test_records_and_own_samples_mix_too() -> None:
    records = {
        n: headrace.from_arrays({"x": np.arange(n, n + 5), "s": [b"a", b"", b"ccc"] + [b"d"] * 2})
        for n in (0, 10)
    }
    mixture = headrace.mix({"low": (records[0], 1), "high": (records[10], 1)})
    batches = streams.take(Loader(mixture, batch_size=2, shuffle=False))
    assert [batch["x"].tolist() for batch in batches] == [[n, n + 10] for n in range(5)]
    assert batches[0]["s"] == [b"a", b"a"]
    mixture = headrace.mix({"few": (streams.Numbers(4), 1), "many": (streams.Numbers(12), 3)})
    batches = streams.take(Loader(mixture, batch_size=4, shuffle=False))
    assert sorted(number for batch in batches for number in batch["number"].tolist()) == sorted(
        [*range(4), *range(12)]
    )


@pytest.mark.parametrize("weight", [-1, -0.5, math.nan, math.inf, "1", None, True, 10**400])
def test_weights_that_are_no_shares_are_refused_with_their_source(weight: Any) -> None:
    with pytest.raises(SettingsError, match=r"weights of a, b: weights\[1\]=.*finite number of at least 0"):
        headrace.mix({"a": (_source(0, 4), 1), "b": (_source(1, 4), weight)})
    loader = _loader(_mixture({"a": 1, "b": 1}, {"a": 4, "b": 4}))
    with pytest.raises(SettingsError, match=r"finite number of at least 0"):
        loader.reweight({"a": 1, "b": weight})


def test_mixtures_that_cannot_work_are_refused() -> None:
    one = _source(0, 4)
    with pytest.raises(SettingsError, match="at least one source needs a weight above 0"):
        headrace.mix({"a": (one, 0), "b": (one, 0.0)})
    with pytest.raises(SettingsError, match="sources is empty: give at least one"):
        headrace.mix({})
    with pytest.raises(SettingsError, match="must be a dict"):
        headrace.mix([(one, 1)])  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="source 'a': must be a pair of data and weight"):
        headrace.mix({"a": one})  # type: ignore[dict-item]
    with pytest.raises(SettingsError, match="stop='never': must be 'first' or 'all'"):
        headrace.mix({"a": (one, 1)}, stop="never")
    with pytest.raises(SettingsError, match=r"must be a dict with a weight for each of \['a', 'b'\]"):
        headrace.mix({"a": (one, 1), "b": (one, 1)}, stages={5: {"a": 1}})


def test_stages_that_cannot_work_are_refused() -> None:
    rows = {"a": 40, "b": 40}
    for position in ("10", -1, 1.5, None):
        with pytest.raises(SettingsError, match="whole number"):
            _mixture({"a": 1, "b": 1}, rows, stages={position: {"a": 1, "b": 1}, 5: {"a": 1, "b": 1}})
    with pytest.raises(
        SettingsError, match="'a'.*gives 3 rows before its weight becomes 0 for good at position 5"
    ):
        _loader(_mixture({"a": 1, "b": 1}, rows, stages={5: {"a": 0, "b": 1}}, stop="all"))


def test_a_source_that_is_empty_or_cannot_be_opened_is_named() -> None:
    empty = headrace.from_arrays({"x": np.empty(0)})
    some = headrace.from_arrays({"x": np.ones(3)})
    with pytest.raises(SettingsError, match="nothing has no rows"):
        Loader(headrace.mix({"some": (some, 1), "nothing": (empty, 1)}), batch_size=1)
    with pytest.raises(headrace.HeadraceError, match="source 'gone'"):
        Loader(headrace.mix({"some": (some, 1), "gone": ("/no/such/dataset", 1)}), batch_size=1)
    with pytest.raises(SettingsError, match="source 'short': seq_len=100"):
        _loader(headrace.mix({"short": (_source(0, 4), 1), "long": (_source(1, 90), 1)}), seq_len=100)


def test_sources_with_different_fields_are_refused_with_both() -> None:
    one = headrace.from_arrays({"x": np.ones(3), "y": np.ones(3)})
    two = headrace.from_arrays({"x": np.ones(3, dtype=np.float32), "y": np.ones(3)})
    with pytest.raises(SettingsError, match=r"same fields, .*one: x float64.*two: x float32"):
        Loader(headrace.mix({"one": (one, 1), "two": (two, 1)}), batch_size=1)
    same = Loader(headrace.mix({"one": (one, 1), "two": (two, 1)}), batch_size=2, fields=["y"])
    assert next(iter(same)).y.tolist() == [1, 1]


def test_wrong_names_in_reweight_are_refused_and_change_nothing() -> None:
    loader = _loader(_mixture({"a": 1, "b": 1}, {"a": 4, "b": 4}))
    before = loader.state_dict()
    for weights in ({"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 1, "B": 1}, [1, 1], {"a": 0, "b": 0}):
        with pytest.raises(SettingsError, match=r"weight"):
            loader.reweight(weights)  # type: ignore[arg-type]
    assert loader.state_dict() == before
    with pytest.raises(SettingsError, match="the data is not a mixture"):
        _loader(_source(0, 9)).reweight({"a": 1})


def test_two_names_that_read_the_same_are_refused() -> None:
    with pytest.raises(SettingsError, match="'1'"):
        headrace.mix({1: (_source(0, 4), 1), "1": (_source(1, 4), 1)})  # type: ignore[dict-item]


def _built(folder: Path, name: str, tokenizer: str | None = "bytes", **options: Any) -> headrace.Dataset:
    texts = folder / f"{name}.jsonl"
    texts.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(20)))
    headrace.build(texts, folder / name, tokenizer=tokenizer, **options)
    return headrace.open(folder / name)


def test_datasets_of_different_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    web, code = _built(tmp_path, "web"), _built(tmp_path, "code", eos=False)
    arrays = headrace.from_arrays({"tokens": [np.arange(20, dtype=np.uint16)] * 9})
    with pytest.raises(
        SettingsError,
        match=r"source 'code' was built with the tokenizer bytes .*end token None.*'web' .*end token 256.*"
        r"allow_different_tokenizers=True",
    ):
        Loader(headrace.mix({"web": (web, 1), "code": (code, 1)}), batch_size=2, seq_len=16)
    allowed = headrace.mix({"web": (web, 1), "code": (code, 1)}, allow_different_tokenizers=True)
    assert len(Loader(allowed, batch_size=2, seq_len=16)) > 2
    same = headrace.mix({"web": (web, 1), "more": (_built(tmp_path, "more"), 1), "arrays": (arrays, 1)})
    assert len(Loader(same, batch_size=2, seq_len=16)) > 2
