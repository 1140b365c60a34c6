"""A batch as bytes: a pickle of its structure, and beside it the memory of its tensors and arrays.

    {"x": tensor of 4 MB, "names": [...]}  ->  pickle: {"x": buffer 0 as float32 of that shape, "names": [...]}
                                               buffers: [4 MB]

NumPy hands over its memory by itself (pickle protocol 5); tensors learn to here. Whatever else PyTorch can send
to another process (a CUDA tensor, say) goes PyTorch's way.
"""

import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.torch.memory import tensor_in

_MOST_WASTE = 2
"""A tensor that is a part of something larger is sent alone if the whole is so many times its size."""


def pack(batch: Any) -> tuple[bytes, list[memoryview]]:
    """The pickle and the buffers."""
    file, buffers = io.BytesIO(), []  # type: tuple[io.BytesIO, list[memoryview]]

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(buffer.raw())

    BatchPickler(file, pickle.HIGHEST_PROTOCOL, True, keep).dump(batch)
    return file.getvalue(), buffers


def unpack(pickled: Any, buffers: Sequence[NDArray[np.uint8]]) -> Any:
    """The batch again; its tensors and arrays are in the memory of the buffers."""
    return pickle.loads(pickled, buffers=buffers)


class BatchPickler(ForkingPickler):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stored: dict[tuple[int, int], _Stored] = {}

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Tensor and _is_plain(thing):
            # A view that conjugates or negates: PyTorch would send what it is a view of.
            return self._tensor(thing.resolve_conj().resolve_neg())
        if type(thing) is torch.UntypedStorage and thing.device.type == "cpu":
            return _storage, (self._keep(thing),)
        if type(thing) is np.ndarray and not (thing.flags.writeable and thing.dtype.isnative):
            # What arrives may be written to and is in this machine's order of bytes, as with PyTorch.
            own = thing.astype(thing.dtype.newbyteorder("="), order="A")
            return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented

    def _tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        if storage.nbytes() > _MOST_WASTE * tensor.numel() * tensor.element_size():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            storage = tensor.untyped_storage()
        place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _rebuild, (self._keep(storage), tensor.dtype, *place)

    def _keep(self, storage: Any) -> "_Stored":
        """One object for each storage, so that tensors which share memory share it on the other side too."""
        memory = (storage.data_ptr(), storage.nbytes())
        if memory not in self._stored:
            self._stored[memory] = _Stored(storage)
        return self._stored[memory]


def _is_plain(tensor: Tensor) -> bool:
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
    )


class _Stored:
    """A storage's memory, pickled once however many tensors are in it."""

    def __init__(self, storage: Any) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (pickle.PickleBuffer(self._flat),)


def _open(buffer: NDArray[np.uint8]) -> Any:
    return tensor_in(np.asarray(buffer)).untyped_storage()


def _storage(storage: Any) -> Any:
    return storage


def _rebuild(
    storage: Any, dtype: torch.dtype, first: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, first, shape, strides)
