"""Batches on a real CUDA device, end to end."""

from typing import Any

import numpy as np
import pytest

import headrace

pytest.importorskip("torch", reason="needs torch")

import torch
from torch import Tensor

from headrace.torch import DataLoader, Loader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES: dict[str, Any] = {"seq_len": 512, "batch_size": 16}


def dataset(documents: int = 4000) -> headrace.Dataset:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 700, documents)
    return headrace.from_arrays({"tokens": [rng.integers(1, 9999, n).astype(np.uint16) for n in lengths]})


def assert_same(batch: Any, plain: Any) -> None:
    assert batch.info == plain.info
    for name, value in plain.items():
        if isinstance(value, np.ndarray):
            assert batch[name].device.type == "cuda"
            np.testing.assert_array_equal(batch[name].cpu().numpy(), value, err_msg=name)
        else:
            assert batch[name] == value


@pytest.mark.parametrize("prefetch", [0, 2, None])
def test_batches_on_the_device_are_those_of_the_plain_loader(prefetch: int | None) -> None:
    data = dataset()
    loader = Loader(data, **SIZES, device="cuda", prefetch=prefetch)
    for batch, plain in zip(loader, headrace.Loader(data, **SIZES), strict=True):
        assert_same(batch, plain)


def test_a_busy_device_does_not_read_a_buffer_that_is_filled_again() -> None:
    """Kernels queue up, the host runs ahead, batches are dropped at once: sums of what kernels read must be right."""
    data = dataset()
    wanted = [int(batch["tokens"].sum()) for batch in headrace.Loader(data, **SIZES)]
    sums = []
    for batch in Loader(data, **SIZES, device="cuda", prefetch=1, workers=1):
        torch.cuda._sleep(5_000_000)
        sums.append(batch.tokens.sum())
        del batch
    assert torch.stack(sums).tolist() == wanted


def test_a_consumer_on_a_stream_of_its_own_reads_what_was_copied() -> None:
    data = dataset()
    wanted = [int(batch["tokens"].sum()) for batch in headrace.Loader(data, **SIZES)]
    sums = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch in Loader(data, **SIZES, device="cuda"):
            sums.append(batch.tokens.sum())
        found = torch.stack(sums).tolist()
    assert found == wanted


def test_host_buffers_are_page_locked() -> None:
    loader: Any = Loader(dataset(), **SIZES, device="cuda")
    owner = loader.delivery.allocate(4096)
    assert torch.from_numpy(owner[64:128]).is_pinned()


def test_handing_out_a_batch_does_not_wait_for_the_device() -> None:
    iteration = iter(Loader(dataset(), **SIZES, device="cuda", prefetch=4))
    for _ in range(10):
        next(iteration)  # until all memory is there: to allocate it may wait
        torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    next(iteration)
    assert not busy.query()
    torch.cuda.synchronize()


def test_device_memory_does_not_grow_over_passes() -> None:
    loader = Loader(dataset(), **SIZES, device="cuda")
    for _ in loader:
        pass
    torch.cuda.synchronize()
    first = torch.cuda.memory_reserved()
    for _ in range(3):
        for batch in loader:
            assert isinstance(batch.tokens, Tensor)
    assert torch.cuda.memory_reserved() <= first + 4 * 2**20


def test_a_state_is_exact_although_a_batch_is_ahead() -> None:
    data = dataset()
    loader, plain = Loader(data, **SIZES, device="cuda"), headrace.Loader(data, **SIZES)
    for _ in zip(range(5), loader, strict=False):
        pass
    plain.load_state_dict(loader.state_dict())
    again = Loader(data, **SIZES, device="cuda")
    again.load_state_dict(loader.state_dict())
    assert again.state_dict()["position"] == 5 * SIZES["batch_size"]
    for batch, wanted in zip(again, plain, strict=True):
        assert_same(batch, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one() -> None:
    data = dataset()
    for batch, plain in zip(
        Loader(data, **SIZES, device="cuda:1"), headrace.Loader(data, **SIZES), strict=True
    ):
        assert batch.tokens.device == torch.device("cuda", 1)
        assert_same(batch, plain)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_kind": "thread"}])
def test_the_drop_in_dataloader_pins(options: dict[str, Any]) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(100))
    for (batch,) in DataLoader(dataset, batch_size=10, pin_memory=True, **options):
        assert batch.is_pinned()
        assert batch.to("cuda", non_blocking=True).sum() == batch.sum()
