"""Functions on samples and batches: what they see, where their randomness comes from, and how they fail."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError, StageError, StageTimeoutError
from headrace.load.loader import Loader
from tests.load import streams
from tests.workers.waiting import PATIENCE_SECONDS


def _numbers(count: int = 20, **options: Any) -> Loader:
    return Loader(streams.Numbers(count), **{"batch_size": 4, "shuffle": False, **options})


def _tokens(**options: Any) -> Loader:
    return Loader(streams.token_dataset([8] * 20), **{"batch_size": 4, "seq_len": 8, **options})


def test_a_function_on_samples_sees_each_sample_and_its_results_are_stacked() -> None:
    loader = _numbers().map(lambda sample: {"y": sample["x"] + 1, "length": len(sample["text"])})
    batches = streams.take(loader)
    assert [set(batch) for batch in batches] == [{"y", "length"}] * 5
    assert np.concatenate([batch["y"] for batch in batches])[:, 0].tolist() == list(range(1, 21))


def test_a_function_on_batches_sees_the_columns_and_gives_columns() -> None:
    plain = streams.take(_numbers())
    loader = _numbers().map(lambda batch: {"sum": batch["x"].sum(1), "texts": batch["text"]}, per="batch")
    for batch, before in zip(loader, plain, strict=True):
        np.testing.assert_array_equal(batch["sum"], before["x"].sum(1))
        assert batch["texts"] == before["text"]


def test_rows_of_tokens_can_be_changed_too() -> None:
    plain = streams.take(_tokens())
    for per in ("sample", "batch"):
        loader = _tokens().map(lambda rows: {"first": rows["tokens"][..., :2] * 2}, per=per)
        for batch, before in zip(loader, plain, strict=True):
            np.testing.assert_array_equal(batch["first"], before["tokens"][:, :2] * 2)


def test_a_function_on_batches_of_records_sees_what_a_batch_without_it_holds() -> None:
    data = headrace.from_arrays(
        {"x": np.arange(6.0), "words": [np.arange(n) for n in range(6)], "name": [b"a" * n for n in range(6)]}
    )
    plain = streams.take(Loader(data, batch_size=3))
    assert streams.same(streams.take(Loader(data, batch_size=3).map(dict, per="batch")), plain)


def test_functions_follow_each_other_in_their_order() -> None:
    chained = (
        _numbers()
        .map(lambda sample: {"x": sample["x"] + 1})
        .map(lambda batch: {"x": batch["x"] * 10}, per="batch")
        .map(lambda sample: {"x": sample["x"] - 1})
    )
    found = np.concatenate([batch["x"] for batch in chained])[:, 0]
    assert found.tolist() == [(n + 1) * 10 - 1 for n in range(20)]


def test_mapping_leaves_the_loader_itself_as_it_was() -> None:
    loader = _numbers()
    mapped = loader.map(streams.doubled)
    batches = iter(mapped)
    next(batches)
    assert loader.state_dict()["position"] == 0
    assert mapped.state_dict()["position"] == 4
    assert set(next(iter(loader))) == {"x", "number", "text"}
    assert set(next(batches)) == {"y"}


def test_a_state_does_not_depend_on_the_functions() -> None:
    mapped = _numbers().map(streams.doubled)
    streams.take(mapped, 2)
    plain = _numbers()
    plain.load_state_dict(mapped.state_dict())
    assert next(iter(plain))["number"].tolist() == [8, 9, 10, 11]


# Randomness


def _draws(loader: Loader) -> dict[int, list[tuple[float, ...]]]:
    """What each sample's generator gave, in each epoch."""
    draws: dict[int, list[tuple[float, ...]]] = {}
    for batch in loader:
        for number, drawn in zip(batch["number"].tolist(), batch["drawn"], strict=True):
            draws.setdefault(number, []).append(tuple(drawn.tolist()))
    return draws


def test_randomness_belongs_to_the_row_and_not_to_threads_ranks_batches_or_restarts() -> None:
    options: dict[str, Any] = {"shuffle": True, "epochs": 2, "drop_last": False}
    wanted = _draws(_numbers(**options).map(streams.drawn))
    for other in ({"workers": 1}, {"workers": 3}, {"prefetch": 0}, {"batch_size": 7}):
        assert _draws(_numbers(**{**options, **other}).map(streams.drawn)) == wanted
    ranks = [_draws(_numbers(rank=rank, world_size=3, **options).map(streams.drawn)) for rank in range(3)]
    together: dict[int, list[tuple[float, ...]]] = {}
    for draws in ranks:
        for number, came in draws.items():
            together.setdefault(number, []).extend(came)
    assert {number: sorted(came) for number, came in together.items()} == {
        number: sorted(came) for number, came in wanted.items()
    }


def test_randomness_differs_from_row_to_row_epoch_to_epoch_and_seed_to_seed() -> None:
    draws = [_draws(_numbers(epochs=3, seed=seed).map(streams.drawn)) for seed in (0, 1)]
    every = [value for each in draws for came in each.values() for drawn in came for value in drawn]
    assert len(set(every)) == len(every) == 2 * 20 * 3 * 3


def test_functions_that_follow_each_other_draw_different_numbers() -> None:
    loader = (
        _numbers()
        .map(lambda sample, rng: {"first": rng.random()})
        .map(lambda sample, rng: {**sample, "second": rng.random()})
    )
    for batch in loader:
        assert not np.isin(batch["second"], batch["first"]).any()


def test_rows_of_tokens_have_generators_of_their_own() -> None:
    loader = _tokens(epochs=2).map(lambda row, rng: {"tokens": row["tokens"], "drawn": rng.random()})
    drawn = np.concatenate([batch["drawn"] for batch in loader])
    assert len(set(drawn.tolist())) == 40
    streams.resumes_at_every_step(
        lambda: _tokens(epochs=2).map(lambda row, rng: {"t": row["tokens"], "d": rng.random()})
    )


class _Augment:
    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return streams.drawn(sample, rng)


@pytest.mark.parametrize(
    "function",
    [
        _Augment(),
        functools.partial(streams.drawn),
        lambda sample, rng=None: streams.drawn(sample, rng),
        lambda sample, generator: streams.drawn(sample, generator),
    ],
)
def test_whatever_takes_a_second_argument_gets_a_generator(function: Any) -> None:
    assert _draws(_numbers().map(function)) == _draws(_numbers().map(streams.drawn))


def test_a_second_argument_with_a_default_is_left_alone() -> None:
    loader = _numbers().map(lambda sample, scale=3: {"y": sample["number"] * scale})
    assert next(iter(loader))["y"].tolist() == [0, 3, 6, 9]


# Failures


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_function_that_raises_ends_the_iteration_with_its_name_the_row_and_the_cause(prefetch: int) -> None:
    batches = iter(_numbers(prefetch=prefetch).map(streams.failing))
    assert next(batches)["number"].tolist() == [0, 1, 2, 3]
    with pytest.raises(
        StageError, match=r"map\(failing\) failed on row 7 of the stream: LookupError.*no sevens"
    ) as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, LookupError)
    assert "streams.py" in str(caught.traceback[-1].path) or caught.value.__cause__.__traceback__ is not None


def test_a_function_on_batches_that_raises_names_the_rows() -> None:
    with pytest.raises(
        StageError, match=r"map\(.*\) failed on rows 0 to 3 of the stream: KeyError"
    ) as caught:
        next(iter(_numbers().map(lambda batch: {"y": batch["nothing"]}, per="batch")))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_raises_what_ends_loops_does_not_end_the_epoch_early() -> None:
    def ends(sample: dict[str, Any]) -> dict[str, Any]:
        raise StopIteration

    for prefetch in (0, 2):
        with pytest.raises(StageError, match="StopIteration"):
            list(_numbers(prefetch=prefetch).map(ends))


def test_after_a_failure_the_loader_can_be_used_again_from_the_batch_that_failed() -> None:
    loader = _numbers().map(streams.failing)
    with pytest.raises(StageError):
        list(loader)
    state = loader.state_dict()
    assert state["position"] == 4
    fixed = _numbers()
    fixed.load_state_dict(state)
    assert next(iter(fixed))["number"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("prefetch", [0, 1, 8])
def test_an_iteration_that_failed_is_over_and_its_state_exact(prefetch: int) -> None:
    """Were it to go on, the rows of the batch that failed would be lost without a word."""
    loader = _numbers(prefetch=prefetch).map(streams.failing)
    batches = iter(loader)
    next(batches)
    with pytest.raises(StageError):
        next(batches)
    assert [batch["number"].tolist() for batch in batches] == []
    assert loader.state_dict()["position"] == 4
    assert loader.epoch == 0


def test_a_batch_of_fewer_rows_than_it_came_with_is_refused_since_rows_would_get_lost() -> None:
    with pytest.raises(
        StageError, match="returned 2 values of 'x' for rows 0 to 3 of the stream; it must return 4"
    ):
        list(_numbers().map(lambda batch: {"x": batch["x"][:2]}, per="batch"))
    added = _numbers().map(
        lambda batch: {"x": batch["x"], "mean": np.array([batch["x"].mean()])}, per="batch"
    )
    assert [len(batch["mean"]) for batch in added] == [1] * 5
    with pytest.raises(StageError, match="'mean' has length 1 in a batch of 4"):
        list(added.map(lambda sample: sample))


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda batch: {"x": batch["x"].tolist()[:-1]}, "3 values of 'x'"),
        (lambda batch: {"y": batch["x"][:-1]}, "3 values of 'y'"),
        (lambda batch: {"y": batch["x"][:2], "sum": 1.0}, "2 values of 'y'"),
    ],
)
def test_rows_are_not_lost_in_lists_or_under_another_name(
    function: Callable[..., Any], returned: str
) -> None:
    with pytest.raises(
        StageError, match=f"returned {returned} for rows 0 to 3 of the stream; it must return 4"
    ):
        list(_numbers().map(function, per="batch"))


@pytest.mark.parametrize(
    "function",
    [
        lambda batch: {"flat": batch["x"].reshape(1, -1)},
        lambda batch: {"x": batch["x"], "kinds": np.unique(batch["x"])[:1]},
        lambda batch: {"total": float(batch["x"].sum())},
    ],
)
def test_a_batch_may_be_flattened_or_summed(function: Callable[..., Any]) -> None:
    assert len(list(_numbers().map(function, per="batch"))) == 5


def _first(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"], "first": batch["x"][0]}


EMPTY_RANKS: dict[str, list[tuple[str, Callable[..., Any]]]] = {
    "arrays": [("batch", lambda batch: {"x": batch["x"] * 2})],
    "lists": [("batch", lambda batch: {"x": batch["x"].tolist()})],
    "a count": [("batch", lambda batch: {"x": batch["x"], "rows": len(batch["x"])})],
    "a sum": [("batch", lambda batch: {"x": batch["x"], "total": np.asarray(batch["x"].sum())})],
    "another type without rows": [("batch", lambda batch: {"x": np.array([2 * x for x in batch["x"]])})],
    "fails without rows": [("batch", lambda batch: {"x": np.stack(list(batch["x"])) - batch["x"][0]})],
    "samples": [("sample", lambda sample: {"x": sample["x"], "name": str(sample["x"])})],
    "samples, then batches": [
        ("sample", lambda sample: {"x": sample["x"] + 1}),
        ("batch", lambda batch: {"x": batch["x"], "rows": len(batch["x"])}),
    ],
    "batches, then samples": [
        ("batch", lambda batch: {"x": batch["x"] * 2.5}),
        ("sample", lambda sample: {"x": sample["x"], "y": np.ones(3)}),
    ],
}


@pytest.mark.parametrize("name", EMPTY_RANKS)
def test_a_rank_without_rows_gets_the_usual_fields_without_rows(name: str) -> None:
    """10 rows on 4 ranks of 2: the last step has two rows, for two of the ranks."""
    found, kinds, steps = [], [], set()
    for rank in range(4):
        data = headrace.from_arrays({"x": np.arange(10, dtype=np.int32)})
        loader = Loader(data, batch_size=2, drop_last=False, rank=rank, world_size=4, shuffle=False)
        for per, function in EMPTY_RANKS[name]:
            loader = loader.map(function, per=per)
        batches = list(loader)
        steps.add(len(batches))
        found += [len(batch["x"]) for batch in batches]
        kinds += [{field: _kind(value) for field, value in batch.items()} for batch in batches]
        for batch in batches:
            assert batch.get("rows", len(batch["x"])) == len(batch["x"])
            assert batch.get("total", sum(batch["x"])) == sum(batch["x"])
    assert steps == {2}
    assert sorted(found) == [0, 0, 1, 1, 2, 2, 2, 2]
    assert all(kind == kinds[0] for kind in kinds)


def _kind(value: Any) -> tuple[Any, ...]:
    return type(value), getattr(value, "dtype", None), tuple(getattr(value, "shape", ()))[1:]


def test_a_function_that_cannot_say_what_no_rows_are_fails_on_all_ranks_at_the_start() -> None:
    for rank in range(4):
        data = headrace.from_arrays({"x": np.arange(10)})
        loader = Loader(data, batch_size=2, drop_last=False, rank=rank, world_size=4)
        with pytest.raises(StageError, match=r"_first.*without rows.*IndexError.*drop_last=True"):
            iter(loader.map(_first, per="batch"))


def test_a_result_that_is_no_dict_is_refused() -> None:
    for per, where in (("sample", "row 0"), ("batch", "rows 0 to 3")):
        with pytest.raises(
            StageError, match=rf"map\(listed\) returned list for {where} .*must return a dict of fields"
        ):
            next(iter(_numbers().map(streams.listed, per=per)))


def test_results_of_different_shapes_or_fields_are_refused_with_the_function() -> None:
    with pytest.raises(
        StageError, match=r"map\(uneven\).*field 'x' of sample 1 has shape \(1,\).*pad or crop"
    ):
        list(_numbers().map(streams.uneven))
    with pytest.raises(StageError, match=r"sample 1 of the batch has the fields"):
        list(_numbers().map(lambda sample: {f"n{sample['number']}": 1}))


def test_a_function_that_hangs_ends_with_a_timeout_that_shows_where() -> None:
    begun, release = threading.Event(), threading.Event()

    def hang(sample: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        release.wait()
        return sample

    batches = iter(_numbers(timeout_seconds=0.3, workers=1).map(hang))
    try:
        assert begun.wait(PATIENCE_SECONDS)
        with pytest.raises(StageTimeoutError, match=r"timeout_seconds=0.3") as caught:
            next(batches)
        assert "in hang" in str(caught.value)
    finally:
        release.set()


@pytest.mark.parametrize("function", [None, 5, "flip"])
def test_what_cannot_be_called_is_refused(function: Any) -> None:
    with pytest.raises(SettingsError, match=r"map\(.*must be a function"):
        _numbers().map(function)


def test_wrong_arguments_of_map_are_refused() -> None:
    with pytest.raises(SettingsError, match="per='row': must be 'sample' or 'batch'"):
        _numbers().map(streams.doubled, per="row")
    for processes in (-1, True, 1.5, "2", None):
        with pytest.raises(SettingsError, match=r"processes=.*: must be 0 \(use threads\) or a number"):
            _numbers().map(streams.doubled, processes=processes)  # type: ignore[arg-type]
