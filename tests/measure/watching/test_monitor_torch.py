"""Watched loops over DataLoaders: PyTorch's, and ours in its place."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch's DataLoader")

import torch
import torch.utils.data

from headrace.measure.watching.monitor import monitor
from headrace.measure.watching.watched import Watched
from headrace.torch import DataLoader
from tests.measure.said import Said, check_lines
from tests.measure.squares import Squares


def _each_loader() -> Iterator[Any]:
    yield pytest.param(
        lambda: DataLoader(Squares(), batch_size=4, num_workers=2),
        {"read", "collate", "transport"},
        id="processes",
    )
    yield pytest.param(
        lambda: DataLoader(Squares(), batch_size=4, num_workers=2, worker_kind="thread"),
        {"read", "collate"},
        id="threads",
    )
    yield pytest.param(lambda: torch.utils.data.DataLoader(Squares(), batch_size=4), set(), id="torch's")
    yield pytest.param(
        lambda: torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2),
        set(),
        id="torch's with workers",
    )


@pytest.mark.parametrize(("make", "making"), list(_each_loader()))
def test_elsewhere_there_are_lines_and_a_summary(
    make: Callable[[], Any], making: set[str], said: Said
) -> None:
    check_lines(make(), making, said)


def test_our_loader_may_be_iterated_over_itself(said: Said) -> None:
    loader = DataLoader(Squares(), batch_size=4)
    list(loader)
    with monitor(loader):
        assert len(list(loader)) == 16
    assert said().startswith("headrace: 16 batches in ")  # since it was entered


def test_rows_are_counted_where_a_batch_tells() -> None:
    for batches, rows in (
        ([{"x": torch.zeros(5, 2), "name": ["a"] * 5}], 5),
        ([(torch.zeros(6, 2), torch.zeros(6))], 6),
        ([[torch.zeros(6, 2), torch.zeros(6)]], 6),
    ):
        watched = Watched(batches)
        assert list(watched) is not None
        assert watched.stats().rows == rows


def test_what_is_watched_is_still_the_loader() -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4)
    watched = Watched(loader)
    assert watched.batch_size == 4
    assert watched.dataset is loader.dataset
    assert bool(watched)


def test_the_workers_of_a_stock_loader_are_known() -> None:
    for workers in (0, 2):
        watched = Watched(torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=workers))
        for _ in watched:
            pass
        assert watched.stats().workers == workers
    assert Watched([1]).stats().workers == 0
