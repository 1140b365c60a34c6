"""The rank of a process, and the number of ranks."""

import operator
from dataclasses import dataclass

from headrace.errors import SettingsError


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        for attribute, name in (("rank", "rank"), ("size", "world_size")):
            value = getattr(self, attribute)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise SettingsError(f"{name}={value!r}: must be a whole number")
            object.__setattr__(self, attribute, operator.index(value))
        if self.size < 1:
            raise SettingsError(f"world_size={self.size}: must be at least 1")
        if not 0 <= self.rank < self.size:
            raise SettingsError(
                f"rank={self.rank}: must be 0 to {self.size - 1}, since world_size={self.size}"
            )
