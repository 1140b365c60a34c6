"""Where a user's tensors meet the Loader: as views of its memory, as samples, and as types in its settings."""

from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import StageError
from headrace.load.loader import Loader
from headrace.rows.buffers import BufferPool, Spec
from tests.load import streams

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch import Loader as TorchLoader

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


class Tensors(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((2, 3), float(index)), "label": torch.tensor(index)}


def test_a_torch_dataset_of_tensors_is_stacked() -> None:
    (batch,) = Loader(Tensors(), batch_size=10, shuffle=False)
    assert batch.image.shape == (10, 2, 3)
    assert batch.image.dtype == np.float32
    assert batch.label.tolist() == list(range(10))
    streams.resumes_at_every_step(lambda: Loader(Tensors(), batch_size=3, drop_last=False, epochs=2))
    subset = torch.utils.data.Subset(Tensors(), [7, 3, 5])
    (batch,) = Loader(subset, batch_size=3, shuffle=False)
    assert batch.label.tolist() == [7, 3, 5]


def test_the_type_of_tokens_may_be_one_of_torch() -> None:
    data = streams.token_dataset([8] * 6)
    plain = streams.take(Loader(data, batch_size=2, seq_len=8, dtype="int32"))
    assert streams.same(streams.take(Loader(data, batch_size=2, seq_len=8, dtype=torch.int32)), plain)


def test_functions_that_return_tensors_lose_no_rows_and_repeat_none() -> None:
    data = headrace.from_arrays({"x": np.arange(9)})
    for lost in (
        lambda batch: {"x": torch.as_tensor(batch["x"])[:-1]},
        lambda batch: {"y": torch.as_tensor(batch["x"])[:-1]},
    ):
        with pytest.raises(StageError, match=r"returned 2 values of '[xy]' for rows 0 to 2 of the stream"):
            list(TorchLoader(data, batch_size=3).map(lost, per="batch"))
    found = []
    for rank in range(4):
        options: dict[str, Any] = {"drop_last": False, "rank": rank, "world_size": 4, "shuffle": False}
        loader = TorchLoader(data, batch_size=2, **options)
        batches = list(loader.map(lambda batch: {"x": torch.as_tensor(batch["x"].copy())}, per="batch"))
        assert [type(batch["x"]) for batch in batches] == [torch.Tensor] * 2
        found += [number for batch in batches for number in batch["x"].tolist()]
    assert sorted(found) == list(range(9))
