"""Ctrl-C and errors at any moment: a state that is taken then loses nothing and repeats nothing."""

import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from headrace.torch import DataLoader
from headrace.torch.workers import children
from tests.ctrl_c import CtrlCAt
from tests.torch.dataloader import fault_datasets as faults
from tests.torch.dataloader import state_datasets as data
from tests.torch.leftovers import is_receiving, wait_until

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

LENGTH = 60
WAYS: dict[str, dict[str, Any]] = {
    "in the loop": {},
    "threads": {"num_workers": 2, "worker_kind": "thread"},
    "processes": {"num_workers": 2},
    "out of order": {"num_workers": 2, "worker_kind": "thread", "in_order": False},
}


@contextlib.contextmanager
def real_ctrl_c(after_seconds: float | None = None) -> Iterator[None]:
    """By a signal, after some time; else someone must send it."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_seconds or 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _collect(batches: Any, got: list[int]) -> None:
    """What `list.extend` does, but what arrived is there whenever this is interrupted."""
    for batch in batches:
        got.extend(batch.tolist())


CASES = [
    (data.Numbers, "in the loop"),
    (data.Numbers, "threads"),
    (data.Numbers, "processes"),
    (data.Numbers, "out of order"),
    (data.WithIterator, "threads"),
    (data.WithIterator, "processes"),
    (data.WithIterator, "out of order"),
    # Not in the loop: a batch of an iterable that is interrupted half-way has used up its samples.
]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("dataset", "way", "turns"),
    [
        *((*case, 8) for case in CASES),
        *(pytest.param(*case, 200, marks=pytest.mark.soak) for case in CASES),
    ],
)
def test_ctrl_c_at_any_moment_loses_nothing_that_was_not_handed_out(
    dataset: Any, way: str, turns: int
) -> None:
    batches = iter(DataLoader(dataset(LENGTH), batch_size=3, **WAYS[way]))
    with CtrlCAt() as counting:
        _collect(batches, [])
    rng = random.Random(2)
    interrupted = 0
    for turn in range(turns):
        # One in each part of the epoch, to the last, where workers are ended. How many instructions there are differs
        # from one time to the next, so some may not be reached.
        place = 1 + int((turn + rng.random()) / turns * counting.passed)
        interrupted += _interrupt_and_go_on(dataset, way, CtrlCAt(place))
    assert interrupted


# Ctrl-C inside a callback of a weak reference is Python's to lose.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.soak
@pytest.mark.parametrize(("dataset", "way"), CASES)
def test_real_ctrl_c_at_any_moment_loses_nothing_that_was_not_handed_out(dataset: Any, way: str) -> None:
    rng = random.Random(2)
    longest = 0.02 if way == "processes" else 0.002
    interrupted = 0
    for _ in range(25 if way == "processes" else 150):
        interrupted += _interrupt_and_go_on(dataset, way, real_ctrl_c(rng.random() * longest))
    assert interrupted


def _interrupt_and_go_on(dataset: Any, way: str, ctrl_c: Any) -> bool:
    """Checks that an epoch is whole though it was interrupted, if it was."""
    loader = DataLoader(dataset(LENGTH), batch_size=3, **WAYS[way])
    batches, got = iter(loader), list[int]()
    interrupted = False
    try:
        with ctrl_c:
            _collect(batches, got)
    except KeyboardInterrupt:
        interrupted = True
    # A batch may have arrived in the loop without being written down: then it counts as handed out.
    state = loader.state_dict()
    other = DataLoader(dataset(LENGTH), batch_size=3, **WAYS[way])
    other.load_state_dict(state)
    rest: list[int] = []
    if state["yielded"] * 3 < LENGTH:
        # Else the next epoch would come.
        _collect(other, rest)
    both = sorted(got + rest)
    assert len(set(both)) == len(both), "something came twice"
    lost = set(range(LENGTH)) - set(both)
    assert len(lost) <= 3, "more was lost than one batch that the loop had in its hands"
    if state["yielded"] * 3 == len(got):
        assert not lost
    return interrupted


@pytest.mark.usefixtures("nothing_left")
def test_an_interrupted_iteration_with_workers_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its worker hangs, and is waited for no longer than that.
    monkeypatch.setattr(children, "_STOP_SECONDS", 0.2)
    loader = DataLoader(faults.Hanging(), num_workers=1, persistent_workers=True)
    batches = iter(loader)
    handed: list[Any] = []
    main = threading.main_thread()

    def take_all() -> None:
        for batch in batches:
            handed.append(batch)

    def press() -> None:
        wait_until(lambda: len(handed) == 6 and is_receiving(main))
        signal.pthread_kill(main.ident or 0, signal.SIGALRM)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt), real_ctrl_c():
        take_all()
    pressing.join()
    with pytest.raises(RuntimeError, match="was interrupted; start a new one"):
        next(batches)
    # Another one has new workers.
    assert next(iter(loader))[0, 0] == 0


class Flaky(data.Numbers):
    """Fails, once, at one index: as a disk may, or a user at the keyboard."""

    def __init__(self, length: int, error: BaseException) -> None:
        super().__init__(length)
        self.error: BaseException | None = error

    def __getitem__(self, index: int) -> int:
        if index == 7 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_a_batch_that_failed_comes_again_after_a_restart(error: BaseException) -> None:
    loader = DataLoader(Flaky(12, error), batch_size=2)
    got: list[int] = []
    with pytest.raises(type(error)):
        _collect(loader, got)
    assert got == [0, 1, 2, 3, 4, 5]
    other = DataLoader(data.Numbers(12), batch_size=2)
    other.load_state_dict(loader.state_dict())
    _collect(other, got)
    assert got == list(range(12))


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_failed_is_passed_by_if_the_loop_goes_on(way: str) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Flaky(12, ValueError("bad")), batch_size=2, **WAYS[way])

    loader = make()
    batches, got = iter(loader), list[int]()
    with pytest.raises(ValueError, match="bad"):
        _collect(batches, got)
    with_it = DataLoader(data.Numbers(12), batch_size=2)
    with_it.load_state_dict(loader.state_dict())
    assert sorted(got + torch.cat(list(with_it)).tolist()) == list(range(12))
    if way == "out of order":
        return
    got += next(batches).tolist()
    without = DataLoader(data.Numbers(12), batch_size=2)
    without.load_state_dict(loader.state_dict())
    rest = torch.cat(list(without)).tolist()
    assert sorted(got + rest) == [number for number in range(12) if number not in (6, 7)]
    # As the iteration itself, which goes on too.
    assert torch.cat(list(batches)).tolist() == rest


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
@pytest.mark.parametrize("dataset", [data.WithIterator, data.Plain])
def test_an_iterable_in_the_loop_that_fails_in_the_middle_of_a_batch(
    dataset: Any, error: BaseException
) -> None:
    errors = [error]

    def collate(samples: list[int]) -> torch.Tensor:
        if 6 in samples and errors:
            raise errors.pop()
        return torch.tensor(samples)

    loader = DataLoader(dataset(20), batch_size=4, collate_fn=collate)
    got: list[int] = []
    with pytest.raises(type(error)):
        _collect(loader, got)
    other = DataLoader(dataset(20), batch_size=4, collate_fn=collate)
    other.load_state_dict(loader.state_dict())
    _collect(other, got)
    assert got == list(range(20))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [data.WithIterator, data.Plain])
def test_a_turn_of_an_iterable_that_failed_and_was_passed_by_stays_so(
    dataset: Any, workers: int, every: int
) -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        if 6 in samples:
            raise ValueError("always bad")
        return torch.tensor(samples)

    def make() -> DataLoader[Any]:
        way = {"num_workers": workers, "worker_kind": "thread"} if workers else {}
        return DataLoader(dataset(24), batch_size=4, collate_fn=collate, snapshot_every_n_steps=every, **way)  # type: ignore[arg-type]

    loader = make()
    batches, got = iter(loader), list[int]()
    with pytest.raises(ValueError, match="always bad"):
        _collect(batches, got)
    got += next(batches).tolist()
    other = make()
    other.load_state_dict(loader.state_dict())
    _collect(other, got)
    assert got == [number for number in range(24) if number not in range(4, 8)]


def test_a_state_is_not_lost_if_going_on_from_it_is_interrupted() -> None:
    loader = DataLoader(data.Numbers(40), batch_size=2)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    sampler = Impatient(40)
    other = DataLoader(data.Numbers(40), batch_size=2, sampler=sampler)
    own = other.state_dict()
    state = loader.state_dict() | {"random": own["random"], "settings": own["settings"]}
    other.load_state_dict(state)
    with pytest.raises(KeyboardInterrupt):
        iter(other)
    assert other.state_dict()["yielded"] == 5
    assert next(iter(other)).tolist() == [10, 11]


class Impatient(torch.utils.data.Sampler[int]):
    """Somebody presses Ctrl-C while it is brought to its place."""

    def __init__(self, length: int) -> None:
        self.length, self.interrupted = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            if number == 4 and not self.interrupted:
                self.interrupted += 1
                raise KeyboardInterrupt
            yield number
