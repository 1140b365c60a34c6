"""A Writer that fails at any point and goes on, or is resumed: nothing acknowledged is lost or doubled."""

from pathlib import Path

import pytest

from tests.ingest import faults

SOME, MANY = 25, 3000


@pytest.mark.parametrize("count", [SOME, pytest.param(MANY, marks=pytest.mark.soak)])
@pytest.mark.parametrize("sequel", ["go on", "close", "resume"])
@pytest.mark.parametrize("kind", ["full", "memory", "interrupt"])
def test_nothing_that_was_acknowledged_is_lost_or_doubled(
    kind: str, sequel: str, count: int, tmp_path: Path
) -> None:
    [without] = faults.run(tmp_path, [(kind, 0)], sequel)
    assert (without["hits"], without["problem"]) == (0, "")
    moments = sorted({1 + number * without["moments"] // count for number in range(count)})
    answers = faults.run(tmp_path, [(kind, moment) for moment in moments], sequel)
    assert all(answer["hits"] for answer in answers)
    assert [answer["problem"] for answer in answers if answer["problem"]] == []
