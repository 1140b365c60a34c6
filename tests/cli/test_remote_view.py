"""The words for what the order of remote data costs."""

import pytest

from headrace.cli.remote_view import cost_lines
from headrace.measure.doctor.remote_cost import RemoteCost


def mixing(**changes: float | None) -> str:
    figures = {
        "batch_rows": 256,
        "seq_len": 2048,
        "data_bytes": 10**9,
        "units": 250,
        "units_per_batch": 128.0,
        "shards": 10,
        "shards_per_batch": 10.0,
        "variance": 2.0,
        "fetched_per_used": 1.0,
        "requests_per_batch": 3.0,
        "requests_per_epoch": 250,
        "working_set_bytes": 10**8,
        "stays_in_memory": False,
        "beginning_bytes": 10**8,
        "beginning_requests": 100,
    }
    cost = RemoteCost(order="units", whole_units=True, **{**figures, **changes})  # type: ignore[arg-type]
    return dict(cost_lines({"": cost}))["mixing"]


def test_it_says_for_which_rows_and_batches() -> None:
    assert mixing().startswith(
        "shuffle='units': a batch of 256 rows of 2,048 tokens comes from 128 units in 10 of 10"
    )
    assert "a batch of 256 records comes from" in mixing(seq_len=None)


@pytest.mark.parametrize(
    ("variance", "words"),
    [
        (2.0, "the variance of its mean is at worst 2 times that of a perfect shuffle"),
        (2.51, "the variance of its mean is at worst 2.5 times that of a perfect shuffle"),
        (1.0, "it is at least as well mixed as by a perfect shuffle"),
        (0.6, "it is at least as well mixed as by a perfect shuffle"),
    ],
)
def test_it_says_how_well_batches_are_mixed(variance: float, words: str) -> None:
    assert mixing(variance=variance).endswith(words)
