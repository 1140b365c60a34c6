"""Tensors in memory that is used again for another batch once nobody holds it."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def tensor_in(memory: NDArray[Any]) -> Tensor:
    """A tensor in the memory of an array. The memory is held as long as the tensor lives, wherever its values are then.

    `share_memory_()`, and queues to other processes, move the values of a tensor and let go of the memory where they
    were. NumPy views of the tensor stay there: the memory must not be used for another batch, or unmapped, while there
    are any. They hold the tensor, the tensor its storage, and the storage the memory.
    """
    tensor = torch.from_numpy(memory)
    tensor.untyped_storage()._headrace_memory = memory
    return tensor
