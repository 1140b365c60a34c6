"""What goes wrong in DataLoaders in tests: worker processes import it from here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from tests.torch.dataloader.datasets import Items


class TwoArguments(Exception):
    """Cannot be made again from a message alone."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")


class Unfriendly(Exception):
    """Has a message, as some exceptions of libraries do, and takes it by name."""

    message = "a default"

    def __init__(self, message: str) -> None:
        super().__init__(message)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("sample is bad"),
    "key": lambda: KeyError("a key"),
    "index": lambda: IndexError("list index out of range"),
    "os": lambda: FileNotFoundError(2, "No such file or directory", "/nowhere"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "stop": lambda: StopIteration("no more"),
    "two arguments": lambda: TwoArguments(3, "cannot be made again"),
    "message": lambda: Unfriendly("it says so"),
    "not implemented": lambda: NotImplementedError(),
    "assertion": lambda: AssertionError("it is so"),
}


@dataclass
class Failing:
    """A function of the index that fails for some of them."""

    kind: str
    at: tuple[int, ...] = (4,)

    def __call__(self, index: int) -> int:
        if index in self.at:
            raise ERRORS[self.kind]()
        return index


@dataclass
class FailingOnBatch:
    """The same for a collate_fn."""

    at: int = 4

    def __call__(self, batch: list[int]) -> list[int]:
        if self.at in batch:
            raise ValueError(f"batch {batch} is bad")
        return batch


def fails_to_begin(worker: int) -> None:
    raise OSError(f"worker {worker} has no disk")


def cannot_iterate() -> Iterator[int]:
    raise LookupError("there is nothing to iterate over")


def breaks_off() -> Iterator[int]:
    yield 1
    yield 2
    raise ValueError("the stream broke off")


def leaves(index: int) -> int:
    if index == 4:
        raise SystemExit(3)
    return index


def is_interrupted(index: int) -> int:
    if index == 4:
        raise KeyboardInterrupt
    return index


def fails_locally(index: int) -> int:
    class OnlyHereError(Exception):
        pass

    if index == 4:
        raise OnlyHereError("of a class that no other process has")
    return index


def fails_in_several_ways(index: int) -> int:
    if index == 4:
        raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])
    return index


def unpicklable(index: int) -> Any:
    return (lambda: index) if index == 4 else index


class OnlyThere:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return (int, ("not a number",))


def unopenable(index: int) -> Any:
    return OnlyThere() if index == 4 else index


@dataclass
class Waits:
    """A function of the index that waits, for one of them, until it is let go."""

    gate: Any

    def __call__(self, index: int) -> int:
        if index == 4 and not self.gate.wait(60):
            raise TimeoutError("nobody opened the gate")
        return index


def fails_with_a_cause(index: int) -> int:
    try:
        return {0: 0, 1: 1}[index]
    except KeyError as error:
        raise ValueError(f"there is no item {index}") from error


class FailsAtOnce(Items):
    """`__getitems__` fails, though each item could be had."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 4 in indices:
            raise BufferError(f"cannot have {indices} at once")
        return list(indices)


class WithoutIterator(IterableDataset[int]):
    def __iter__(self) -> Any:
        return 5


class CannotBegin:
    """A sampler."""

    def __iter__(self) -> Iterator[int]:
        return cannot_iterate()

    def __len__(self) -> int:
        return 7
