"""One scenario, run with PyTorch's DataLoader and with ours: it must come to the same.

    def scenario(make):
        return list(make(dataset, batch_size=3, num_workers=2))

    assert_parity(scenario)

Types, dtypes, strides and values of what it returns are compared, its errors and warnings, and which random numbers
the process draws afterwards.
"""

import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from headrace.torch import DataLoader
from tests.torch.dataloader.datasets import seed_torch

Make = Callable[..., Any]
Scenario = Callable[[Make], Any]

PROCESSES: dict[str, dict[str, Any]] = {
    "1 process": {"num_workers": 1},
    "2 processes": {"num_workers": 2},
    "2 processes that stay": {"num_workers": 2, "persistent_workers": True},
    "2 processes far ahead": {"num_workers": 2, "prefetch_factor": 5},
    "1 process in any order": {"num_workers": 1, "in_order": False},
}
THREADS: dict[str, dict[str, Any]] = {
    "1 thread": {"num_workers": 1, "worker_kind": "thread"},
    "2 threads": {"num_workers": 2, "worker_kind": "thread"},
    "2 threads that stay": {"num_workers": 2, "worker_kind": "thread", "persistent_workers": True},
    "2 threads, 1 ahead": {"num_workers": 2, "worker_kind": "thread", "prefetch_factor": 1},
    "1 thread in any order": {"num_workers": 1, "worker_kind": "thread", "in_order": False},
}
WAYS = {"no workers": {}, **PROCESSES, **THREADS}
ONE_OF_EACH = {name: WAYS[name] for name in ("no workers", "2 processes that stay", "2 threads that stay")}


LOOP, STAYING_PROCESSES, STAYING_THREADS = ONE_OF_EACH


def ways(chosen: Mapping[str, dict[str, Any]]) -> Any:
    """For parametrize: each test gets `way`, a dict of options."""
    return pytest.mark.parametrize(
        "way", [pytest.param(options, id=name) for name, options in chosen.items()]
    )


def ways_named(*names: str) -> Any:
    """Those alone that can differ; the others too in the long runs."""
    return pytest.mark.parametrize(
        "way",
        [
            pytest.param(options, id=name, marks=[] if name in names else pytest.mark.soak)
            for name, options in WAYS.items()
        ],
    )


def ways_with(what: str, pairs: Mapping[str, Iterable[Any]]) -> Any:
    """For parametrize: pairs of a way and something else, of those that can differ."""
    return pytest.mark.parametrize(
        (what, "way"),
        [
            pytest.param(value, WAYS[name], id=f"{name}-{getattr(value, '__name__', value)}")
            for name, values in pairs.items()
            for value in values
        ],
    )


def ours(*arguments: Any, **options: Any) -> Any:
    return DataLoader(*arguments, **options)


def stock(*arguments: Any, **options: Any) -> Any:
    """PyTorch's; it has processes for threads."""
    options.pop("worker_kind", None)
    return torch.utils.data.DataLoader(*arguments, **options)


@dataclass
class Outcome:
    value: Any
    error: tuple[type, str] | None
    warned: list[tuple[type, str]]
    drawn_next: tuple[float, ...]


def outcome_of(scenario: Scenario, make: Make) -> Outcome:
    seed_torch(5)
    random.seed(6)
    np.random.seed(7)
    value, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = scenario(make)
        except Exception as raised:
            error = (type(raised), plain(str(raised)))
            _let_go(raised)
    warned = [(each.category, str(each.message)) for each in caught if issubclass(each.category, UserWarning)]
    return Outcome(value, error, warned, (torch.rand(()).item(), random.random(), np.random.rand()))


def assert_parity(scenario: Scenario, warns: str | None = None) -> Any:
    """It returns the same; gives what that is. `warns` must be in what both warn of."""
    wanted, found = outcome_of(scenario, stock), outcome_of(scenario, ours)
    assert (found.error, wanted.error) == (None, None)
    assert found.warned == wanted.warned
    assert bool(wanted.warned) is (warns is not None)
    assert all(str(warns) in said for _, said in wanted.warned)
    assert_same(found.value, wanted.value)
    assert found.drawn_next == wanted.drawn_next
    return found.value


def assert_same_error(scenario: Scenario, kind: type[BaseException], says: str) -> None:
    """It fails with the same type and text; `says` must be in it, so that it is the failure that was meant."""
    wanted, found = outcome_of(scenario, stock), outcome_of(scenario, ours)
    assert wanted.error is not None
    assert wanted.error[0] is kind
    assert says in wanted.error[1]
    assert (found.error, found.warned) == (wanted.error, wanted.warned)


def epochs(loader: Any, count: int = 2) -> list[list[Any]]:
    return [list(loader) for _ in range(count)]


def steps(iterator: Any, count: int) -> list[Any]:
    """What comes of calling next() so often: a batch, or the type and text of an error."""
    found: list[Any] = []
    for _ in range(count):
        try:
            found.append(next(iterator))
        except Exception as raised:
            found.append((type(raised), plain(str(raised))))
            _let_go(raised)
    return found


def _let_go(raised: Exception) -> None:
    """PyTorch raises what refers to itself and to its iterator, whose workers then stay until garbage is collected,
    and that takes it ten seconds."""
    traceback.clear_frames(raised.__traceback__)


_NUMBER = re.compile(r"(pid(?:\(s\))?) \d+")
_FRAME = re.compile(r'  File ".*/(torch/utils/data|headrace/torch)/[^\n]*\n(    [^\n]*\n)*')


def plain(text: str) -> str:
    """Without what may differ: the numbers of processes, and the stack frames of the loaders themselves."""
    text = text.replace("DataLoader worker thread", "DataLoader worker process")
    return _FRAME.sub("", _NUMBER.sub(r"\1 N", text))


def assert_same(found: Any, wanted: Any, where: str = "it") -> None:
    assert type(found) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        _assert_same_tensor(found, wanted, where)
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.strides) == (wanted.dtype, wanted.shape, wanted.strides), (
            where
        )
        assert found.flags.writeable == wanted.flags.writeable, where
        np.testing.assert_array_equal(found, wanted, where)
    elif isinstance(wanted, Mapping):
        assert list(found) == list(wanted), where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}[{key!r}]")
        assert_same(getattr(found, "__dict__", None), getattr(wanted, "__dict__", None), f"{where}.__dict__")
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str | bytes):
        assert len(found) == len(wanted), where
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    else:
        assert found == wanted or (found != found and wanted != wanted), where


def _assert_same_tensor(found: Any, wanted: Any, where: str) -> None:
    for name in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf"):
        assert getattr(found, name) == getattr(wanted, name), f"{where}.{name}"
    if wanted.layout is torch.strided:
        assert found.stride() == wanted.stride(), where
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=where)
