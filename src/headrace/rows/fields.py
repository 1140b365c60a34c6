"""The fields of a batch: those that were made ahead, and those that are made when someone first asks.

A batch of token rows can hold seven fields, and most trainers use two or three. Nobody has to say which. A Loader
makes tokens ahead, and nothing else at first; what is asked for is made there and then, and from then on ahead:

    batch 0    made ahead: tokens            the loop asks for tokens and labels: labels are made now
    batch 1    made ahead: tokens            it was under way already: labels are made when they are asked for
    batch 2    made ahead: tokens, labels

So a loop pays for what it uses. A field has the same values whenever it is made.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any


class Fields(dict[str, Any]):
    """A dict of what is there; `fields[name]` makes any other of the `names`."""

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
        # Another thread may have made it meanwhile: all should see one array.
        return self.setdefault(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: self[name] for name in self.names},)


def names_of(fields: dict[str, Any]) -> Collection[str]:
    """All that a batch can be asked for, made or not."""
    return fields.names if isinstance(fields, Fields) else fields


def made_names(fields: dict[str, Any]) -> list[str]:
    """Those that nobody would have to wait for."""
    return [name for name in names_of(fields) if name in fields]


def late_fields(fields: dict[str, Any]) -> Fields | None:
    """A way to make those that are not there yet, which holds none of those that are; None if all are there."""
    if not isinstance(fields, Fields) or len(fields) == len(fields.names):
        return None
    return Fields(fields.names, fields.make)


class UsedFields:
    """What a Loader's batches have been asked for: the fields that are worth making ahead."""

    def __init__(self, names: Iterable[str], ahead: Iterable[str]) -> None:
        self.names = tuple(names)
        self.ahead = frozenset(ahead)

    def add(self, name: str) -> None:
        """From now on, this one too."""
        self.ahead |= {name}
