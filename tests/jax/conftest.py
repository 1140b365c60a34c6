"""The dataset that tests of the JAX loader read."""

import numpy as np
import pytest

import headrace


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """No two tokens are equal, so a row in the wrong place shows."""
    path = tmp_path_factory.mktemp("jax") / "data"
    first = 1
    with headrace.Writer(path, {"tokens": "uint32[*]"}, shard_bytes=500) as writer:
        for length in np.random.default_rng(0).integers(1, 24, 100).tolist():
            writer.write({"tokens": np.arange(first, first + length, dtype=np.uint32)})
            first += length
    return str(path)
