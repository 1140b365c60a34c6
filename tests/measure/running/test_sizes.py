"""How much a batch holds, whatever it is made of."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import headrace
from headrace.measure.running.sizes import BatchSize, Sizes, measure_batch, padding_share


@dataclass
class Example:
    image: Any
    label: int


class Graphs:
    def __init__(self) -> None:
        self.num_graphs, self.x = 3, np.zeros((10, 2))


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": np.zeros((8, 16), np.int64)}, BatchSize(8, 128, 1024)),
        ({"tokens": np.zeros((2, 4), np.int32), "n": 3}, BatchSize(2, 8, 32)),
        ([np.zeros((5, 2)), np.zeros(5)], BatchSize(5, None, 120)),
        (np.zeros((7, 3)), BatchSize(7, None, 168)),
        (Pair(np.zeros(6), [1, 2]), BatchSize(6, None, 48)),
        ([Example(np.zeros(4), 1), Example(np.zeros(4), 2)], BatchSize(2, None, 64)),
        ({"name": ["a", "b", "c"]}, BatchSize(3, None, 0)),
        (["a", "b"], BatchSize(2, None, 0)),
        ("text", BatchSize(None, None, 0)),
        (7, BatchSize(None, None, 0)),
        (None, BatchSize(None, None, 0)),
        # As default_collate gives (text, text).
        ([("a",) * 32, ("b",) * 32], BatchSize(32, None, 0)),
        ((["a"] * 4, ["b"] * 4), BatchSize(4, None, 0)),
        ([("a", 1), ("b", 2), ("c", 3)], BatchSize(3, None, 0)),
        ([{"x": np.zeros(4)}, {"x": np.zeros(4)}], BatchSize(2, None, 64)),
        (Graphs(), BatchSize(3, None, 160)),
        ({"nested": {"x": np.zeros((4, 2))}}, BatchSize(4, None, 64)),
        (np.float64(3.0), BatchSize(None, None, 8)),
    ],
)
def test_samples_tokens_and_bytes(batch: Any, expected: BatchSize) -> None:
    assert measure_batch(batch) == expected


def test_many_batches_are_sized_by_their_shapes() -> None:
    sizes = Sizes()
    for rows in (4, 4, 3, 4):
        assert sizes.of({"tokens": np.zeros((rows, 8)), "x": np.zeros(rows)}).samples == rows
        assert sizes.of({"tokens": np.zeros((rows, 8)), "x": np.zeros(rows)}).tokens == 8 * rows
    assert sizes.of([1, 2]).samples == 2
    assert sizes._known, "shapes were enough"
    lists = Sizes()
    for length in (2, 5):
        assert lists.of({"x": np.zeros((2, 2)), "names": [np.zeros(length)]}).bytes == 32 + 8 * length


def test_padding_by_mask_segments_or_token() -> None:
    tokens = np.array([[5, 6, 0, 0], [7, 8, 9, 0]])
    assert padding_share({"input_ids": tokens, "attention_mask": tokens > 0}) == 3 / 8
    assert padding_share({"tokens": tokens, "segment_ids": (tokens > 0).astype(int)}) == 3 / 8
    assert padding_share({"tokens": tokens}, pad_id=0) == 3 / 8
    assert padding_share((tokens, np.zeros(2)), pad_id=0) == 3 / 8
    assert padding_share({"tokens": tokens}) is None
    assert padding_share({"image": np.zeros((2, 2))}) is None


def test_a_batch_of_headrace() -> None:
    dataset = headrace.from_arrays({"tokens": [np.arange(1, n, dtype=np.uint16) for n in range(2, 40)]})
    loader = headrace.Loader(dataset, seq_len=40, batch_size=2, packing="pad", shuffle="none")
    first = next(iter(loader))
    sizes = Sizes()
    assert sizes.of(first) == measure_batch(first)
    assert set(first.made) == {"tokens"}, "to measure a field is not to use it"
    assert padding_share(first) is None
    assert set(first.segment_ids.flatten().tolist()) == {0, 1}
    assert sizes._known, "shapes were enough"
    assert measure_batch(first).samples == 2
    assert measure_batch(first).tokens == 80
    assert padding_share(first) == (80 - 1 - 2) / 80
