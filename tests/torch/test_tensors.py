"""Arrays as tensors: every value, and their memory where that is safe."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

import headrace
from headrace.torch import Loader
from headrace.torch.device import as_tensor


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        *(("int8", torch.int8), ("int64", torch.int64), ("uint8", torch.uint8), ("bool", torch.bool)),
        *(("float16", torch.float16), ("complex64", torch.complex64)),
        *(("uint16", torch.int32), ("uint32", torch.int64), ("uint64", torch.uint64), (">i4", torch.int32)),
        *((">u2", torch.int32), (">f8", torch.float64)),
    ],
)
def test_every_value_of_a_type_survives(kind: str, wanted: torch.dtype) -> None:
    low, high = (0, 1) if np.dtype(kind).kind not in "iu" else (np.iinfo(kind).min, np.iinfo(kind).max)
    array = np.array([low, 1, high], dtype=kind)
    tensor = as_tensor(array)
    assert tensor.dtype is wanted
    assert tensor.tolist() == array.tolist()


def test_arrays_share_memory_with_their_tensors_where_that_is_safe() -> None:
    array = np.arange(6).reshape(2, 3)
    assert as_tensor(array).data_ptr() == array.ctypes.data
    backwards = array[::-1]
    assert as_tensor(backwards).tolist() == backwards.tolist()
    array.setflags(write=False)
    tensor = as_tensor(array)
    tensor += 1  # a copy: what is read-only stays as it is
    assert array[0].tolist() == [0, 1, 2]


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] * 2}


@pytest.mark.parametrize("processes", [0, 2])
def test_numpy_views_of_a_batch_stay_as_they_are_when_it_moves_to_shared_memory(processes: int) -> None:
    """As it does in `share_memory_`, and when it is put into a queue of `torch.multiprocessing`."""
    data = headrace.from_arrays({"x": np.arange(400 * 3000).reshape(400, 3000)})
    kept = []
    for step, batch in enumerate(Loader(data, batch_size=4).map(_doubled, per="batch", processes=processes)):
        if step % 10 == 3:
            view = batch.x.numpy()
            kept.append((view, view.copy()))
            batch.x.share_memory_()
        del batch
    assert len(kept) == 10
    for view, copied in kept:
        np.testing.assert_array_equal(view, copied)


@pytest.mark.parametrize("value", [[b"a"], 3, True, "text", np.float32(1.5), np.array(["a"]), None])
def test_what_torch_has_no_type_for_stays_what_it_is(value: Any) -> None:
    assert as_tensor(value) is value
