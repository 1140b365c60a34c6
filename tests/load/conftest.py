"""The clock that Loaders with worker processes ask, held by a test."""

import pytest

from tests.workers.waiting import HeldClock


@pytest.fixture
def held_clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    return HeldClock(monkeypatch)
