"""The Loader, with tensors in its batches, on the CPU or on an accelerator.

    loader = headrace.torch.Loader("data", seq_len=2048, batch_size=32, device="cuda")
    for batch in loader:
        loss = model(batch.tokens, batch.labels)

On the CPU nothing is copied: tensors are views of the Loader's buffers. A buffer is reused once nothing refers to it:
no tensor, no view of one, no array from `tensor.numpy()`. So you can keep tensors for as long as you like.

On CUDA the buffers are page-locked, and each batch is copied while the previous step runs. Let the Loader make that
copy, because it knows when a buffer has been read. This is why memory is page-locked only in this case and there is no
`pin_memory`: your own copy with `non_blocking=True` could still read a buffer that has already been reused.
"""

from typing import Any, Unpack

import torch

from headrace.load.loader import Loader as HostLoader
from headrace.load.settings import LoaderArguments
from headrace.public import public
from headrace.torch.device import ToDevice, find_device


class TensorLoader(HostLoader):
    """What Loaders with tensors have in common, wherever their batches are made."""

    device: torch.device

    def _deliver_to(self, device: str | torch.device | None) -> None:
        self.device = find_device(device)
        self.delivery = ToDevice(self.device)

    def __len__(self) -> int:
        """How many batches an iteration has on each rank, from the beginning of an epoch.

        As in PyTorch's DataLoader, this does not change: trainers ask for it once and plan all epochs with it. The
        iteration after `load_state_dict` or `break` has fewer batches: those that are left.
        """
        return self.batches_per_pass

    @property
    def batch_sampler(self) -> "_ToldTheEpoch":
        """For trainers that tell the sampler in a DataLoader which epoch begins, as PyTorch Lightning does."""
        return _ToldTheEpoch(self)


class Loader(TensorLoader):
    """A `headrace.Loader` whose batches are tensors.

    Arrays become tensors, `max_seqlen` stays an int, and lists stay lists. Fields of uint16 and uint32 become int32 and
    int64. Functions given to `map` run before all that: they get NumPy arrays, and return arrays, or tensors on the
    CPU.

    Args:
        data: What a `headrace.Loader` takes.
        device: Where batches are, such as "cuda" or "cuda:1". By default, on the CPU.
        **arguments: All other arguments of `headrace.Loader`; see `help(headrace.Loader)`.
    """

    @public
    def __init__(
        self, data: Any, *, device: str | torch.device | None = None, **arguments: Unpack[LoaderArguments]
    ) -> None:
        super().__init__(data, **arguments)
        self._deliver_to(device)


class _ToldTheEpoch:
    """Stands where PyTorch's DataLoader has a batch sampler, and the sampler in it.

    Lightning does not load the state of a checkpoint that was saved between two epochs. It only says which epoch
    begins, and that is all that a Loader has to know.
    """

    def __init__(self, loader: TensorLoader) -> None:
        self._loader = loader

    @property
    def sampler(self) -> "_ToldTheEpoch":
        return self

    def set_epoch(self, epoch: int) -> None:
        self._loader.start_with_pass(epoch)
