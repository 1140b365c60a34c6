"""How batches reach the consumer: as they are, or through a framework's adapter, whatever source they come from."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.load.sources import Batches


class Delivery:
    """As they are. The adapters of frameworks change what they need to."""

    allocate: Callable[[int], NDArray[np.uint8]] | None = None
    """Where the memory of batches comes from, if it has to be of a kind of its own."""
    convert: Callable[[Any], Any] | None = None
    """What a field becomes when it is first asked for."""

    def deliver(self, batches: Batches) -> Batches:
        """The same batches, perhaps on a device."""
        return batches
