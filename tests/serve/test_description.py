"""What a server says about its Loader: complete, the same for the same rows, and checked when it comes from a wire."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.serve.description import (
    DamagedDescriptionError,
    decode,
    describe,
    differences,
    encode,
)
from tests.properties import examples

SCALE = 2


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "tokens": batch["tokens"] * SCALE}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("described")
    made = []
    for number in range(2):
        with headrace.Writer(folder / str(number), fields={"tokens": "uint16[*]"}) as writer:
            for length in range(1, 60):
                writer.write({"tokens": np.arange(length) + number})
        made.append(folder / str(number))
    return made


def loader_of(places: list[Path], **changes: Any) -> headrace.Loader:
    settings = {"seq_len": 16, "batch_size": 4, "seed": 3, **changes}
    return headrace.Loader(headrace.mix({"a": (places[0], 1), "b": (places[1], 2)}), **settings)


def test_it_comes_back_from_the_wire(places: list[Path]) -> None:
    for shuffle in ("global", "units", "block"):
        description = describe(loader_of(places, shuffle=shuffle).map(double, per="batch"))
        again = decode(encode(description))
        assert again == description
        assert again.fingerprint == description.fingerprint
        assert again.loader_settings() == loader_of(places, shuffle=shuffle).settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 4}, "seed is 4 instead of 3"),
        ({"seq_len": 32}, "seq_len is 32 instead of 16"),
        ({"labels": "unshifted"}, "labels is 'unshifted' instead of 'shifted'"),
        ({"shuffle": "none"}, "shuffle is {'kind': 'none'"),
        ({"batch_size": 8}, "batch_size is 8 instead of"),
        ({"epochs": 3}, "epochs is 3 instead of 1"),
    ],
)
def test_other_settings_are_other_rows(places: list[Path], changes: dict[str, Any], said: str) -> None:
    here, there = describe(loader_of(places)), describe(loader_of(places, **changes))
    assert here.fingerprint != there.fingerprint
    assert any(each.startswith(said) for each in differences(here, there))


@pytest.mark.parametrize("changes", [{"workers": 1}, {"timeout_seconds": 5.0}, {"prefetch": 1}])
def test_settings_that_leave_the_rows_alone(places: list[Path], changes: dict[str, Any]) -> None:
    here, there = describe(loader_of(places)), describe(loader_of(places, **changes))
    assert here.fingerprint == there.fingerprint
    assert list(differences(here, there)) == []


def test_other_data_and_other_functions(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    here = describe(headrace.Loader(places[0], seq_len=16, batch_size=4))
    there = describe(headrace.Loader(places[1], seq_len=16, batch_size=4))
    assert [each[:30] for each in differences(here, there)] == [
        "its data has the fingerprint " + there.stream["data"][0]
    ]
    plain, mapped = loader_of(places), loader_of(places).map(double, per="batch")
    assert list(differences(describe(plain), describe(mapped))) == [
        "its functions are map(double) per batch instead of none"
    ]
    before = describe(mapped)
    monkeypatch.setitem(double.__globals__, "SCALE", 3)
    assert list(differences(before, describe(mapped))) == [
        "map(double) has other code (double > SCALE is another)"
    ]


@examples(200)
@given(
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 3)
)
def test_damaged_descriptions_are_refused_or_usable(
    places: list[Path], mutations: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(encode(describe(loader_of(places, shuffle="units"))))
    for place, byte in mutations:
        damaged[place % len(damaged)] = byte
    try:
        found = decode(bytes(damaged[: len(damaged) - cut]))
    except DamagedDescriptionError:
        return
    assert found.loader_settings().batch_size >= 1
    assert found.fingerprint
