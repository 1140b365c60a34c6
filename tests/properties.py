"""How many examples Hypothesis tries of a property: as many as its test says, and more in long runs."""

import os

from hypothesis import settings

TIMES = int(os.environ.get("EXAMPLES", "1"))
"""How many times as many as in the ordinary run."""


def examples(count: int) -> settings:
    """`@examples(40)` above a property: 40 examples in the ordinary run, 400 with EXAMPLES=10."""
    return settings(max_examples=count * TIMES)
