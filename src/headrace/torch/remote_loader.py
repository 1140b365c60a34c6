"""The RemoteLoader, with tensors in its batches, on the CPU or on an accelerator."""

from collections.abc import Sequence
from typing import Unpack

import torch

from headrace.public import public
from headrace.serve.remote_loader import RemoteArguments
from headrace.serve.remote_loader import RemoteLoader as HostRemoteLoader
from headrace.torch.loader import TensorLoader


class RemoteLoader(HostRemoteLoader, TensorLoader):
    """A `headrace.RemoteLoader` whose batches are tensors.

    Args:
        addresses: Where the servers are, as for a `headrace.RemoteLoader`.
        device: Where batches are, such as "cuda" or "cuda:1". By default, on the CPU.
        **arguments: All other arguments of `headrace.RemoteLoader`; see `help(headrace.RemoteLoader)`.
    """

    @public
    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        device: str | torch.device | None = None,
        **arguments: Unpack[RemoteArguments],
    ) -> None:
        super().__init__(addresses, **arguments)
        self._deliver_to(device)
