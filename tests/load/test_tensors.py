"""Tensors look at the memory of batches too, and keep it."""

import pytest

from penstock.load.buffers import BufferPool, Spec

torch = pytest.importorskip("torch", reason="needs torch")

SPECS: tuple[Spec, ...] = (("tokens", "int64", (4, 8)), ("mask", "bool", (4, 8)))


def test_a_tensor_keeps_the_memory_of_its_array_and_so_do_its_views() -> None:
    pool = BufferPool(keep=4)
    batch = pool.arrays(SPECS)
    first = batch["tokens"].ctypes.data
    tensor = torch.from_numpy(batch["tokens"])
    del batch
    part = tensor.view(-1)[3:9]
    del tensor
    part[:] = 5
    pool.arrays(SPECS)["tokens"][:] = 9
    assert part.tolist() == [5] * 6
    del part
    assert pool.arrays(SPECS)["tokens"].ctypes.data == first
