"""What several files of tests use: crews that are closed, and programs that are ended, when their test is over."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.workers.crew import Crew
from tests.workers.left_behind import nothing_left_behind
from tests.workers.waiting import NEVER_SECONDS, HeldClock


@pytest.fixture
def make_crew() -> Iterator[Callable[..., Crew]]:
    """Crews that are closed after the test, whatever their workers are doing, and have then left nothing behind."""
    usual = {"workers": 1, "timeout_seconds": NEVER_SECONDS, "stage": "map"}
    crews: list[Crew] = []

    def make(work: Callable[[Any], Any], **settings: Any) -> Crew:
        crews.append(Crew(work, **{**usual, **settings}))
        return crews[-1]

    with nothing_left_behind():
        yield make
        while crews:
            crews.pop().close()


@pytest.fixture
def held_clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    return HeldClock(monkeypatch)
