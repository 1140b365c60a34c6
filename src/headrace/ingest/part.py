"""One part of a build that several machines share: every n-th task of the plan.

A batch scheduler starts the same command everywhere, and each copy of it is told which part it is:

    build(..., part="0/4")      tasks 0, 4, 8, ...
    build(..., part="1/4")      tasks 1, 5, 9, ...
    build(..., finish=True)     when all parts are done: the manifest

The plan is a function of the inputs and settings, so all parts have the same plan without talking to each other.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.errors import SettingsError

_PART = re.compile(r"(?P<number>\d{1,9}|auto)/(?P<count>\d{1,9})")
_SLURM_NUMBER, _SLURM_FIRST = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN"
_SLURM_COUNT, _SLURM_STEP = "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_STEP"
_KUBERNETES_NUMBER = "JOB_COMPLETION_INDEX"

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`; the first is part 0."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SettingsError(f"part='{self}': there must be at least one part")
        if not 0 <= self.number < self.count:
            raise SettingsError(
                f"part='{self}': parts are counted from 0, so the last of {self.count} is {self.count - 1}/{self.count}"
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, items: Sequence[_Item]) -> list[_Item]:
        return list(items[self.number :: self.count])


def parse_part(text: str, environment: Mapping[str, str] | None = None) -> Part:
    """`3/16`, or what a batch scheduler says: `auto` for Slurm's arrays, `auto/16` for Kubernetes' indexed Jobs."""
    environment = os.environ if environment is None else environment
    if text == "auto":
        return _part_of_slurm_array(environment)
    match = _PART.fullmatch(text)
    if match is None:
        raise SettingsError(
            f"part={text!r}: must be like '3/16' (part 3 of 16, counted from 0), 'auto' in a Slurm array, or 'auto/16' "
            "in a Kubernetes Job"
        )
    count = int(match["count"])
    if match["number"] != "auto":
        return Part(int(match["number"]), count)
    return Part(_number_in(environment, _KUBERNETES_NUMBER, f"part='{text}'"), count)


def _part_of_slurm_array(environment: Mapping[str, str]) -> Part:
    given = "part='auto'"
    if _SLURM_NUMBER not in environment and _KUBERNETES_NUMBER in environment:
        raise SettingsError(
            f"{given}: {_KUBERNETES_NUMBER} says which part this is, but not how many there are; use 'auto/16' for 16"
        )
    number = _number_in(environment, _SLURM_NUMBER, given) - _number_in(environment, _SLURM_FIRST, given)
    step = int(environment.get(_SLURM_STEP) or 1)
    if step > 1 and number % step == 0:
        # An array like 0-30:2 has the numbers 0, 2, 4 ...
        number //= step
    return Part(number, _number_in(environment, _SLURM_COUNT, given))


def _number_in(environment: Mapping[str, str], name: str, given: str) -> int:
    text = environment.get(name)
    if text is None:
        raise SettingsError(
            f"{given}: {name} is not set, so this is no task of a batch scheduler; name the part, like part='3/16'"
        )
    if not text.isdecimal() or len(text) > 9:
        raise SettingsError(f"{given}: {name}={text[:40]!r} is not a number; name the part, like part='3/16'")
    return int(text)
