"""A clock that a test holds: seconds pass when someone sleeps, and at no other time.

Targets of child processes find this file beside them, so it imports nothing of the tests.
"""

from headrace.measure import clock

TICK_SECONDS = 1e-6
"""Every look takes so long: a loop that waits for a time to pass comes to its end."""


class HeldClock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        self.seconds += TICK_SECONDS
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def hold_the_clock() -> HeldClock:
    """For the rest of this process: for a child that is measured."""
    held = HeldClock()
    clock.now, clock.sleep = held.now, held.sleep
    return held
