"""A Writer that fails at any point and goes on, or is resumed: nothing acknowledged is lost or doubled."""

from pathlib import Path

import pytest

from tests.ingest import faults

SOME, MANY = 4, 3000


@pytest.mark.parametrize("count", [SOME, pytest.param(MANY, marks=pytest.mark.soak)])
@pytest.mark.parametrize("sequel", ["go on", "close", "resume"])
@pytest.mark.parametrize("kind", ["full", "memory", "interrupt"])
def test_nothing_that_was_acknowledged_is_lost_or_doubled(
    kind: str, sequel: str, count: int, tmp_path: Path
) -> None:
    without, *answers = faults.run(tmp_path, kind, count, sequel)
    assert (without["hits"], without["problem"]) == (0, "")
    assert all(answer["hits"] for answer in answers)
    assert [answer for answer in answers if answer["problem"]] == []
