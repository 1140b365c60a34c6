"""A Loader's state: small, plain JSON, and refused with the difference spelled out where it does not belong."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import StateError
from headrace.load.loader import Loader
from tests.load import streams
from tests.properties import examples

LENGTHS = [n % 13 + 1 for n in range(60)]


def _loader(first: int = 1, **options: Any) -> Loader:
    data = streams.token_dataset(LENGTHS, first)
    return Loader(data, **{"batch_size": 4, "seq_len": 10, "shuffle": "global", **options})


def _mixture(weights: dict[str, float], names: str = "ab", first: int = 1) -> Loader:
    data = {
        name: streams.token_dataset(LENGTHS, first + 10_000 * number) for number, name in enumerate(names)
    }
    mixture = headrace.mix({name: (data[name], weights[name]) for name in names})
    return Loader(mixture, batch_size=4, seq_len=10)


def test_a_state_is_json_and_the_same_after_loading() -> None:
    loader = _loader()
    streams.take(loader, 3)
    state = streams.through_json(loader.state_dict())
    assert state["position"] == 12
    other = _loader()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert len(json.dumps(state)) < 400


def test_a_state_of_a_mixture_of_twenty_sources_is_under_a_kilobyte() -> None:
    data = {f"source number {n}": (streams.token_dataset([n + 1] * 20), 1 / (n + 3)) for n in range(20)}
    loader = Loader(headrace.mix(data), batch_size=2, seq_len=5)
    streams.take(loader, 2)
    streams.through_json(loader.state_dict())


def test_the_state_belongs_to_no_rank_batch_size_or_thread() -> None:
    states = [
        _loader(rank=rank, world_size=size, batch_size=12 // size, workers=size, prefetch=size).state_dict()
        for rank, size in ((0, 1), (1, 2), (2, 3))
    ]
    assert states[0] == states[1] == states[2]


def test_a_state_that_was_handed_out_does_not_change_any_more() -> None:
    loader = _loader()
    state = loader.state_dict()
    before = dict(state)
    streams.take(loader, 3)
    assert state == before
    state["position"] = 10**9
    assert loader.state_dict()["position"] == 12


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"first": 2}, "the data has fingerprint .* it was rebuilt, or it is other data"),
        ({"seed": 7}, "seed is 7 here and 0 in the state"),
        ({"seq_len": 11}, "seq_len is 11 here and 10 in the state"),
        ({"packing": "windows"}, "packing is 'windows' here and 'best-fit' in the state"),
        ({"packing": "pad"}, "packing is 'pad' here and 'best-fit' in the state"),
        ({"overlong": "drop"}, "overlong is 'drop' here and 'split' in the state"),
        ({"group_shards": 1}, "group_shards is 1 here and None in the state"),
        ({"shuffle": False}, "shuffle is 'none' here and 'global' in the state"),
        ({"shuffle": headrace.Shuffle(kind="block", block=8, window=4)}, "shuffle is 'block' .* block is 8 "),
        ({"seq_len": None}, "seq_len is None here and 10 in the state"),
    ],
)
def test_a_state_of_another_stream_is_refused_with_the_difference(other: dict[str, Any], said: str) -> None:
    for mine, theirs in ((other, {}), ({}, other)):
        loader = _loader(**theirs)
        streams.take(loader, 1)
        here = _loader(**mine)
        with pytest.raises(StateError, match=said if mine else "another stream"):
            here.load_state_dict(loader.state_dict())
        assert here.state_dict()["position"] == 0, "a state that was refused moved the Loader"


def test_every_difference_is_named_at_once() -> None:
    with pytest.raises(StateError, match=r"seed is 1 .*; seq_len is 12 .*; packing is 'pad'"):
        _loader(seed=1, seq_len=12, packing="pad").load_state_dict(_loader().state_dict())


def test_blocks_of_another_size_are_another_order() -> None:
    block = headrace.Shuffle(kind="block", block=8, window=4)
    for other in (
        headrace.Shuffle(kind="block", block=4, window=4),
        headrace.Shuffle(kind="block", block=8, window=2),
    ):
        with pytest.raises(StateError, match="block is 4|window is 2"):
            _loader(shuffle=other).load_state_dict(_loader(shuffle=block).state_dict())


def test_another_field_of_tokens_is_another_stream() -> None:
    data = headrace.from_arrays({"tokens": [np.arange(5)] * 8, "other": [np.arange(5, 10)] * 8})
    state = Loader(data, batch_size=2, seq_len=5).state_dict()
    with pytest.raises(StateError, match="other"):
        Loader(data, batch_size=2, seq_len=5, token_field="other").load_state_dict(state)


def test_mixtures_with_other_weights_sources_or_order_are_refused() -> None:
    state = streams.through_json(_mixture({"a": 0.5, "b": 0.5}).state_dict())
    with pytest.raises(StateError, match=r"weights are .*call reweight"):
        _mixture({"a": 0.7, "b": 0.3}).load_state_dict(state)
    with pytest.raises(StateError, match=r"source 'a' has fingerprint"):
        _mixture({"a": 0.5, "b": 0.5}, first=2).load_state_dict(state)
    with pytest.raises(StateError, match=r"there are 3 sources here"):
        _mixture({"a": 0.5, "b": 0.5, "c": 1}, names="abc").load_state_dict(state)
    with pytest.raises(StateError, match="weights|sources"):
        _loader().load_state_dict(state)
    with pytest.raises(StateError, match="sources|weights"):
        _mixture({"a": 0.5, "b": 0.5}).load_state_dict(_loader().state_dict())


def test_a_users_own_data_is_told_from_other_data_by_its_fingerprint_or_its_length() -> None:
    class Marked(streams.Numbers):
        def __init__(self, count: int, fingerprint: str) -> None:
            super().__init__(count)
            self.fingerprint = fingerprint

    state = Loader(Marked(10, "one"), batch_size=2).state_dict()
    Loader(Marked(10, "one"), batch_size=2).load_state_dict(state)
    for other in (Marked(10, "two"), streams.Numbers(10)):
        with pytest.raises(StateError, match="fingerprint"):
            Loader(other, batch_size=2).load_state_dict(state)
    state = Loader(streams.Numbers(10), batch_size=2).state_dict()
    with pytest.raises(StateError, match="rows is 11 here and 10 in the state"):
        Loader(streams.Numbers(11), batch_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "held"),
    [({}, "holds nothing"), ({"model": 1, "step": 2}, "holds 'model', 'step'"), (5, "type int")],
)
def test_what_is_no_state_is_told(state: Any, held: str) -> None:
    with pytest.raises(StateError, match=f"state .*{held}: must be a dict from state_dict"):
        _loader().load_state_dict(state)


def test_a_state_of_a_newer_version_says_so() -> None:
    state = _loader().state_dict()
    with pytest.raises(StateError, match="version 2: this Headrace reads version 1"):
        _loader().load_state_dict({**state, "headrace": 2})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@examples(40)
@given(st.data())
def test_a_damaged_state_is_refused_or_means_what_it_says(data: st.DataObject) -> None:
    loader = _mixture({"a": 0.5, "b": 0.5}) if data.draw(st.booleans()) else _loader()
    state: dict[Any, Any] = json.loads(json.dumps(loader.state_dict()))
    for key in data.draw(st.lists(st.sampled_from([*state, "reweighted", "unknown", 5]), max_size=2)):
        if data.draw(st.booleans()):
            state.pop(key, None)
        else:
            state[key] = data.draw(JSON)
    try:
        loader.load_state_dict(state)
    except StateError:
        assert loader.state_dict()["position"] == 0
    else:
        # What is None may be left out.
        own = loader.state_dict()
        assert own == {**dict.fromkeys(own), **state}


@pytest.mark.parametrize(
    "garbage", [None, [], "state", 5, {}, {"position": 3}, {"headrace": "x"}, {"headrace": 1}]
)
def test_garbage_is_refused(garbage: Any) -> None:
    with pytest.raises(StateError, match="state"):
        _loader().load_state_dict(garbage)
    if isinstance(garbage, dict):
        with pytest.raises(StateError, match="state"):
            _loader().load_state_dict({**garbage, 5: "a key that is no text", "more": 1})


@pytest.mark.parametrize(
    "weights",
    [None, 3, [], [[0, [1, 1]], ["x", [1, 1]]], [[0, [1, 1]], [9, [1, -1]]], [[0, [1, 1]], 3], [[0, [1]]]],
)
def test_garbage_in_the_weights_is_a_damaged_state(weights: Any) -> None:
    loader = _mixture({"a": 0.5, "b": 0.5})
    with pytest.raises(StateError):
        loader.load_state_dict({**loader.state_dict(), "reweighted": weights})


@pytest.mark.parametrize("position", [2**63, 2**70, 10**30])
def test_a_position_beyond_any_stream_is_a_damaged_state(position: int) -> None:
    for epochs in (None, 1):
        loader = _loader(epochs=epochs)
        with pytest.raises(StateError, match="position"):
            loader.load_state_dict({**loader.state_dict(), "position": position})


def test_a_field_of_tokens_that_is_named_is_the_same_stream() -> None:
    data = headrace.from_arrays({"tokens": [np.arange(9, dtype=np.uint16)] * 9})
    found, named = (Loader(data, batch_size=1, seq_len=8, token_field=name) for name in (None, "tokens"))
    assert found.state_dict() == named.state_dict()
    found.load_state_dict(named.state_dict())
    other = headrace.from_arrays({"ids": [np.arange(9, dtype=np.uint16)] * 9, "tokens": [np.arange(9)] * 9})
    state = Loader(other, batch_size=1, seq_len=8, token_field="ids").state_dict()
    with pytest.raises(StateError, match="token_field is 'tokens' here and 'ids' in the state"):
        Loader(other, batch_size=1, seq_len=8).load_state_dict(state)
