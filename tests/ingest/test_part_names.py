"""Which part of a build this is: as it was given, or as a batch scheduler says."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SettingsError
from headrace.ingest.part import Part, parse_part
from tests.properties import examples


@given(items=st.integers(0, 100), count=st.integers(1, 30))
@examples(100)
def test_parts_are_all_tasks_once(items: int, count: int) -> None:
    parts = [Part(number, count).of(list(range(items))) for number in range(count)]
    assert sorted(task for part in parts for task in part) == list(range(items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("text", "environment", "part"),
    [
        ("3/16", {}, Part(3, 16)),
        ("0/1", {}, Part(0, 1)),
        (
            "auto",
            {"SLURM_ARRAY_TASK_ID": "12", "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_COUNT": "4"},
            Part(2, 4),
        ),
        (
            "auto",
            {
                "SLURM_ARRAY_TASK_ID": "14",
                "SLURM_ARRAY_TASK_MIN": "10",
                "SLURM_ARRAY_TASK_COUNT": "4",
                "SLURM_ARRAY_TASK_STEP": "2",
            },
            Part(2, 4),
        ),
        ("auto/16", {"JOB_COMPLETION_INDEX": "15"}, Part(15, 16)),
        ("auto/16", {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3"}, Part(7, 16)),
    ],
)
def test_schedulers_say_which_part_it_is(text: str, environment: dict[str, str], part: Part) -> None:
    assert parse_part(text, environment) == part


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        ("16/16", {}, "counted from 0, so the last of 16 is 15/16"),
        ("0/0", {}, "at least one part"),
        ("3", {}, "must be like '3/16'"),
        ("-1/4", {}, "must be like '3/16'"),
        (3, {}, "part=3: must be like '3/16'"),
        ("\u0663/\u0664", {}, "must be like '3/16'"),
        (
            "auto",
            {
                "SLURM_ARRAY_TASK_ID": "0",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_ARRAY_TASK_COUNT": "1",
                "SLURM_ARRAY_TASK_STEP": "x",
            },
            "SLURM_ARRAY_TASK_STEP='x' is not a number",
        ),
        ("auto", {}, "SLURM_ARRAY_TASK_ID is not set"),
        ("auto", {"JOB_COMPLETION_INDEX": "1"}, "use 'auto/16' for 16"),
        (
            "auto",
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_MIN": "3",
                "SLURM_ARRAY_TASK_MAX": "7",
                "SLURM_ARRAY_TASK_COUNT": "2",
            },
            "leaves out some numbers.*like part='auto/16'",
        ),
        ("auto/4", {}, "JOB_COMPLETION_INDEX is not set"),
        ("auto/4", {"JOB_COMPLETION_INDEX": "x"}, "is not a number"),
        ("auto/4", {"JOB_COMPLETION_INDEX": "4"}, "the last of 4 is 3/4"),
    ],
)
def test_parts_that_are_none(text: Any, environment: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_part(text, environment)
