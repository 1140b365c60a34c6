"""The clock that everything here is measured with. Whoever replaces these two functions holds the time, as tests do.

They are asked for where they are used, `clock.now()`, never imported by themselves.
"""

import time

now = time.perf_counter
"""Seconds, on a clock that only goes on."""

sleep = time.sleep
