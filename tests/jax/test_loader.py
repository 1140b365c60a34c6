"""JAX batches against those of `headrace.Loader`, on one device."""

import json
from collections.abc import Collection
from itertools import islice
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import StageError

pytest.importorskip("jax", reason="needs jax")

import jax
import jax.numpy as jnp

import headrace.jax
from headrace.jax.loader import PutAhead
from tests.jax.contents import FIXED_SHAPE, contents, one_device_sharding

# Batches


def test_batches_are_those_of_the_host_loader_as_jax_arrays_of_int32(dataset: str) -> None:
    batches = list(headrace.jax.Loader(dataset, seq_len=16, batch_size=4))
    host = list(headrace.Loader(dataset, seq_len=16, batch_size=4, fields=FIXED_SHAPE))
    assert contents(batches) == contents(host)
    assert [batch.info for batch in batches] == [batch.info for batch in host]
    assert all(isinstance(array, jax.Array) for array in batches[0].values())
    assert {name: str(array.dtype) for name, array in batches[0].items()} == {
        "tokens": "int32",
        "labels": "int32",
        "position_ids": "int32",
        "segment_ids": "int32",
        "loss_mask": "bool",
    }


def test_a_jitted_function_takes_batches_and_compiles_once(dataset: str) -> None:
    traces = []

    def step(batch: headrace.Batch) -> tuple[Any, headrace.Batch]:
        traces.append(batch.info)
        return (batch.tokens * batch.loss_mask).sum(), batch

    loader = headrace.jax.Loader(dataset, seq_len=16, batch_size=4, max_documents=40, pad_id=0)
    compiled = jax.jit(step)
    for batch in loader:
        result, same = compiled(batch)
        assert result == (np.asarray(batch.tokens) * np.asarray(batch.loss_mask)).sum()
        assert isinstance(batch.max_seqlen, int)
        assert contents([same])[0] == contents([batch])[0]
        assert (same.info.position, same.info.labels) == (-1, "shifted")
    assert len(traces) == 1


def test_bounds_are_left_out_unless_something_asks_for_them(dataset: str) -> None:
    def fields(**options: Any) -> set[str]:
        return set(next(iter(headrace.jax.Loader(dataset, seq_len=16, batch_size=4, **options))))

    every = {*FIXED_SHAPE, "cu_seqlens", "max_seqlen"}
    assert fields() == set(FIXED_SHAPE)
    assert fields(max_documents=40) == fields(cu_seqlens="batch") == every
    assert fields(fields=["tokens", "cu_seqlens"]) == {"tokens", "cu_seqlens"}
    sharding = one_device_sharding()
    assert fields(sharding=sharding) == set(FIXED_SHAPE)
    assert fields(sharding=sharding, cu_seqlens="row", max_documents=17) == every


def test_the_forms_for_trainers_work_on_jax_arrays(dataset: str) -> None:
    options: dict[str, Any] = {"seq_len": 16, "batch_size": 4, "cu_seqlens": "batch", "dtype": "int32"}
    batch = next(iter(headrace.jax.Loader(dataset, **options)))
    host = next(iter(headrace.Loader(dataset, **options)))
    for form in ("as_huggingface", "as_flash_attention", "as_megatron"):
        assert contents([getattr(batch, form)()]) == contents([getattr(host, form)()])


# Memory that is used again


def test_kept_batches_never_change(dataset: str) -> None:
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "epochs": 40}
    wanted = [batch.tokens.copy() for batch in headrace.Loader(dataset, **options)]
    kept = list(headrace.jax.Loader(dataset, prefetch=2, **options))
    views = [batch.tokens[1:3] for batch in headrace.jax.Loader(dataset, prefetch=2, **options)]
    for host, batch, view in zip(wanted, kept, views, strict=True):
        assert np.array_equal(host, batch.tokens)
        assert np.array_equal(host[1:3], view)


def test_kept_batches_of_worker_processes_never_change(dataset: str) -> None:
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "epochs": 8, "fields": ["tokens"]}
    wanted = contents(headrace.Loader(dataset, **options))
    loader = headrace.jax.Loader(dataset, prefetch=2, **options).map(dict, per="batch", processes=1)
    assert contents(list(loader)) == wanted


@pytest.mark.parametrize("how", ["dropped", "deleted", "donated"])
def test_memory_is_used_again_but_never_under_a_computation(dataset: str, how: str) -> None:
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "epochs": 40, "dtype": "int32"}
    wanted = [(batch.tokens * 2).tolist() for batch in headrace.Loader(dataset, **options)]

    def slow_double(tokens: Any) -> Any:
        return jax.lax.fori_loop(0, 50, lambda _, x: jnp.sort(x, axis=1), tokens) * 0 + tokens * 2

    double = jax.jit(slow_double, donate_argnums=(0,) if how == "donated" else ())
    results, places = [], set()
    for batch in headrace.jax.Loader(dataset, prefetch=2, fields="tokens", **options):
        tokens = batch.tokens
        places.add(tokens.unsafe_buffer_pointer())
        results.append(double(tokens))
        if how == "deleted":
            tokens.delete()
        del tokens, batch
    assert [np.asarray(result).tolist() for result in results] == wanted
    assert len(places) < len(wanted)


# The stream


class HostBatches:
    """Ten batches, of which those with some numbers are late: not on the host before they are waited for."""

    def __init__(self, late: Collection[int]) -> None:
        self.taken, self._late = 0, late

    def __next__(self) -> dict[str, Any]:
        if self.taken == 10:
            raise StopIteration
        self.taken += 1
        return {"x": np.full(2, self.taken - 1)}

    def is_ready(self) -> bool:
        return self.taken not in self._late

    def close(self) -> None:
        pass


def test_a_batch_is_put_ahead_if_it_is_there_and_never_waited_for() -> None:
    host = HostBatches(late=(3, 7))
    batches = PutAhead(host, None, 2)
    for handed in range(10):
        assert next(batches)["x"].tolist() == [handed, handed]
        # One more was taken, unless that would have meant to wait for it.
        assert host.taken == min(10, handed + (1 if handed + 1 in (3, 7) else 2))
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_state_is_that_of_the_batch_handed_out(dataset: str, prefetch: int) -> None:
    loader = headrace.jax.Loader(dataset, seq_len=16, batch_size=4, prefetch=prefetch)
    plain = headrace.Loader(dataset, seq_len=16, batch_size=4)
    iterator, host = iter(loader), iter(plain)
    for handed in range(1, 6):
        next(iterator), next(host)
        assert loader.state_dict()["position"] == plain.state_dict()["position"] == 4 * handed


def test_it_resumes_at_every_step(dataset: str) -> None:
    def make() -> headrace.jax.Loader:
        return headrace.jax.Loader(dataset, seq_len=16, batch_size=4, epochs=2)

    everything = contents(make())
    loader = make()
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader]
    next_pass = contents(loader)
    for step, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        rest = everything[step:] or next_pass
        assert len(resumed) == len(rest)
        assert contents(resumed) == rest


def test_passes_end_and_begin_as_those_of_the_host_loader(dataset: str) -> None:
    loader = headrace.jax.Loader(dataset, seq_len=16, batch_size=4)
    host = headrace.Loader(dataset, seq_len=16, batch_size=4, fields=FIXED_SHAPE)
    for _ in range(2):
        assert contents(islice(loader, 3)) == contents(islice(host, 3))
        assert contents(loader) == contents(host)
        assert loader.state_dict() == host.state_dict()
    assert (loader.epoch, loader.rows_seen, loader.report()) == (host.epoch, host.rows_seen, host.report())


def test_mixtures_can_be_reweighted(dataset: str) -> None:
    def make(kind: Any) -> Any:
        mixture = headrace.mix({"a": (dataset, 0.5), "b": (dataset, 0.5)})
        return kind(mixture, seq_len=16, batch_size=4, fields=["tokens"])

    both = []
    for kind in (headrace.jax.Loader, headrace.Loader):
        loader = make(kind)
        batches = contents(islice(loader, 3))
        loader.reweight({"a": 1, "b": 9})
        both.append([*batches, *contents(loader)])
    assert both[0] == both[1]


def test_an_error_comes_after_the_batches_before_it(dataset: str) -> None:
    def fail_late(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
        seen.append(1)
        if len(seen) == 4:
            raise ValueError("not this one")
        return batch

    seen: list[int] = []
    loader = headrace.jax.Loader(dataset, seq_len=16, batch_size=4, prefetch=0).map(fail_late, per="batch")
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(StageError, match="not this one"):
        next(iterator)
    assert loader.state_dict()["position"] == 12
    assert list(iterator) == []


def test_an_interrupted_iteration_gives_no_batch_in_the_wrong_place(dataset: str) -> None:
    def interrupt(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return batch

    seen: list[int] = []
    loader = headrace.jax.Loader(dataset, seq_len=16, batch_size=4, prefetch=0).map(interrupt, per="batch")
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == []
    assert loader.state_dict()["position"] == 12


def test_copies_to_the_devices_are_counted(dataset: str) -> None:
    loader = headrace.jax.Loader(dataset, seq_len=16, batch_size=2)
    count = sum(1 for _ in loader)
    assert loader.stats().batches == count
    assert loader.stats().stages["copy"].count == count
