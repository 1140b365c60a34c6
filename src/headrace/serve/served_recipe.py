"""The recipe of a Loader whose rows are made by servers: everything about the stream is here, the rows are not."""

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.fork_lock import fork_lock
from headrace.load.settings import LoaderSettings
from headrace.order.mixture import Stages
from headrace.order.stream import RowStream
from headrace.rows.buffers import BufferPool
from headrace.rows.mix import Stop
from headrace.rows.recipe import Make, Recipe
from headrace.rows.token_rows import PackingReport
from headrace.rows.transform import apply_transforms
from headrace.serve.description import Description
from headrace.serve.fleet import Fleet
from headrace.serve.messages import Rows
from headrace.serve.peers import Batch

_URGENT = -1
"""Comes before all batches of an iteration: the loop waits for it."""


class Connect(Protocol):
    """Makes the connections of a process. It can be pickled."""

    addresses: tuple[str, ...]

    def __call__(self) -> Fleet: ...

    def ray_servers(self) -> Callable[[str], list[str]] | None:
        """Finds servers on a Ray cluster, if there is an address of any."""


class Servers:
    """How to reach the servers, and the connections of this process to them. It can be pickled without those."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._fleet: Fleet | None = None
        self._close: weakref.finalize[..., Servers] | None = None
        self._lock = fork_lock()

    def fleet(self) -> Fleet:
        """The connections of this process."""
        with self._lock:
            if self._fleet is None or not self._fleet.is_usable:
                self._forget()
                self._fleet = self._connect()
                self._close = weakref.finalize(self, self._fleet.close)
                self._close.atexit = False
            return self._fleet

    def _forget(self) -> Fleet | None:
        """The connections, which nothing here refers to any more."""
        fleet, self._fleet = self._fleet, None
        if self._close is not None:
            self._close.detach()
        return fleet

    def use(self, addresses: tuple[str, ...]) -> None:
        """These are the servers from now on."""
        with self._lock:
            self._connect.addresses = addresses
            if self._fleet is not None and self._fleet.is_usable:
                self._fleet.use(addresses, self._connect.ray_servers())

    def close(self) -> None:
        with self._lock:
            fleet = self._forget()
        if fleet is not None:
            fleet.end()

    def __getstate__(self) -> dict[str, Any]:
        return {"_connect": self._connect}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_connect"])  # type: ignore[misc]


@dataclass(frozen=True)
class ServedRecipe(Recipe):
    """Made from what the servers say about their Loader. `transforms` are functions that run in this process."""

    description: Description = field(kw_only=True)
    servers: Servers = field(kw_only=True)

    @cached_property
    def sources(self) -> list[Any]:
        raise SettingsError("the data of a RemoteLoader is on its servers")

    @cached_property
    def stream(self) -> RowStream:
        return self.description.row_stream(self.stages)

    @cached_property
    def rows_per_epoch(self) -> int:
        return self.description.rows_per_epoch

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        # As a state has them: only their beginnings, and only those of several sources.
        listed = str(self.description.stream.get("sources", self.data_digest))
        each = len(listed) // len(self.names)
        return tuple(
            listed[first : first + each].rstrip() for first in range(0, each * len(self.names), each)
        )

    @property
    def known_by_content(self) -> bool:
        return self.description.known_by_content

    @cached_property
    def data_digest(self) -> str:
        return str(self.description.stream["data"])

    @property
    def token_field(self) -> str | None:
        found: str | None = self.description.stream.get("token_field")
        return found

    @property
    def stage(self) -> str:
        own = [transform.name for transform in self.transforms]
        return " -> ".join(own) or self.description.stage

    @cached_property
    def row_bytes(self) -> int | None:
        return self.description.row_bytes

    @property
    def runs_user_code(self) -> bool:
        return bool(self.transforms) or self.description.runs_user_code

    @property
    def has_batch_functions(self) -> bool:
        return bool(self.transforms) or any(each.per == "batch" for each in self.description.functions)

    def check_room_for_documents(self, batch_size: int) -> None:
        """The server has checked it, for the same size of batches."""

    def reports(self) -> dict[str, PackingReport]:
        if self.settings.seq_len is None:
            return super().reports()
        content = self.servers.fleet().report(self._timeout_seconds)
        return {name: PackingReport(**report) for name, report in content.items()}

    @property
    def _timeout_seconds(self) -> float:
        assert isinstance(self.settings, LoaderSettings)
        return self.settings.timeout_seconds

    @property
    def names_fields(self) -> bool:
        """Whether requests say which fields they want: rows of tokens to which no function has been applied."""
        return self.settings.seq_len is not None and not self.description.functions

    @cached_property
    def _has_other_stages(self) -> bool:
        return len(self.names) > 1 and self.stages.to_json_with_counts() != self.description.stages

    def sent_stages(self, first: int, end: int) -> bytes | None:
        """The weights of the mixture at these positions, if they are not those that the servers have."""
        if not self._has_other_stages:
            return None
        return json.dumps(self.stages.part(first, end), separators=(",", ":")).encode()

    def evaluate(self, positions: NDArray[np.int64], pool: BufferPool) -> dict[str, Any]:
        wanted = Rows(positions=positions.tolist())
        fields = self.settings.token_fields if self.names_fields else None
        extent = (int(positions.min()), int(positions.max()) + 1) if len(positions) else (0, 1)
        columns = self.fetch(wanted, fields, self.sent_stages(*extent), pool, "these rows")
        if not self.transforms:
            return columns
        return self.finish(columns, positions, pool)

    def fetch(
        self, rows: Rows, fields: tuple[str, ...] | None, stages: bytes | None, pool: BufferPool, what: str
    ) -> dict[str, Any]:
        """Ask for rows and wait for them."""
        fleet = self.servers.fleet()
        batch = Batch(_URGENT, rows=rows, fields=fields, stages=stages, pool=pool)
        fleet.ask([batch])
        try:
            return fleet.result(batch, self._timeout_seconds, lambda: what)
        except BaseException:
            fleet.forget([batch])
            raise

    def finish(
        self, columns: dict[str, Any], positions: NDArray[np.int64], pool: BufferPool
    ) -> dict[str, Any]:
        """Apply the functions of this process to what the servers have made."""
        keys = self.stream.sample_keys(self.stream.at(positions))
        before = len(self.description.functions)
        return apply_transforms(self.transforms, columns, keys, positions, pool, before)

    def maker(self, steps: Any, pool: BufferPool, used: Any = None) -> Make:
        raise SettingsError("batches of a RemoteLoader come from its servers")


def served_recipe(description: Description, servers: Servers, settings: LoaderSettings) -> ServedRecipe:
    return ServedRecipe(
        names=tuple(source.name for source in description.sources),
        data=(),
        stages=Stages.from_json(description.stages),
        stop=Stop(description.stop),
        settings=settings,
        description=description,
        servers=servers,
    )
