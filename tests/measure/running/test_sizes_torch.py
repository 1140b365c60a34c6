"""How much a batch of tensors holds."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs tensors")

import torch

from headrace.measure.running.sizes import BatchSize, measure_batch, padding_share


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"tokens": torch.zeros((2, 4), dtype=torch.int32), "n": 3}, BatchSize(2, 8, 32)),
        ((torch.zeros(32, 3, 2, 2), torch.zeros(32, dtype=torch.int64)), BatchSize(32, None, 1536 + 256)),
        # As default_collate gives (text, tensor) and (dict, number).
        ([("a",) * 32, torch.zeros(32, 2)], BatchSize(32, None, 256)),
        ([{"x": torch.zeros(5, 2)}, torch.zeros(5)], BatchSize(5, None, 60)),
    ],
)
def test_samples_tokens_and_bytes(batch: Any, expected: BatchSize) -> None:
    assert measure_batch(batch) == expected


def test_batches_without_a_shape_are_no_failure() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    sparse = torch.eye(3).to_sparse()
    assert measure_batch({"x": nested}).samples == 2
    assert measure_batch(sparse).samples == 3
    assert padding_share({"tokens": nested}, 0) is None


def test_padding_by_token() -> None:
    tokens = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])
    assert padding_share((tokens, torch.zeros(2)), pad_id=0) == 3 / 8
