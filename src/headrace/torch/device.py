"""Tensors, and how they get to a device: copied in parallel with the training step, one batch ahead.

While the step runs on batch k, batch k + 1 is being copied, if it was on the host in time. With three batches, time
runs down the page:

    side stream            host                                     consumer's stream
    copy 0, event 0
    copy 1, event 1        hand out batch 0: wait for event 0  ->   step on batch 0
    copy 2, event 2        hand out batch 1: wait for event 1  ->   step on batch 1
                           hand out batch 2: wait for event 2  ->   step on batch 2

The host waits for none of this. Three rules keep memory valid:

- The consumer's stream waits for the copy's event, so no kernel reads what is not there yet.
- The tensors belong to the side stream, where they were allocated. `record_stream` tells the caching allocator that
  the consumer's stream uses them too: once they are dropped, their memory is not given to a later copy
  before the kernels that were queued by then have run.
- Host memory that is being copied from is held until the copy's event has completed. PyTorch guards only page-locked
  tensors that it knows by their storage; ours are parts of a buffer that is filled again as soon as nobody holds it.

There is one side stream per Loader, not one per pass, because the allocator keeps a cache for every stream.
"""

import contextlib
import threading
import weakref
from collections import deque
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import SettingsError
from headrace.load.delivery import Delivery
from headrace.load.sources import Batches
from headrace.observe.counting import now, spent
from headrace.rows.fields import Fields, late_fields, made_names, names_of
from headrace.torch.memory import tensor_in

_WIDER = {np.dtype("uint16"): np.int32, np.dtype("uint32"): np.int64}
"""PyTorch supports few operations on these types; all their values fit into the signed ones."""
_AS_THEY_ARE = frozenset(map(np.dtype, ("int64", "int32", "bool", "uint8", "float32", "float64")))
"""Types of most arrays, which need no further checks."""


class Event(Protocol):
    """A mark in a stream."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Streams(Protocol):
    """What an accelerator with streams must offer."""

    def allocate(self, count: int) -> NDArray[np.uint8]:
        """Page-locked memory, which lives as long as the array or a view of it."""

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor itself if its memory is page-locked, else a copy of it that is."""

    def beside(self) -> AbstractContextManager[Any]:
        """Operations inside this block go to the side stream."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the device, on the stream in force."""

    def mark(self) -> Event:
        """An event that completes when everything on the side stream has completed."""

    def wait(self, event: Event) -> None:
        """Let the consumer's stream wait for the event."""

    def keep(self, tensor: Tensor) -> None:
        """Tell the allocator that the consumer's stream uses the tensor."""


class CudaStreams:
    """The streams of `torch.cuda`. They are created with the first batch, so that `torch.cuda.set_device` may still be
    called after creating the Loader.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _side(self) -> Any:
        return torch.cuda.Stream(self._device)

    @property
    def _current(self) -> Any:
        return torch.cuda.current_stream(self._side.device)

    def allocate(self, count: int) -> NDArray[np.uint8]:
        # On the CPU, even if the user has set another default device.
        owner: NDArray[np.uint8] = torch.empty(
            count, dtype=torch.uint8, device="cpu", pin_memory=True
        ).numpy()
        return owner

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()

    def beside(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return context

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._side.device, non_blocking=True)

    def mark(self) -> Event:
        event: Event = torch.cuda.Event()
        self._side.record_event(event)
        return event

    def wait(self, event: Event) -> None:
        self._current.wait_event(event)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._current)

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaStreams, (self._device,)


class ToDevice(Delivery):
    """Tensors on a device; `streams` make the copies, if the device has any."""

    # On the CPU a tensor is made when it is asked for: that takes microseconds, and a batch may have seven fields.
    convert = staticmethod(lambda value: as_tensor(value))

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self.streams = CudaStreams(device) if streams is None and device.type == "cuda" else streams
        self.allocate = None if self.streams is None else self.streams.allocate

    def deliver(self, batches: Batches) -> Batches:
        if self.streams is not None:
            return CopyAhead(batches, self.streams)
        return batches if self._device.type == "cpu" else Tensors(batches, self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return ToDevice, (self._device, self.streams)


class CopyAhead:
    """Batches on the device: when one is handed out, the copy of the next has begun if that is ready on the host.

    If it is not, nothing waits for it: its copy begins when it is due. An error in making it is raised when it is due,
    after the previous batch. A field that was not made ahead is copied on first access.
    """

    def __init__(self, batches: Batches, streams: Streams) -> None:
        self._batches, self._copies = batches, _Copies(streams)
        self._over = False
        self._ahead: tuple[dict[str, Any], Event] | Exception | None = None
        self._finalizer = weakref.finalize(self, self._copies.settle)

    def __next__(self) -> dict[str, Any]:
        if self._over:
            raise StopIteration
        self._copies.let_go()
        ahead, self._ahead = self._ahead, None
        due = self._begin_next() if ahead is None else ahead
        if isinstance(due, Exception):
            self.close()
            raise due
        fields, event = due
        # Before the step is queued, so that the copy runs beside it.
        if self._batches.is_ready():
            self._ahead = self._begin_next()
        self._copies.hand_over(fields, event)
        return fields

    def is_ready(self) -> bool:
        return self._ahead is not None or self._batches.is_ready()

    def close(self) -> None:
        """Stop what makes batches, and wait for the copy under way."""
        self._over, self._ahead = True, None
        self._batches.close()
        self._copies.settle()

    def _begin_next(self) -> tuple[dict[str, Any], Event] | Exception:
        try:
            host = next(self._batches)
            copied, event = self._copies.begin({name: as_tensor(host[name]) for name in made_names(host)})
            late = late_fields(host)
            if late is not None:
                copied = Fields(names_of(host), partial(self._copies.copy_late, late), copied)
            return copied, event
        except Exception as error:
            # Includes the end of the pass.
            return error
        except BaseException:
            # Ctrl-C: a batch may be lost, and the next ones would be handed out in the wrong place.
            self.close()
            raise


class _Copies:
    """Copies to the device, and the host memory that they read from."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._under_way: deque[tuple[Event, dict[str, Any]]] = deque()
        """The memory being copied from, with the event that completes when the copy is done."""
        self._lock = threading.Lock()
        """Another thread may close the iteration while it goes on."""

    def begin(self, values: dict[str, Any]) -> tuple[dict[str, Any], Event]:
        # From memory that is not page-locked the copy would make the host wait.
        begun = now()
        host = {n: self._streams.pin(v) if isinstance(v, Tensor) else v for n, v in values.items()}
        spent("pin", begun)
        begun = now()
        try:
            with self._streams.beside():
                copied = {n: self._streams.copy(v) if isinstance(v, Tensor) else v for n, v in host.items()}
        finally:
            # Also after an error: those that were begun are still reading.
            event = self._streams.mark()
            self._under_way.append((event, host))
        # This counts only the host's part; the copy itself runs in parallel with the step.
        spent("copy", begun)
        return copied, event

    def hand_over(self, tensors: dict[str, Any], event: Event) -> None:
        """Make the tensors usable on the consumer's stream."""
        self._streams.wait(event)
        for value in tensors.values():
            if isinstance(value, Tensor):
                self._streams.keep(value)

    def copy_late(self, late: Fields, name: str) -> Any:
        """Copy a field that was not in use before, and wait, since nothing may check later whether it was read."""
        copied, event = self.begin({name: as_tensor(late[name])})
        self.hand_over(copied, event)
        event.synchronize()
        return copied[name]

    def let_go(self) -> None:
        """Release the memory of finished copies. Copies end in the order in which they were begun."""
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()

    def settle(self) -> None:
        with self._lock:
            while self._under_way:
                # If the device has failed, nothing reads the memory any more, and the user has seen that error already.
                with contextlib.suppress(RuntimeError):
                    self._under_way[0][0].synchronize()
                self._under_way.popleft()


class Tensors:
    """Batches that are copied to a device without streams, while the loop waits for them."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __next__(self) -> dict[str, Any]:
        host = next(self._batches)
        copied = {name: self._copy(host[name]) for name in made_names(host)}
        late = late_fields(host)
        if late is None:
            return copied
        return Fields(names_of(host), lambda name: self._copy(late[name]), copied)

    def _copy(self, value: Any) -> Any:
        tensor = as_tensor(value)
        if not isinstance(tensor, Tensor):
            return tensor
        begun = now()
        copied = tensor.to(self._device)
        spent("copy", begun)
        return copied

    def is_ready(self) -> bool:
        return self._batches.is_ready()

    def close(self) -> None:
        self._batches.close()


def as_tensor(value: Any) -> Any:
    """An array as a tensor, in the same memory if PyTorch can use it.

    uint16 and uint32 are copied to int32 and int64. uint64 stays `torch.uint64`, since no signed type holds its values.
    Arrays of strings or objects stay arrays.
    """
    if not isinstance(value, np.ndarray):
        return value
    kind = value.dtype
    if kind in _AS_THEY_ARE and value.flags.carray:
        return tensor_in(value)
    if kind.kind not in "biufc":
        return value
    wanted = _changed_type(value.dtype)
    if wanted is not None:
        value = value.astype(wanted)
    elif not value.flags.writeable or min(value.strides, default=0) < 0:
        value = value.copy()
    return tensor_in(value)


@lru_cache(maxsize=64)
def _changed_type(kind: np.dtype[Any]) -> np.dtype[Any] | None:
    """The type that an array must be converted to, if PyTorch cannot use its own."""
    native = kind.newbyteorder("=")
    wanted = np.dtype(_WIDER.get(native, native))
    return None if wanted == kind else wanted


def find_device(device: Any) -> torch.device:
    """The device that the user asked for, once it is known to be available; None means the CPU."""
    if device is None:
        return torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise SettingsError(
            f"device={device!r}: must be a device such as 'cpu', 'cuda' or 'cuda:1': {first}"
        ) from None
    if found.type == "cuda":
        _check_cuda(device, found)
    return found


def _check_cuda(given: Any, device: torch.device) -> None:
    if not torch.cuda.is_available():
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        what = f"is built for {built}, but finds no device" if built else "is built without CUDA"
        raise SettingsError(
            f"device={str(given)!r}: torch {torch.__version__} {what}; "
            "leave device out to get batches on the CPU, or install a torch and a driver for the device"
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise SettingsError(
            f"device={str(given)!r}: the number of CUDA devices is {count}, and they are numbered from 0"
        )
