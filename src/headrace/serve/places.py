"""Which rows a client has asked for, once it is known that a server can and may make them."""

import json
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order.mixture import Stages
from headrace.order.shuffle import ShuffleKind
from headrace.order.steps import ByLane, Steps
from headrace.order.world import World
from headrace.serve.description import Description
from headrace.serve.messages import Ask, Path, Rows

_MOST_STAGES_BYTES = 2**18
_MOST_POSITIONS = 4096
"""How many rows someone may ask for at once, if batches are not larger."""


class Places:
    def __init__(self, description: Description) -> None:
        self._description = description
        self._parsed = lru_cache(maxsize=16)(self._parse_stages)
        self._by_lane = lru_cache(maxsize=16)(self._make_by_lane)
        self._steps = lru_cache(maxsize=64)(self._make_steps)

    def positions(self, ask: Ask, rows: Rows) -> range | NDArray[np.int64]:
        """The positions of a request; a SettingsError if nobody should ask for that."""
        description, settings = self._description, self._description.settings
        if ask.stages is not None:
            if len(description.sources) == 1:
                raise SettingsError("stages: the data of the server is not a mixture")
            self._parsed(ask.stages)
        if ask.fields is not None and (settings["seq_len"] is None or description.functions):
            raise SettingsError("fields: can only be chosen for rows of tokens without functions")
        if rows.path is not None:
            return self._positions_of_step(rows.path, rows.step, ask.stages)
        positions = np.array(rows.positions, dtype=np.int64)
        if len(positions) > max(_MOST_POSITIONS, settings["batch_size"]):
            raise SettingsError(
                f"{len(positions):,} positions: at most {_MOST_POSITIONS:,} can be asked for at once"
            )
        return positions

    def _positions_of_step(self, path: Path, step: int, stages: bytes | None) -> range | NDArray[np.int64]:
        steps = self._steps(path, stages)
        if steps.count is not None and step >= steps.count:
            raise SettingsError(f"step {step}: the path has {steps.count} steps")
        first, end = steps.extent(step)
        if end >= 2**62:
            raise SettingsError(f"step {step}: is beyond the end of the stream")
        return range(first, end) if steps.are_contiguous else steps.positions(step)

    def _make_steps(self, path: Path, stages: bytes | None) -> Steps:
        settings = self._description.settings
        return Steps(
            start=path.start,
            stop=path.stop,
            batch_size=settings["batch_size"],
            world=World(path.rank, path.world_size),
            drop_last=settings["drop_last"],
            by_lane=self._by_lane(stages),
        )

    def _make_by_lane(self, stages: bytes | None) -> ByLane | None:
        description = self._description
        if description.loader_settings().shuffle.kind is not ShuffleKind.UNITS:
            return None
        return description.row_stream(None if stages is None else self._parsed(stages)).by_lane

    def _parse_stages(self, stages: bytes) -> Stages:
        if len(stages) > _MOST_STAGES_BYTES:
            raise SettingsError(
                f"weights of {len(stages):,} bytes: at most {_MOST_STAGES_BYTES:,} are expected"
            )
        try:
            parsed = Stages.from_part(json.loads(stages))
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"weights that cannot be read: {error}") from None
        sources = len(self._description.sources)
        if parsed.sources != sources:
            raise SettingsError(f"weights for {parsed.sources} sources, but the data has {sources}")
        return parsed
