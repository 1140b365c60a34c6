"""Batches of tensors against the arrays of the plain Loader, and the memory they lie in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import SettingsError, StageError
from tests.properties import examples

pytest.importorskip("torch", reason="needs torch")

import torch
from torch import Tensor

import headrace.torch
from headrace.torch import Loader
from headrace.torch import device as device_module
from headrace.torch.device import CudaStreams
from tests.samples import negated

SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 4}


def dataset(documents: int = 80, seed: int = 0) -> headrace.Dataset:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, documents)
    return headrace.from_arrays({"tokens": [rng.integers(1, 99, n).astype(np.uint16) for n in lengths]})


def records() -> headrace.Dataset:
    rows = 11
    return headrace.from_arrays(
        {
            "image": np.arange(rows * 6, dtype=np.uint8).reshape(rows, 2, 3),
            "label": np.arange(rows, dtype=np.uint16) + 65_500,
            "number": np.arange(2**32 - rows, 2**32, dtype=np.uint32),
            "score": np.linspace(0, 1, rows, dtype=np.float32),
            "path": [np.arange(n, dtype=np.int32) for n in range(rows)],
            "name": [str(n).encode() for n in range(rows)],
        }
    )


def assert_same_batches(found: Any, wanted: Any) -> None:
    for batch, plain in zip(found, wanted, strict=True):
        assert isinstance(batch, headrace.Batch)
        assert (batch.info, list(batch)) == (plain.info, list(plain))
        for name, value in plain.items():
            if isinstance(value, np.ndarray):
                assert isinstance(batch[name], Tensor)
                assert batch[name].shape == value.shape
                np.testing.assert_array_equal(batch[name].numpy(), value, err_msg=name)
            else:
                assert type(batch[name]) is type(value)
                assert batch[name] == value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": "windows", "shuffle": "none", "dtype": "int32"},
        {"packing": "pad", "labels": "unshifted", "drop_last": False, "epochs": 2},
        {"cu_seqlens": "row", "max_documents": 20, "prefetch": 0},
        {"drop_last": False, "rank": 0, "world_size": 7},
        {"fields": ["tokens", "loss_mask"], "workers": 1, "rank": 1, "world_size": 2},
    ],
)
def test_batches_are_those_of_the_plain_loader_as_tensors(options: dict[str, Any]) -> None:
    data = dataset()
    loader, plain = Loader(data, **SIZES, **options), headrace.Loader(data, **SIZES, **options)
    assert len(loader) == len(plain)
    assert repr(loader) == repr(plain)
    if options.get("dtype") is None:
        assert next(iter(Loader(data, **SIZES, **options)))["tokens"].dtype == torch.int64
    assert_same_batches(loader, plain)
    assert_same_batches(loader, plain)  # and the next pass
    assert loader.state_dict() == plain.state_dict()
    assert (loader.rows_seen, loader.epoch) == (plain.rows_seen, plain.epoch)
    assert loader.report() == plain.report()


def test_token_batches_have_the_types_that_kernels_want() -> None:
    batch = next(iter(Loader(dataset(), **SIZES)))
    assert {name: value.dtype for name, value in batch.items() if isinstance(value, Tensor)} == {
        **dict.fromkeys(("tokens", "labels", "position_ids"), torch.int64),
        **dict.fromkeys(("segment_ids", "cu_seqlens"), torch.int32),
        "loss_mask": torch.bool,
    }
    assert type(batch.max_seqlen) is int


def test_dtype_may_be_one_of_torch() -> None:
    assert next(iter(Loader(dataset(), **SIZES, dtype=torch.int32))).tokens.dtype is torch.int32


@pytest.mark.parametrize("drop_last", [True, False])
def test_records_are_those_of_the_plain_loader(drop_last: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "drop_last": drop_last}
    assert_same_batches(Loader(records(), **options), headrace.Loader(records(), **options))
    batch = next(iter(Loader(records(), **options)))
    assert (batch.label.dtype, batch.number.dtype) == (torch.int32, torch.int64)
    assert (batch.image.dtype, batch.image.shape) == (torch.uint8, (4, 2, 3))
    assert all(type(name) is bytes for name in batch["name"])
    assert batch.path_offsets.dtype is torch.int64


def test_any_map_style_data_can_be_loaded() -> None:
    squares = [(float(number), number**2) for number in range(10)]
    found = list(Loader(squares, batch_size=5, shuffle="none"))
    assert found[1].field1.tolist() == [25, 36, 49, 64, 81]


# Memory


def test_nothing_is_copied_and_tensors_can_be_written_to() -> None:
    seen: list[int] = []

    def remember(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(batch["tokens"].ctypes.data)
        return batch

    loader = Loader(dataset(), **SIZES, prefetch=0).map(remember, per="batch")
    for batch in loader:
        assert batch.tokens.data_ptr() == seen[-1]
        batch.tokens.add_(1)
        batch.loss_mask.fill_(False)


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda tensor: tensor,
    "a row of it": lambda tensor: tensor[1],
    "a reshaped view": lambda tensor: tensor.view(-1)[3:],
    "its array": lambda tensor: tensor.numpy(),
    "a part of its array": lambda tensor: tensor.numpy()[2:],
    "a tensor of its array": lambda tensor: torch.from_numpy(tensor.numpy()[1:]),
    "a detached one": lambda tensor: tensor.detach().t(),
    "its storage": lambda tensor: torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage()),
}


@pytest.mark.parametrize("what", HOLDS)
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 3, "workers": 1}])
def test_memory_is_not_filled_again_while_someone_holds(what: str, options: dict[str, Any]) -> None:
    held, copies = [], []
    for batch in Loader(dataset(), **SIZES, **options):
        part = HOLDS[what](batch.tokens)
        held.append(part)
        copies.append(np.asarray(part).copy())
    assert len(held) > 10
    for part, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(np.asarray(part), copy)


@examples(25)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=60, max_size=60))
def test_tensors_may_be_held_for_any_time(plan: list[tuple[bool, int]]) -> None:
    wanted = [batch["labels"].copy() for batch in headrace.Loader(dataset(), **SIZES, epochs=3)]
    held: list[tuple[int, int, Tensor]] = []
    loader = Loader(dataset(), **SIZES, epochs=3, prefetch=2, workers=1)
    for (number, batch), (keeps, steps) in zip(enumerate(loader), plan, strict=False):
        if keeps:
            held.append((number + steps, number, batch.labels))
        for _, which, tensor in held:
            np.testing.assert_array_equal(tensor.numpy(), wanted[which])
        held = [entry for entry in held if entry[0] > number]


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    places = set()
    for batch in Loader(dataset(), **SIZES, epochs=4, prefetch=0):
        places.add(batch.tokens.data_ptr())
        del batch
    assert len(places) == 1


def test_batches_move_to_a_device_as_a_whole() -> None:
    batch = next(iter(Loader(dataset(), **SIZES)))
    moved = batch.to("meta", non_blocking=True)
    assert isinstance(moved, headrace.Batch)
    assert moved.info == batch.info
    assert {value.device.type for value in moved.values() if isinstance(value, Tensor)} == {"meta"}
    assert moved.max_seqlen == batch.max_seqlen
    assert batch.to("cpu").tokens is batch.tokens


def test_the_forms_of_trainers_hold_tensors() -> None:
    batch = next(iter(Loader(dataset(), **SIZES)))
    plain = next(iter(headrace.Loader(dataset(), **SIZES)))
    for form in ("as_huggingface", "as_flash_attention", "as_megatron"):
        for name, value in getattr(plain, form)().items():
            found = getattr(batch, form)()[name]
            assert isinstance(found, Tensor) == isinstance(value, np.ndarray)
            np.testing.assert_array_equal(np.asarray(found), value)


# The contract of the plain Loader


def test_a_state_goes_from_one_loader_to_the_other() -> None:
    data = dataset()
    for step in range(0, len(Loader(data, **SIZES)) + 1, 3):
        loader, plain = Loader(data, **SIZES), headrace.Loader(data, **SIZES)
        for _ in zip(range(step), loader, strict=False):
            pass
        plain.load_state_dict(loader.state_dict())
        again = Loader(data, **SIZES)
        again.load_state_dict(loader.state_dict())
        assert_same_batches(again, plain)


def test_mixtures_can_be_reweighted() -> None:
    mixed = headrace.mix({"web": (dataset(seed=1), 0.7), "code": (dataset(seed=2), 0.3)})
    loaders = Loader(mixed, **SIZES), headrace.Loader(mixed, **SIZES)
    for loader in loaders:
        for _ in zip(range(3), loader, strict=False):
            pass
        loader.reweight({"web": 1, "code": 1})
    assert_same_batches(*loaders)


def _as_tensor_sample(sample: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(sample["tokens"], np.ndarray)
    return {"tokens": torch.from_numpy(sample["tokens"]) + 1}


def _as_tensor_batch(batch: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(batch["tokens"], np.ndarray)
    return {"tokens": torch.from_numpy(batch["tokens"]) + 1, "half": torch.ones(2, dtype=torch.bfloat16)}


@pytest.mark.parametrize(("function", "per"), [(_as_tensor_sample, "sample"), (_as_tensor_batch, "batch")])
def test_functions_get_arrays_and_may_give_tensors(function: Callable[..., Any], per: str) -> None:
    mapped = Loader(dataset(), **SIZES).map(function, per=per)
    assert isinstance(mapped, Loader)
    for batch, plain in zip(mapped, headrace.Loader(dataset(), **SIZES), strict=True):
        np.testing.assert_array_equal(batch.tokens.numpy(), plain["tokens"] + 1)
        if per == "batch":
            assert batch.half.dtype is torch.bfloat16


def test_functions_may_run_in_worker_processes() -> None:
    held = list(Loader(dataset(), **SIZES).map(negated, processes=1))
    for batch, plain in zip(held, headrace.Loader(dataset(), **SIZES), strict=True):
        np.testing.assert_array_equal(batch.tokens.numpy(), -plain["tokens"])
        batch.tokens.add_(1)


def test_a_failing_function_is_named() -> None:
    def divide(sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": sample["tokens"] * (1 // 0)}

    with pytest.raises(StageError, match="divide"):
        list(Loader(dataset(), **SIZES).map(divide))


def test_unknown_settings_are_named() -> None:
    with pytest.raises(SettingsError, match="pin_memory: a Loader has no such setting"):
        Loader(dataset(), **{**SIZES, "pin_memory": True})


# Devices


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu_is_the_default(device: Any) -> None:
    loader = Loader(dataset(), **SIZES, device=device)
    assert loader.device.type == "cpu"
    assert next(iter(loader)).tokens.device == torch.device("cpu")


def test_devices_without_streams_get_plain_copies() -> None:
    loader = Loader(dataset(), **SIZES, device="meta")
    batches = list(loader)
    assert len(batches) == len(loader)
    assert batches[0].tokens.device.type == "meta"
    assert type(batches[0].max_seqlen) is int


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_cuda_that_is_not_there_is_an_error_that_says_what_is(device: Any) -> None:
    with pytest.raises(
        SettingsError, match=f"device='{device}': torch {torch.__version__[:4]}.* leave device out"
    ):
        Loader(dataset(), **SIZES, device=device)


@pytest.mark.parametrize("device", ["gpu", 1.5, "cuda:x"])
def test_nonsense_is_no_device(device: Any) -> None:
    with pytest.raises(SettingsError, match="must be a device such as 'cpu'"):
        Loader(dataset(), **SIZES, device=device)


def test_a_device_number_that_is_too_high_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingsError, match="device='cuda:2': the number of CUDA devices is 2"):
        Loader(dataset(), **SIZES, device="cuda:2")


def test_cuda_loaders_take_page_locked_memory_and_copy_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    loader: Any = Loader(dataset(), **SIZES, device="cuda:1")
    delivery = loader.delivery
    assert isinstance(delivery.streams, CudaStreams)
    assert delivery.allocate == delivery.streams.allocate
    assert loader.map(negated).delivery is delivery
    monkeypatch.setattr(device_module, "CopyAhead", lambda batches, streams: (batches, streams))
    batches: Any = object()
    assert delivery.deliver(batches) == (batches, delivery.streams)


# The package


def test_the_exported_names_are_these() -> None:
    assert headrace.torch.__all__ == [
        "DataLoader",
        "Loader",
        "RemoteLoader",
        "RowDataset",
        "attention_mask",
        "block_mask",
        "mask_from_segments",
        "mask_mod_from_segments",
        "segments_from_tokens",
    ]
    assert all(hasattr(headrace.torch, name) for name in headrace.torch.__all__)


def test_datasets_on_disk_load_too(tmp_path: Path, write_dataset: Callable[..., Any]) -> None:
    rows = [[{"tokens": list(range(1, n + 2))} for n in range(part, part + 30)] for part in (0, 30)]
    write_dataset(tmp_path / "data", {"tokens": "uint16[*]"}, rows)
    assert_same_batches(Loader(tmp_path / "data", **SIZES), headrace.Loader(str(tmp_path / "data"), **SIZES))
