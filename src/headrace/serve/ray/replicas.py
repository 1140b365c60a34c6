"""The servers on a Ray cluster, as the process that has started them sees them.

Ray places them and starts them again; here is how many there are, and what each has said last. Nothing here waits for
a server longer than `look` says: one may be without a place, or on a node that is gone.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import HeadraceError
from headrace.serve.autoscale import Seen
from headrace.serve.peers import error_of
from headrace.serve.ray.actors import NAMESPACE, Replica

_PLACE_SECONDS = 10.0
"""How long a server may be without a place before the user is told."""
_AGAIN_SECONDS = 10.0
"""When one that could not start is started again."""
_LEAVE_SECONDS = 10.0
"""How long a server may take to end beyond the time in which it answers."""


@dataclass(eq=False)
class _Placed:
    number: int
    actor: Any
    started_at: float
    asked: Any = None
    """The answer that is under way."""
    seen: dict[str, Any] = field(default_factory=dict)
    """What it has said last; empty if it has not, or is being started again."""
    is_told: bool = False
    """Whether the user knows that it has no place, or has failed."""
    failed_at: float | None = None
    leave_by: float | None = None

    @property
    def phase(self) -> str:
        return str(self.seen.get("phase", "placing"))

    @property
    def addresses(self) -> list[str]:
        return list(self.seen.get("addresses", []))

    @property
    def is_leaving(self) -> bool:
        return self.leave_by is not None


class Replicas:
    def __init__(
        self,
        ray: Any,
        version: str,
        settings: bytes,
        *,
        name: str,
        processors: int,
        drain_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        self._ray, self._version, self._settings = ray, version, settings
        self._name = name
        self._processors, self._drain_seconds, self._tell = processors, drain_seconds, tell
        self._placed: list[_Placed] = []
        self._numbers = 0
        self._was_ready = False
        """Whether any of them ever was."""
        self._answered: dict[tuple[int, str], int] = {}
        """How many answers each client of each server had, the last time."""

    def __len__(self) -> int:
        return len(self._placed)

    @property
    def addresses(self) -> list[str]:
        """Where servers listen. Those that leave are listed until they have ended: they still send answers."""
        return [address for each in self._placed for address in each.addresses]

    # How many

    def adjust(self, wanted: int, now: float) -> None:
        """Start servers, or let some leave, so that as many stay as are wanted."""
        staying = [each for each in self._placed if not each.is_leaving]
        for _ in range(wanted - len(staying)):
            self._start(now)
        # First those that do not work yet, and then the youngest.
        by_use = sorted(staying, key=lambda each: (each.phase == "ready", -each.number))
        for each in by_use[: max(0, len(staying) - wanted)]:
            self._let_leave(each, now)

    def _start(self, now: float) -> None:
        self._numbers += 1
        actor_class = self._ray.remote(Replica).options(
            name=f"{self._name}/{self._numbers}",
            namespace=NAMESPACE,
            num_cpus=self._processors,
            max_restarts=-1,
            scheduling_strategy="SPREAD",
        )
        actor = actor_class.remote(self._version, self._settings)
        self._placed.append(_Placed(self._numbers, actor, now))

    def _let_leave(self, each: _Placed, now: float) -> None:
        each.leave_by = now + self._drain_seconds + _LEAVE_SECONDS
        if each.phase in ("starting", "ready"):
            with contextlib.suppress(self._ray.exceptions.RayError):
                each.actor.leave.remote()
        else:
            self._kill(each)

    def _kill(self, each: _Placed) -> None:
        self._placed.remove(each)
        with contextlib.suppress(Exception):
            self._ray.kill(each.actor)

    def kill_all(self) -> None:
        for each in list(self._placed):
            self._kill(each)

    # What they say

    def look(self, now: float, wait_seconds: float) -> None:
        """Ask all servers how they are doing. Their error, if none can start."""
        for each in self._placed:
            if each.asked is None:
                each.asked = each.actor.look.remote()
        asked = [each.asked for each in self._placed]
        if asked:
            ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=wait_seconds)
            for each in [each for each in self._placed if each.asked in ready]:
                self._take(each, now)
        for each in list(self._placed):
            self._look_after(each, now)

    def _take(self, each: _Placed, now: float) -> None:
        asked, each.asked = each.asked, None
        before = each.addresses
        try:
            each.seen = self._ray.get(asked)
        except self._ray.exceptions.RayError:
            # Its process or its node has died.
            if not each.is_leaving and each.seen:
                self._tell(f"{', '.join(before) or 'a server'} is gone; Ray starts it again")
            each.seen, each.started_at, each.is_told, each.failed_at = {}, now, False, None
            return
        self._was_ready = self._was_ready or each.phase == "ready"
        for address in each.addresses:
            if address not in before:
                self._tell(f"serving on {address}")

    def _look_after(self, each: _Placed, now: float) -> None:
        if each.leave_by is not None:
            # One that is not leaving although it was told has been started again.
            if each.phase in ("ended", "failed", "placing") or now > each.leave_by:
                self._kill(each)
        elif each.phase == "failed":
            self._look_after_failed(each, now)
        elif each.phase == "placing" and not each.is_told and now - each.started_at > _PLACE_SECONDS:
            each.is_told = True
            self._tell(
                f"a server has no place yet: it needs a node with {self._processors} free processors and Ray's worker "
                "processes on it; the others go on"
            )

    def _look_after_failed(self, each: _Placed, now: float) -> None:
        error = self._error_of(each)
        if not self._was_ready:
            raise error
        if each.failed_at is None:
            each.failed_at = now
            self._tell(f"a server cannot start, and is tried again: {error}")
        elif now - each.failed_at > _AGAIN_SECONDS:
            each.seen, each.failed_at = {}, None
            with contextlib.suppress(Exception):
                self._ray.kill(each.actor, no_restart=False)

    def _error_of(self, each: _Placed) -> HeadraceError:
        return error_of(each.seen["kind"], f"on the node {each.seen['node']}: {each.seen['problem']}")

    def seen(self) -> Seen:
        """What matters for how many servers there should be."""
        states = [
            (each.number, each.seen["state"])
            for each in self._placed
            if each.phase == "ready" and each.seen["state"] and not each.is_leaving
        ]
        slots = sum(state["slots"] for _, state in states)
        running = sum(state["running"] for _, state in states)
        return Seen(len(states), self._waited(states), running / slots if slots else 0.0)

    def _waited(self, states: list[tuple[int, dict[str, Any]]]) -> float:
        """The largest share of all clients that take batches now: others have waited long ago."""
        answered: dict[tuple[int, str], int] = {}
        waited = 0.0
        for number, state in states:
            for client in state["clients"]:
                key = number, client["name"]
                answered[key] = client["answered"]
                if client["asked"] or client["answered"] != self._answered.get(key):
                    waited = max(waited, client["waited"])
        self._answered = answered
        return waited
