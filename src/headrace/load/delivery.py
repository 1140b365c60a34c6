"""How batches reach the consumer: unchanged, or through the adapter of a framework."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.load.sources import Batches


class Delivery:
    """Delivers batches unchanged. The adapters of frameworks override what they need to."""

    allocate: Callable[[int], NDArray[np.uint8]] | None = None
    """Allocates the memory of batches, if a special kind is needed."""
    convert: Callable[[Any], Any] | None = None
    """Converts a field when it is first accessed."""

    def deliver(self, batches: Batches) -> Batches:
        """The same batches, possibly on a device."""
        return batches
