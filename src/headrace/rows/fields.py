"""The fields of a batch: some are made ahead of time, the others on first access.

A batch of token rows can hold seven fields, and most trainers use two or three. Users need not say which. At first a
Loader makes only tokens ahead of time. A field that the loop accesses is made at once, and ahead of time from then on:

    batch 0    made ahead: tokens            the loop uses tokens and labels: labels are made now
    batch 1    made ahead: tokens            it was already under way: labels are made on access
    batch 2    made ahead: tokens, labels

So a loop pays only for what it uses. The values of a field do not depend on when it is made.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any


class Fields(dict[str, Any]):
    """A dict of the fields made so far; `fields[name]` makes any other of the `names`."""

    __slots__ = ("make", "names")

    def __init__(
        self, names: Iterable[str], make: Callable[[str], Any], made: dict[str, Any] | None = None
    ) -> None:
        super().__init__(made or ())
        self.names = tuple(names)
        self.make = make

    def __missing__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        value = self.make(name)
        # Another thread may have made it meanwhile; all should see the same array.
        return self.setdefault(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: self[name] for name in self.names},)


def names_of(fields: dict[str, Any]) -> Collection[str]:
    """The names of all fields of a batch, made or not."""
    return fields.names if isinstance(fields, Fields) else fields


def made_names(fields: dict[str, Any]) -> list[str]:
    """The names of the fields that are made already."""
    return [name for name in names_of(fields) if name in fields]


def late_fields(fields: dict[str, Any]) -> Fields | None:
    """Fields that make what is missing, without holding what is made; None if nothing is missing."""
    if not isinstance(fields, Fields) or len(fields) == len(fields.names):
        return None
    return Fields(fields.names, fields.make)


class UsedFields:
    """The fields that the loop has used so far, and that are worth making ahead of time."""

    def __init__(self, names: Iterable[str], ahead: Iterable[str]) -> None:
        self.names = tuple(names)
        self.ahead = frozenset(ahead)

    def add(self, name: str) -> None:
        """Make this field ahead of time from now on."""
        self.ahead |= {name}
