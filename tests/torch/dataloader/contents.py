"""What samples and batches may be made of: for each name a function, so that worker processes make them themselves."""

import collections
import decimal
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from tests.torch.dataloader.datasets import Carrier, Marked, Point, Tagged

SMALL, LARGE = 3, 12_000
"""How many numbers a tensor has: those of a large batch go into memory that is used again."""

NUMPY_DTYPES = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split()
NO_TENSOR_DTYPES = ["f16", "O", "U3", "S3", "M8[D]", "m8[s]", ">i4", "i4,f4"]
TORCH_DTYPES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2"
).split()

Sample = Callable[[int, int], Any]
"""Of the sample's number and of how many numbers a tensor has."""


def _tensor(index: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + index


def _table(index: int, size: int) -> torch.Tensor:
    return torch.arange(2 * size).reshape(2, size) + index


def _images(index: int, size: int) -> torch.Tensor:
    pixels = torch.arange(2 * 3 * 4 * size).reshape(2, 3, 4, size) + index
    return pixels.contiguous(memory_format=torch.channels_last)


def _array_of(dtype: str) -> Sample:
    def make(index: int, size: int) -> Any:
        if dtype == "i4,f4":
            return np.zeros(size, dtype)
        return (np.arange(size) % 100 + index).astype(dtype)

    return make


def _scalar_of(dtype: str) -> Sample:
    return lambda index, size: np.array([index % 100]).astype(dtype)[0]


def _tensor_of(dtype: str) -> Sample:
    return lambda index, size: (torch.arange(size) % 100 + index).to(getattr(torch, dtype))


SAMPLES: dict[str, Sample] = {
    "int": lambda index, size: index,
    "float": lambda index, size: index / 3,
    "infinite": lambda index, size: float("inf"),
    "bool": lambda index, size: index % 2 == 0,
    "large int": lambda index, size: 2**62 + index,
    "too large int": lambda index, size: 2**64 + index,
    "int, then float": lambda index, size: index if index == 0 else index + 0.5,
    "complex": lambda index, size: complex(index, 1),
    "decimal": lambda index, size: decimal.Decimal(index),
    "string": lambda index, size: "wort" * index,
    "bytes": lambda index, size: bytes([index]) * size,
    "none": lambda index, size: None,
    "set": lambda index, size: {index},
    "function": lambda index, size: print,
    "tensor": _tensor,
    "0-d tensor": lambda index, size: torch.tensor(index),
    "empty tensor": lambda index, size: torch.zeros(0),
    "empty table": lambda index, size: torch.zeros(3, 0, size),
    "list": lambda index, size: [index, _tensor(index, size), "a"],
    "empty list": lambda index, size: [],
    "tuple": lambda index, size: (index, _tensor(index, size)),
    "empty tuple": lambda index, size: (),
    "named tuple": lambda index, size: Point(index, _tensor(index, size)),
    "range": lambda index, size: range(index, index + 3),
    "bytearray": lambda index, size: bytearray([index, 2]),
    "deque": lambda index, size: collections.deque([index, 2.5]),
    "dict": lambda index, size: {"x": _tensor(index, size), "y": {"z": [index, (index,)]}},
    "empty dict": lambda index, size: {},
    "ordered dict": lambda index, size: collections.OrderedDict(b=index, a=index / 2),
    "default dict": lambda index, size: collections.defaultdict(list, a=index),
    "user dict": lambda index, size: collections.UserDict(a=index),
    "own dict": lambda index, size: _tagged(index),
    "none in a dict": lambda index, size: {"x": index, "y": None},
    "uneven lists": lambda index, size: [0] * (index + 1),
    "other keys": lambda index, size: {f"key {index}": index},
    "uneven tensors": lambda index, size: _tensor(index, size + index),
    "other kinds": lambda index, size: [_tensor(index, size), index, "a"][index % 3],
    "float, then double": lambda index, size: _tensor(index, size).to(
        [torch.float32, torch.float64][index % 2]
    ),
    "double, then float": lambda index, size: _tensor(index, size).to(
        [torch.float64, torch.float32][index % 2]
    ),
    "int, then float tensor": lambda index, size: _tensor(index, size).to(
        [torch.int64, torch.float32][index % 2]
    ),
    "transposed": lambda index, size: _table(index, size).T,
    "every other": lambda index, size: _table(index, 2 * size)[:, ::2],
    "expanded": lambda index, size: torch.tensor([index]).expand(size),
    "channels last": lambda index, size: _images(index, size // 3),
    "sparse": lambda index, size: _tensor(index, size).to_sparse(),
    "sparse rows": lambda index, size: _table(index, size).to_sparse_csr(),
    "nested": lambda index, size: torch.nested.nested_tensor([_tensor(index, 2), _tensor(index, 3)]),
    "own tensor": lambda index, size: _tensor(index, size).as_subclass(Marked),
    "parameter": lambda index, size: nn.Parameter(_tensor(index, size)),
    "requires grad": lambda index, size: _tensor(index, size).requires_grad_(),
    "conjugated": lambda index, size: torch.complex(_tensor(index, size), _tensor(1, size)).conj(),
    "negated": lambda index, size: torch.complex(_tensor(index, size), _tensor(1, size)).conj().imag,
    "0-d array": lambda index, size: np.array(index),
    "empty array": lambda index, size: np.zeros((2, 0)),
    "fortran array": lambda index, size: np.asfortranarray(np.ones((2, size)) * index),
    "backwards array": lambda index, size: np.arange(size)[::-1],
    "numpy string": lambda index, size: np.str_(f"wort {index}"),
    "carrier": lambda index, size: Carrier([index]),
    **{f"{dtype} array": _array_of(dtype) for dtype in NUMPY_DTYPES + NO_TENSOR_DTYPES},
    **{f"{dtype} scalar": _scalar_of(dtype) for dtype in [*NUMPY_DTYPES, "M8[D]", "f16"]},
    **{f"{dtype} tensor": _tensor_of(dtype) for dtype in TORCH_DTYPES},
}


def _tagged(index: int) -> Tagged:
    result = Tagged(x=index)
    result.tag = f"tag {index}"
    return result


def _shared(size: int) -> list[Any]:
    whole = torch.arange(float(size))
    return [whole, whole.view(-1, 1), whole[: size // 2], whole[size // 2 :]]


def _twice(size: int) -> dict[str, Any]:
    tensor, array, names = torch.ones(size), np.ones(size), ["a"]
    return {"tensors": [tensor, tensor], "arrays": [array, array], "names": [names, names]}


def _frozen(size: int) -> Any:
    array = np.arange(size)
    array.flags.writeable = False
    return array


BATCHES: dict[str, Callable[[int], Any]] = {
    "none": lambda size: None,
    "string": lambda size: "ein Wort " * size,
    "bytes": lambda size: bytes(size),
    "many bytes": lambda size: random.Random(1).randbytes(10 * size),
    "bytearray": lambda size: bytearray(size),
    "numbers": lambda size: [1, 2.5, True, 3j, 2**70, float("nan")],
    "long list": lambda size: list(range(size)),
    "long list of lists": lambda size: [[number, str(number)] for number in range(size // 3)],
    "dict": lambda size: {1: "a", ("b", 2): {None: []}, "c": {1, 2}},
    "object": lambda size: Carrier(list(range(size))),
    "classes": lambda size: [
        int,
        Carrier,
        torch.float16,
        torch.device("cpu"),
        torch.Size([1, 2]),
        torch.strided,
    ],
    "named tuple": lambda size: Point([1], Point("a", torch.ones(size))),
    "array": lambda size: np.arange(size),
    "0-d array": lambda size: np.array(5),
    "empty array": lambda size: np.zeros((3, 0), "i2"),
    "transposed array": lambda size: np.arange(2 * size).reshape(2, size).T,
    "fortran array": lambda size: np.asfortranarray(np.ones((2, size))),
    "every other": lambda size: np.arange(2 * size)[::2],
    "backwards array": lambda size: np.arange(size)[::-1],
    "broadcast array": lambda size: np.broadcast_to(np.arange(3.0), (size, 3)),
    "frozen array": _frozen,
    "swapped array": lambda size: np.arange(size).astype(">i4"),
    "structured array": lambda size: np.zeros(size, [("a", "i4"), ("b", "f8", 2)]),
    "days": lambda size: np.arange(size).astype("M8[D]"),
    "words": lambda size: np.array(["a", "bcd"] * size),
    "objects": lambda size: np.array([1, "a", None] * size, dtype=object),
    "masked": lambda size: np.ma.masked_array(np.arange(size), mask=np.arange(size) % 2 == 0),
    "matrix of strings": lambda size: [["a"] * 3] * (size // 3),
    "scalars": lambda size: [np.float32(1.5), np.bool_(True), np.datetime64("2020-02-02"), np.str_("a")],
    **{f"{dtype} tensor": lambda size, dtype=dtype: _tensor_of(dtype)(0, size) for dtype in TORCH_DTYPES},
    "0-d tensor": lambda size: torch.tensor(5),
    "empty tensor": lambda size: torch.zeros(3, 0),
    "transposed": lambda size: torch.arange(2 * size).reshape(2, size).T,
    "half of the columns": lambda size: torch.arange(2 * size).reshape(size, 2)[:, 0],
    "column": lambda size: torch.arange(9 * size).reshape(size, 9)[:, 4],
    "expanded": lambda size: torch.arange(3).expand(size, 3),
    "windows": lambda size: torch.arange(size).unfold(0, 3, 1),
    "channels last": lambda size: _images(0, size),
    "sparse": lambda size: torch.eye(size // 100 + 2).to_sparse(),
    "sparse rows": lambda size: torch.eye(size // 100 + 2).to_sparse_csr(),
    "own tensor": lambda size: torch.ones(size).as_subclass(Marked),
    "parameter": lambda size: nn.Parameter(torch.ones(size)),
    "requires grad": lambda size: torch.ones(size, requires_grad=True),
    "conjugated": lambda size: torch.full((size,), 1 + 2j).conj(),
    "negated": lambda size: torch.full((size,), 1 + 2j).conj().imag,
    "on meta": lambda size: torch.zeros(size, device="meta"),
    "storages": lambda size: list(bytes(torch.arange(size // 3).untyped_storage())),
    "packed": lambda size: pack_sequence([torch.arange(float(size)), torch.ones(2)], enforce_sorted=False),
    "shared": _shared,
    "twice": _twice,
    "mixed": lambda size: {
        "x": [torch.ones(size), np.ones(size)],
        "y": (torch.zeros(1), bytes(size)),
        "z": "a",
    },
}
