"""Fields that are made when they are used: the same values whenever they are made, and nothing made for nobody."""

import copy
import gc
import pickle
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import FieldError
from headrace.load.loader import Loader
from headrace.rows.fields import Fields, late_fields
from headrace.rows.settings import TOKEN_FIELDS
from tests.load import streams
from tests.properties import examples

LENGTHS = [n % 13 + 1 for n in range(400)]


def loader_of(data: Any = None, **options: Any) -> Loader:
    chosen = {"batch_size": 3, "seq_len": 16, "prefetch": 0, "drop_last": False, **options}
    return Loader(streams.token_dataset(LENGTHS) if data is None else data, **chosen)


def assert_equal(found: Any, wanted: Any) -> None:
    assert np.array_equal(found, wanted)
    assert getattr(found, "dtype", None) == getattr(wanted, "dtype", None)


# The same values


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=8, max_size=60),
    packing=st.sampled_from(["best-fit", "windows", "pad"]),
    labels=st.sampled_from(["shifted", "unshifted"]),
    cu_seqlens=st.sampled_from(["batch", "row"]),
    batch_size=st.integers(1, 5),
    prefetch=st.sampled_from([0, None]),
    data=st.data(),
)
def test_a_field_has_the_same_values_whenever_it_is_made(
    lengths: list[int],
    packing: str,
    labels: str,
    cu_seqlens: str,
    batch_size: int,
    prefetch: int | None,
    data: Any,
) -> None:
    options: dict[str, Any] = {
        "packing": packing,
        "labels": labels,
        "cu_seqlens": cu_seqlens,
        "batch_size": batch_size,
        "seq_len": 8,
    }
    dataset = streams.token_dataset(lengths)
    wanted = streams.take(loader_of(dataset, fields=TOKEN_FIELDS, **options))
    found = list(loader_of(dataset, prefetch=prefetch, **options))
    assert len(found) == len(wanted)
    # In any order, long after the batches were handed out, and others after them.
    asked = [(number, name) for number in range(len(found)) for name in TOKEN_FIELDS]
    for number, name in data.draw(st.permutations(asked)):
        assert_equal(found[number][name], wanted[number][name])


@pytest.mark.parametrize("prefetch", [0, None])
def test_batches_outlive_the_loader_and_its_dataset(tmp_path: Path, prefetch: int | None) -> None:
    path = streams.write_tokens(tmp_path / "data", LENGTHS)
    wanted = streams.take(loader_of(path, fields=TOKEN_FIELDS))
    loader = loader_of(path, prefetch=prefetch)
    batches = list(loader)
    threads = threading.active_count()
    del loader
    gc.collect()
    assert threading.active_count() <= threads
    for batch, contents in zip(batches, wanted, strict=True):
        assert_equal(batch.loss_mask, contents["loss_mask"])
        assert_equal(batch.cu_seqlens, contents["cu_seqlens"])
        assert_equal(batch.labels, contents["labels"])


def test_a_kept_batch_keeps_no_threads() -> None:
    before = threading.active_count()
    iterator = iter(loader_of(prefetch=4, epochs=None))
    kept = next(iterator)
    assert threading.active_count() > before
    del iterator
    gc.collect()
    assert threading.active_count() == before
    assert kept.labels.shape == kept.tokens.shape


def test_threads_that_ask_for_the_same_field_get_one_array() -> None:
    (batch,) = islice(loader_of(), 1)
    found: list[Any] = []
    together = threading.Barrier(4)

    def ask() -> None:
        together.wait()
        found.append(batch.labels)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(array) for array in found}) == 1


# What is made


def test_what_is_used_is_made_ahead_and_nothing_else() -> None:
    iterator = iter(loader_of())
    first = next(iterator)
    assert list(first.made) == ["tokens"]
    assert list(first) == list(TOKEN_FIELDS)
    assert first.labels is first.labels
    assert set(first.made) == {"tokens", "labels"}
    second = next(iterator)
    assert set(second.made) == {"tokens", "labels"}
    second.cu_seqlens  # noqa: B018 - asking makes it
    assert set(next(iterator).made) == {"tokens", "labels", "cu_seqlens"}


def test_the_next_pass_knows_what_the_last_one_used() -> None:
    loader = loader_of()
    for batch in loader:
        batch.position_ids  # noqa: B018 - asking makes it
    assert set(next(iter(loader)).made) == {"tokens", "position_ids"}


def test_fields_that_were_asked_for_by_name_are_all_made() -> None:
    batch = next(iter(loader_of(fields=("labels", "loss_mask"))))
    assert set(batch.made) == set(batch) == {"labels", "loss_mask"}
    with pytest.raises(FieldError, match="this batch has no 'tokens'; it has labels, loss_mask"):
        batch["tokens"]


def test_a_function_may_copy_its_columns_with_what_it_added_and_took_out() -> None:
    def change(columns: dict[str, Any]) -> dict[str, Any]:
        columns["mine"] = np.arange(len(columns["tokens"]))
        del columns["labels"]
        with pytest.raises(KeyError):
            columns["labels"]
        return copy.deepcopy(columns)

    batch = next(iter(loader_of().map(change, per="batch")))
    assert "mine" in batch
    assert "labels" not in batch


def test_a_function_gets_every_field() -> None:
    seen: list[set[str]] = []

    def look(columns: dict[str, Any]) -> dict[str, Any]:
        seen.append(set(columns))
        return columns

    batch = next(iter(loader_of().map(look, per="batch")))
    assert seen[0] == set(TOKEN_FIELDS)
    assert set(batch.made) == set(TOKEN_FIELDS)


def test_looking_at_a_batch_makes_nothing() -> None:
    loader = loader_of()
    batch = next(iter(loader))
    assert "tokens: int64[3, 16], labels: created on use" in repr(batch)
    assert "labels" in batch
    assert len(batch) == len(TOKEN_FIELDS)
    assert hasattr(batch, "no_such_field") is False
    assert set(batch.made) == {"tokens"}


def test_taking_all_of_a_batch_makes_all_of_it() -> None:
    wanted = streams.take(loader_of(fields=TOKEN_FIELDS), 1)[0]
    for whole in (
        lambda batch: dict(batch),
        lambda batch: dict(batch.items()),
        lambda batch: {**batch},
        lambda batch: dict(pickle.loads(pickle.dumps(batch))),
    ):
        found = whole(next(iter(loader_of())))
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            assert_equal(found[name], value)


def test_forms_for_trainers_make_what_they_need() -> None:
    wanted = next(iter(loader_of(fields=TOKEN_FIELDS)))
    found = next(iter(loader_of()))
    for form in ("as_huggingface", "as_flash_attention", "as_megatron"):
        for name, value in getattr(wanted, form)().items():
            assert_equal(getattr(found, form)()[name], value)


def test_an_error_of_a_field_comes_when_it_is_asked_for_and_hides_no_other() -> None:
    def refuse(name: str) -> Any:
        raise KeyError("inside")

    batch = headrace.Batch(Fields(("a", "b"), refuse, {"a": 1}), next(iter(loader_of())).info)
    assert batch.a == 1
    with pytest.raises(KeyError, match="inside"):
        batch["b"]


def test_converted_fields_are_converted_once_and_made_only_when_used() -> None:
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    fields = Fields(("a", "b", "c"), make, {"a": "a"})
    batch = headrace.Batch(fields, next(iter(loader_of())).info, str.upper)
    assert batch.a == "A"
    assert made == []
    assert batch.b == "B"
    assert batch.b is batch["b"]
    assert made == ["b"]
    assert batch.made == {"a": "A", "b": "B"}
    assert dict(pickle.loads(pickle.dumps(batch))) == {"a": "A", "b": "B", "c": "C"}
    with pytest.raises(FieldError, match="this batch has no 'd'; it has a, b, c"):
        batch["d"]


def test_what_makes_the_rest_holds_nothing_of_what_is_there() -> None:
    array = np.zeros(3)
    fields = Fields(("a", "b"), lambda name: name, {"a": array})
    references = sys.getrefcount(array)
    late = late_fields(fields)
    assert late is not None
    assert sys.getrefcount(array) == references
    assert late["b"] == "b"
    assert late_fields({"a": array}) is None
    assert late_fields(Fields(("a",), lambda name: name, {"a": array})) is None
