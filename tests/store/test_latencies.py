"""From when on a request is so slow that it is sent a second time."""

import pytest

from headrace.store.latencies import Latencies


def test_patience_grows_with_what_is_usual_for_the_size():
    latencies = Latencies(least_seconds=1.0)
    for _ in range(19):
        latencies.add(4 << 20, 0.5)
    assert latencies.patience(4 << 20) is None
    latencies.add(4 << 20, 0.5)
    assert latencies.patience(4 << 20) == pytest.approx(1.5)
    assert latencies.patience(5 << 20) == pytest.approx(1.5)
    assert latencies.patience(100) is None
    for _ in range(100):
        latencies.add(4 << 20, 0.01)
    assert latencies.patience(4 << 20) == 1.0


def test_a_few_slow_ones_do_not_make_it_more_patient():
    latencies = Latencies(least_seconds=0.0)
    for number in range(100):
        latencies.add(1000, 30.0 if number % 25 == 0 else 0.1)
    assert latencies.patience(1000) == pytest.approx(0.3)
