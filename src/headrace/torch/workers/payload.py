"""What spawned workers are sent: pickled once for all of them, not once for each.

The pickle lies in a file in memory that every worker maps. Arrays and tensors of the dataset lie beside it, and are
used where they are: the workers share their pages, until one writes to them, which then gets a copy of that page.
Tensors that the user has put into shared memory are sent as such, and stay shared.
"""

import io
import os
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.store.maps import map_memory
from headrace.torch.workers import parcels
from headrace.workers import wire


class Sealed:
    """A value on its way to processes that are started by spawn or forkserver: there, call it."""

    def __init__(self, descriptor: int, places: list[tuple[int, int]], shared: list[tuple[int, int]]) -> None:
        """A file, where in it the pickle and the buffers are, and memory that is shared."""
        self._descriptor, self._places, self._shared = descriptor, places, shared

    def close(self) -> None:
        os.close(self._descriptor)

    def __call__(self) -> Any:
        """The value, in a process that it was sent to."""
        # Private: what one worker writes, no other sees.
        mapped = map_memory(self._descriptor, os.fstat(self._descriptor).st_size, private=True)
        self.close()
        whole = np.frombuffer(mapped, np.uint8)
        (first, size), *others = self._places
        buffers = [whole[at : at + length] for at, length in others]
        for descriptor, length in self._shared:
            _arriving.storages.append(torch.UntypedStorage._new_shared_fd_cpu(descriptor, length))
            os.close(descriptor)
        try:
            return parcels.unpack(whole[first : first + size].data, buffers)
        finally:
            _arriving.storages = []

    def __reduce__(self) -> tuple[Any, ...]:
        # Only while a process is started: its descriptors go with it.
        shared = [(reduction.DupFd(descriptor), size) for descriptor, size in self._shared]
        return _arrive, (reduction.DupFd(self._descriptor), self._places, shared)


def _arrive(file: Any, places: list[tuple[int, int]], shared: list[tuple[Any, int]]) -> "Sealed":
    return Sealed(file.detach(), places, [(each.detach(), size) for each, size in shared])


class _Arriving:
    """While a value is opened: the memory that it shares."""

    def __init__(self) -> None:
        self.storages: list[Any] = []


_arriving = _Arriving()


def seal(value: Any) -> Sealed | None:
    """None if it cannot be pickled once for all: then it must be pickled for each process as that is started.

    That is so with locks, queues and pipes of multiprocessing and with CUDA tensors, which are handed to one
    process at a time; and with what cannot be pickled at all, as will show then.
    """
    try:
        pickled, buffers, shared = _pack(value)
    except Exception:
        return None
    descriptor, places, at = wire.anonymous_file(), [], 0
    try:
        with open(descriptor, "wb", closefd=False) as file:
            for content in [memoryview(pickled), *buffers]:
                file.seek(at)
                file.write(content)
                places.append((at, len(content)))
                at = wire.round_up(at + len(content))
            file.truncate(max(at, 1))
    except OSError:
        os.close(descriptor)
        return None
    return Sealed(descriptor, places, shared)


def _pack(value: Any) -> tuple[bytes, list[memoryview], list[tuple[int, int]]]:
    file, buffers = io.BytesIO(), []  # type: tuple[io.BytesIO, list[memoryview]]

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(buffer.raw())

    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL, True, keep)
    pickler.dump(value)
    return file.getvalue(), buffers, pickler.shared


class _Pickler(parcels.BatchPickler):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shared: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor) and thing.device.type not in ("cpu", "meta"):
            raise pickle.PicklingError("a tensor on a device goes to one process at a time")
        if isinstance(thing, torch.UntypedStorage) and thing.is_shared():
            return self._share(thing)
        if isinstance(thing, Tensor) and thing.layout is torch.strided and thing.is_shared():
            # PyTorch's way, which comes back here with the storage.
            return NotImplemented
        if type(thing) is np.ndarray:
            # Not copied even if it is read-only, as it is then in a fork too: it may be all of the data.
            return NotImplemented
        return super().reducer_override(thing)

    def _share(self, storage: Any) -> tuple[Callable[[int], Any], tuple[int]]:
        if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
            raise pickle.PicklingError("a tensor is shared by the name of a file")
        address = storage.data_ptr()
        if address not in self._numbers:
            self._numbers[address] = len(self.shared)
            self.shared.append(storage._share_fd_cpu_())
        return _shared_storage, (self._numbers[address],)


def _shared_storage(number: int) -> Any:
    return _arriving.storages[number]
