"""Batches as a pickle and buffers, and back."""

import collections
import pickle
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch.workers.parcels import pack, unpack

Pair = collections.namedtuple("Pair", "a b")


def _there_and_back(batch: Any) -> Any:
    pickled, buffers = pack(batch)
    return unpack(pickled, [np.frombuffer(bytearray(buffer), np.uint8) for buffer in buffers])


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type(dtype: torch.dtype) -> None:
    sent = torch.arange(24).reshape(2, 3, 4).to(dtype)
    came = _there_and_back(sent)
    assert (came.dtype, came.shape, came.stride()) == (sent.dtype, sent.shape, sent.stride())
    assert came.view(torch.uint8).tolist() == sent.view(torch.uint8).tolist()


def test_tensors_of_every_layout() -> None:
    base = torch.arange(120.0).reshape(10, 12)
    sent = {
        "transposed": base.t(),
        "every other": base[::2, 3::4],
        "expanded": torch.ones(1, 3).expand(1000, 3),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 7),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    came = _there_and_back(sent)
    for name, tensor in sent.items():
        assert torch.equal(came[name], tensor), name
    assert came["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert came["expanded"].untyped_storage().nbytes() == 12


def test_tensors_that_share_memory_still_do() -> None:
    base = torch.zeros(10)
    first, second = _there_and_back([base[:6], base[4:]])
    first[5] = 3
    assert second[1] == 3


def test_a_small_part_of_something_large_goes_alone() -> None:
    pickled, buffers = pack(torch.zeros(1_000_000)[10:20])
    assert len(pickled) + sum(map(len, buffers)) < 2000
    table = torch.arange(1000.0).reshape(100, 10)
    column, first, second = _there_and_back([table[:, 3], table[0, :6], table[0, 4:]])
    assert torch.equal(column, table[:, 3])
    assert torch.equal(first, table[0, :6])
    assert torch.equal(second, table[0, 4:])
    # Parts that overlap do not any more, and a column is no longer spread over its table.
    first[5] = -1
    assert second[1] == 5
    assert column.is_contiguous()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_what_pytorch_knows_how_to_send() -> None:
    sent = {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "leaf": torch.ones(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "storage": torch.arange(3).untyped_storage(),
        "meta": torch.empty(4, device="meta"),
    }
    came = _there_and_back(sent)
    assert type(came["parameter"]) is torch.nn.Parameter
    assert came["leaf"].requires_grad
    assert torch.equal(came["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(came["csr"].to_dense(), torch.eye(3))
    assert torch.equal(came["conjugated"], sent["conjugated"])
    assert came["storage"].tolist() == sent["storage"].tolist()
    assert came["meta"].shape == (4,)
    with pytest.raises(RuntimeError, match="non-leaf tensor which requires_grad"):
        pack(torch.ones(2, requires_grad=True) * 2)


def test_arrays_and_other_objects() -> None:
    sent = {
        "array": np.arange(12).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "strided": np.arange(12)[::3],
        "objects": np.array([1, "a", None], dtype=object),
        "pair": Pair(torch.ones(2), [b"bytes", "text", 5, None, {1, 2}]),
    }
    came = _there_and_back(sent)
    for name in ("array", "fortran", "strided", "objects"):
        assert came[name].tolist() == sent[name].tolist()
    assert came["array"].flags.writeable
    assert torch.equal(came["pair"].a, torch.ones(2))
    assert came["pair"].b == sent["pair"].b


def test_memory_is_not_copied_into_the_pickle() -> None:
    pickled, buffers = pack({"x": torch.zeros(1000, 1000), "y": np.zeros(500_000)})
    assert sum(map(len, buffers)) == 8_000_000
    assert len(pickled) < 1000


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pack([lambda: 0])
