"""Batches of the JAX loader and of the host's, in a form that can be compared."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FIXED_SHAPE = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask")


def contents(batches: Any) -> list[dict[str, Any]]:
    return [
        {n: np.array(v).tolist() if hasattr(v, "shape") else v for n, v in batch.items()} for batch in batches
    ]


def one_device_sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))
