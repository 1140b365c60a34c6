"""The calls of torch.cuda, as far as they can be checked without a device."""

import gc
import pickle
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="needs torch")

import torch
from torch import Tensor

from headrace.torch.device import CudaStreams


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.cuda's names with their signatures, and nothing behind them."""
    names = ("Stream", "Event", "current_stream", "stream")
    recorder = mock.Mock()
    for name in names:
        fake = mock.create_autospec(getattr(torch.cuda, name))
        recorder.attach_mock(fake, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    side = recorder.Stream.return_value
    side.device = torch.device("cpu")
    return recorder


def test_the_cuda_calls_are_those_of_torch(cuda: Any) -> None:
    streams = CudaStreams(torch.device("cuda", 1))
    assert cuda.mock_calls == []  # nothing is touched before the first batch
    side, current = cuda.Stream.return_value, cuda.current_stream.return_value
    assert streams.beside() is cuda.stream.return_value
    cuda.stream.assert_called_once_with(side)
    cuda.Stream.assert_called_once_with(torch.device("cuda", 1))
    event: Any = streams.mark()
    assert event is cuda.Event.return_value
    side.record_event.assert_called_once_with(event)
    streams.wait(event)
    cuda.current_stream.assert_called_with(side.device)
    current.wait_event.assert_called_once_with(event)
    streams.beside()
    assert cuda.Stream.call_count == 1  # one stream for all passes


def test_cuda_tensors_are_copied_without_waiting_and_recorded(cuda: Any) -> None:
    streams, tensor = CudaStreams(torch.device("cuda")), mock.create_autospec(Tensor, instance=True)
    assert streams.copy(tensor) is tensor.to.return_value
    tensor.to.assert_called_once_with(cuda.Stream.return_value.device, non_blocking=True)
    streams.keep(tensor)
    tensor.record_stream.assert_called_once_with(cuda.current_stream.return_value)


@pytest.mark.parametrize(
    ("where", "pinned", "copies"), [("cpu", True, 0), ("cpu", False, 1), ("cuda", False, 0)]
)
def test_only_memory_of_the_host_that_is_not_page_locked_is_staged(
    where: str, pinned: bool, copies: int
) -> None:
    tensor = mock.create_autospec(Tensor, instance=True)
    tensor.device = torch.device(where)
    tensor.is_pinned.return_value = pinned
    result = CudaStreams(torch.device("cuda")).pin(tensor)
    assert tensor.pin_memory.call_count == copies
    assert result is (tensor.pin_memory.return_value if copies else tensor)


def test_page_locked_memory_lives_as_long_as_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    made: list[weakref.ref[Any]] = []
    empty = torch.empty

    def allocate(count: int, **options: Any) -> Tensor:
        asked.append(dict(options))
        tensor = empty(count, dtype=options["dtype"], device=options["device"])
        made.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(torch, "empty", allocate)
    owner = CudaStreams(torch.device("cuda")).allocate(1024)
    assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]
    assert (owner.dtype, owner.shape) == (np.dtype(np.uint8), (1024,))
    owner[:] = 7
    view: NDArray[Any] = np.ndarray((4,), np.int64, owner, 64)
    owner_gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert owner_gone() is not None
    assert view.tobytes() == bytes([7] * 32)


def test_streams_can_be_sent_to_another_process() -> None:
    streams = pickle.loads(pickle.dumps(CudaStreams(torch.device("cuda", 1))))
    assert streams._device == torch.device("cuda", 1)
