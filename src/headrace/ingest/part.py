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
from typing import Any, TypeVar

from headrace.errors import SettingsError

_PART = re.compile(r"(?P<number>[0-9]{1,9}|auto)/(?P<count>[0-9]{1,9})")
_SLURM_NUMBER, _SLURM_FIRST = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN"
_SLURM_COUNT, _SLURM_STEP = "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_STEP"
_SLURM_LAST = "SLURM_ARRAY_TASK_MAX"
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


def parse_part(text: Any, environment: Mapping[str, str] | None = None) -> Part:
    """`3/16`, or what a batch scheduler says: `auto` for Slurm's arrays, `auto/16` for Kubernetes' indexed Jobs and for
    arrays whose numbers are those of the parts."""
    environment = os.environ if environment is None else environment
    if text == "auto":
        return _part_of_slurm_array(environment)
    match = _PART.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SettingsError(
            f"part={text!r}: must be like '3/16' (part 3 of 16, counted from 0), 'auto' in a Slurm array, or 'auto/16' "
            "in a Kubernetes Job"
        )
    count = int(match["count"])
    if match["number"] != "auto":
        return Part(int(match["number"]), count)
    # Slurm's number is the part itself here, so that some tasks of an array can be run again: --array=3,7.
    in_slurm = _KUBERNETES_NUMBER not in environment and _SLURM_NUMBER in environment
    name = _SLURM_NUMBER if in_slurm else _KUBERNETES_NUMBER
    return Part(_number_in(environment, name, f"part='{text}'"), count)


def _part_of_slurm_array(environment: Mapping[str, str]) -> Part:
    given = "part='auto'"
    if _SLURM_NUMBER not in environment and _KUBERNETES_NUMBER in environment:
        raise SettingsError(
            f"{given}: {_KUBERNETES_NUMBER} says which part this is, but not how many there are; use 'auto/16' for 16"
        )
    own = _number_in(environment, _SLURM_NUMBER, given)
    first = _number_in(environment, _SLURM_FIRST, given)
    number = own - first
    count = _number_in(environment, _SLURM_COUNT, given)
    step = max(1, _number_in(environment, _SLURM_STEP, given)) if environment.get(_SLURM_STEP) else 1
    if step > 1 and number % step == 0:
        # An array like 0-30:2 has the numbers 0, 2, 4 ...
        number //= step
    if (
        _SLURM_LAST in environment
        and _number_in(environment, _SLURM_LAST, given) != first + (count - 1) * step
    ):
        raise SettingsError(
            f"{given}: this Slurm array leaves out some numbers, so it cannot be said which part of how many this is; "
            "say how many parts there are, like part='auto/16', and the array's numbers are those of the parts"
        )
    return Part(number, count)


def _number_in(environment: Mapping[str, str], name: str, given: str) -> int:
    text = environment.get(name)
    if text is None:
        raise SettingsError(
            f"{given}: {name} is not set, so no batch scheduler says which part this is; name the part, like "
            "part='3/16'"
        )
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise SettingsError(f"{given}: {name}={text[:40]!r} is not a number; name the part, like part='3/16'")
    return int(text)
