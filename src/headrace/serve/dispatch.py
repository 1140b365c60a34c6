"""Which server is asked for which batch, and when another one is asked as well. Pure: no threads, sockets or clocks.

Batches are tickets. A ticket is sent to the server that is expected to answer first, by how long its answers took
lately and how many it still owes. A ticket is sent to another server too

- when its server is gone, or gives no sign of life: at once, with all tickets of that server;
- when its answer is late: after three times the expected time, and not before 0.2 seconds;
- when its server fails on it, or has no time for it.

The first answer counts, and any other is ignored: since a batch is a function of its position, they are equal.

    dispatch.want(ticket, now)
    for action in dispatch.due(now): ...            Send(server, ticket), Stop(server, ticket), ...
    dispatch.answered(server, ticket, now)          True if it is the first answer
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

LATE_SECONDS = 0.2
_LATE_TIMES = 3.0
_LATE_UNKNOWN_SECONDS = 5.0
"""When an answer is late if nobody knows how long answers take."""
PING_SECONDS = 0.2
"""A server that is owed nothing for so long is asked for a sign of life."""
SILENT_SECONDS = 0.5
"""A server that gives no sign of life for so long is left."""
DROP_SECONDS = 10.0
"""After so much silence the connection is given up."""
_MOST_FAILURES = 2
"""A ticket on which so many servers fail has failed."""
_MOST_ATTEMPTS = 3
_NEWS = 0.25
"""How much the latest answer counts among those before it."""
_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it are spread evenly between whole numbers."""
_QUICK_SECONDS, _MOST_QUICK = 0.05, 64
"""Answers that take no time to make are asked for many at a time: what takes time is the way."""
_LOYALTY = 0.7
"""A ticket goes to the server that was told of it before, unless another one is faster by that much."""
_REFUSED_SECONDS = 0.1
"""How long a server that had no time for a ticket is not asked for it again."""


class State(StrEnum):
    DOWN = "down"
    UP = "up"
    SILENT = "silent"
    LEAVING = "leaving"


@dataclass(eq=False)
class Server:
    """What is known about one server."""

    name: str
    slots: int = 1
    state: State = State.DOWN
    is_last_resort: bool = False
    """Whether it is asked only if no other server is up."""
    most: int | None = None
    """How many tickets it may have; None lets its slots decide."""
    owes: "dict[Ticket, Attempt]" = field(default_factory=dict)
    seconds: float | None = None
    """How long an answer takes, if nothing else waits there."""
    heard_at: float = 0.0
    asked_since: float | None = None
    """Since when it was asked for something and has not said anything, even if others have answered in its place."""
    pinged_at: float | None = None
    answers: int = 0
    late: int = 0
    """Answers that were late, so that another server was asked as well."""
    faults: int = 0
    """How often it was lost, was silent, or failed."""

    def expected(self, more: int = 1) -> float:
        """How long an answer to another request will take."""
        return (self.seconds or 0.0) * max(1.0, (len(self.owes) + more) / self.slots)

    @property
    def limit(self) -> int:
        """How many tickets it may have: two for each slot, or as many as it answers in a few milliseconds."""
        if self.most is not None:
            return self.most
        quick = int(_QUICK_SECONDS / self.seconds) if self.seconds else 0
        return self.slots * min(_MOST_QUICK, max(2, quick))


class Attempt(NamedTuple):
    sent_at: float
    expected: float
    crowd: float
    """How many requests there were for each slot."""


@dataclass(eq=False)
class Ticket:
    order: int
    """Lower numbers are needed earlier."""
    servers: list[Server] = field(default_factory=list)
    """Those that were sent the ticket and may answer."""
    failures: dict[Server, str] = field(default_factory=dict)
    not_before: dict[Server, float] = field(default_factory=dict)
    is_done: bool = False


class Send(NamedTuple):
    server: Server
    ticket: Ticket


class Stop(NamedTuple):
    """The server need not answer any more."""

    server: Server
    ticket: Ticket


class Ping(NamedTuple):
    server: Server


class Drop(NamedTuple):
    """Give up the connection."""

    server: Server


class Fail(NamedTuple):
    """All servers that are there have failed on the ticket."""

    ticket: Ticket


Action = Send | Stop | Ping | Drop | Fail


class Dispatch:
    def __init__(self, now: float = 0.0) -> None:
        self.servers: list[Server] = []
        self._tickets: dict[Ticket, None] = {}
        """All that are wanted and not answered."""
        self._unsent: dict[Ticket, None] = {}
        """Those of them that no server has."""
        self._shares: list[tuple[Server, float]] | None = None
        self._actions: list[Action] = []
        self._none_since: float | None = now
        """Since when no server has been up."""
        self.grace_seconds = 0.5
        """How long no other server must be up before the last resort is asked."""

    # What happens

    def want(self, ticket: Ticket) -> None:
        self._tickets[ticket] = self._unsent[ticket] = None

    def _end(self, ticket: Ticket) -> None:
        ticket.is_done = True
        self._tickets.pop(ticket, None)
        self._unsent.pop(ticket, None)

    def forget(self, ticket: Ticket) -> None:
        """Nobody needs the ticket any more."""
        self._end(ticket)
        for server in list(ticket.servers):
            self._actions.append(Stop(server, ticket))
            server.owes.pop(ticket, None)
        ticket.servers.clear()

    def came_up(self, server: Server, slots: int, now: float) -> None:
        server.state, server.slots, server.heard_at, server.pinged_at = State.UP, max(1, slots), now, None
        if server not in self.servers:
            self.servers.append(server)
        self._look_who_is_there(now)

    def heard(self, server: Server, now: float) -> None:
        """A sign of life."""
        server.heard_at, server.pinged_at, server.asked_since = now, None, None
        if server.state is State.SILENT:
            server.state = State.UP
            self._look_who_is_there(now)

    def leaves(self, server: Server, now: float) -> None:
        """It answers what it owes, and takes nothing new."""
        if server.state is not State.DOWN:
            server.state = State.LEAVING
            self._look_who_is_there(now)

    def lost(self, server: Server, now: float) -> None:
        """Its connection is gone, and with it all that it owes."""
        if server.state is not State.DOWN:
            server.faults += server.state is not State.LEAVING
            server.state = State.DOWN
        for ticket in list(server.owes):
            self._take_back(server, ticket)
        server.pinged_at = server.asked_since = None
        self._look_who_is_there(now)

    def remove(self, server: Server, now: float) -> None:
        self.lost(server, now)
        if server in self.servers:
            self.servers.remove(server)

    def answered(self, server: Server, ticket: Ticket, now: float) -> bool:
        """Whether this is the first answer, and wanted."""
        self.heard(server, now)
        attempt = server.owes.get(ticket)
        if attempt is not None:
            server.answers += 1
            self._learn(server, (now - attempt.sent_at) / attempt.crowd)
            self._take_back(server, ticket)
        if ticket.is_done:
            return False
        self._end(ticket)
        for other in list(ticket.servers):
            late = other.owes[ticket]
            took = (now - late.sent_at) / late.crowd
            if other.seconds is not None and took > other.seconds:
                # It takes at least that long.
                self._learn(other, took)
            self._actions.append(Stop(other, ticket))
            self._take_back(other, ticket)
        return True

    def failed(self, server: Server, ticket: Ticket, why: str, *, elsewhere: bool, now: float) -> bool:
        """Whether the ticket has failed for good. It has not if another server may well succeed (`elsewhere`)."""
        self.heard(server, now)
        self._take_back(server, ticket)
        if ticket.is_done:
            return False
        if elsewhere:
            ticket.not_before[server] = now + _REFUSED_SECONDS
            return False
        server.faults += 1
        ticket.failures[server] = why
        can_others = any(other not in ticket.failures for other in self._usable(now))
        if ticket.servers or (len(ticket.failures) < _MOST_FAILURES and can_others):
            return False
        self._end(ticket)
        return True

    def _learn(self, server: Server, seconds: float) -> None:
        before = server.seconds
        server.seconds = seconds if before is None else (1 - _NEWS) * before + _NEWS * seconds

    def _take_back(self, server: Server, ticket: Ticket) -> None:
        server.owes.pop(ticket, None)
        if server in ticket.servers:
            ticket.servers.remove(server)
            if not ticket.servers and not ticket.is_done:
                self._unsent[ticket] = None

    def _look_who_is_there(self, now: float) -> None:
        self._shares = None
        if any(server.state is State.UP for server in self.servers if not server.is_last_resort):
            self._none_since = None
        elif self._none_since is None:
            self._none_since = now

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for a ticket."""
        return bool(self._tickets)

    def nobody_since(self) -> float | None:
        """Since when no server has been up."""
        return self._none_since

    # What to do

    def due(self, now: float) -> list[Action]:
        """What to do now, with tickets that no server has.

        A ticket waits for a server that has much to do if that is still expected to answer first: otherwise the loop
        would wait for a slow server, and all tickets after that one with it.
        """
        reserved: dict[Server, int] = {}
        for ticket in sorted(self._unsent, key=_order):
            if not any(len(server.owes) < server.limit for server in self._usable(now)):
                break
            best = self._best(ticket, now, reserved)
            if best is None:
                self._give_up_if_all_failed(ticket, now)
            elif len(best.owes) < best.limit:
                self._send(best, ticket, now)
            else:
                reserved[best] = reserved.get(best, 0) + 1
        actions, self._actions = self._actions, []
        return actions

    def look(self, now: float) -> list[Action]:
        """What to do as time passes: to be called every few hundredths of a second while tickets are wanted."""
        self._shares = None
        for server in self.servers:
            self._look_after(server, now)
        for ticket in sorted(self._tickets, key=_order):
            self._look_at(ticket, now)
        return self.due(now)

    def _look_after(self, server: Server, now: float) -> None:
        owes_a_word = server.owes or server.asked_since is not None or server.state is State.SILENT
        if server.state is State.DOWN or not owes_a_word:
            server.pinged_at = None
            return
        if server.pinged_at is None:
            if now - max(server.heard_at, server.asked_since or 0.0) >= PING_SECONDS:
                server.pinged_at = now
                self._actions.append(Ping(server))
            return
        silence = now - server.pinged_at
        if silence >= DROP_SECONDS:
            self._actions.append(Drop(server))
            self.lost(server, now)
        elif silence >= SILENT_SECONDS and server.state in (State.UP, State.LEAVING):
            server.state = State.SILENT
            server.faults += 1
            self._look_who_is_there(now)

    def _look_at(self, ticket: Ticket, now: float) -> None:
        """Send a ticket to another server too, if its own are silent or late."""
        answering = [server for server in ticket.servers if server.state is not State.SILENT]
        if not ticket.servers or len(ticket.servers) >= _MOST_ATTEMPTS:
            return
        if answering and not self._is_late(ticket, answering, now):
            return
        best = self._best(ticket, now, {})
        if best is None or len(best.owes) >= 2 * best.limit:
            return
        self._send(best, ticket, now)
        for server in answering:
            server.late += 1

    def _send(self, best: Server, ticket: Ticket, now: float) -> None:
        crowd = max(1.0, (len(best.owes) + 1) / best.slots)
        if best.asked_since is None:
            best.asked_since = now
        best.owes[ticket] = Attempt(now, best.expected(), crowd)
        ticket.servers.append(best)
        self._unsent.pop(ticket, None)
        self._actions.append(Send(best, ticket))

    def _give_up_if_all_failed(self, ticket: Ticket, now: float) -> None:
        usable = list(self._usable(now))
        if (
            ticket.failures
            and not ticket.servers
            and usable
            and all(each in ticket.failures for each in usable)
        ):
            self.forget(ticket)
            self._actions.append(Fail(ticket))

    def _is_late(self, ticket: Ticket, answering: list[Server], now: float) -> bool:
        """Whether none of its servers has answered in good time, the latest one included."""
        return all(now >= self._late_at(server.owes[ticket]) for server in answering)

    def _late_at(self, attempt: Attempt) -> float:
        usual = attempt.expected or self._usual_seconds() or 0.0
        wait = max(LATE_SECONDS, _LATE_TIMES * usual) if usual else _LATE_UNKNOWN_SECONDS
        return attempt.sent_at + wait

    def _usual_seconds(self) -> float | None:
        known = [server.seconds for server in self.servers if server.seconds is not None]
        return min(known, default=None)

    def _usable(self, now: float) -> Iterator[Server]:
        is_alone = self._none_since is not None and now - self._none_since >= self.grace_seconds
        for server in self.servers:
            if server.state is State.UP and (is_alone or not server.is_last_resort):
                yield server

    def _best(self, ticket: Ticket, now: float, reserved: dict[Server, int]) -> Server | None:
        """The server that is expected to answer first; `reserved` are tickets that wait for it already."""
        unknown, owner = self._usual_seconds() or 0.0, self._owner(ticket.order)
        best, best_score = None, math.inf
        for server in self._usable(now):
            if server in ticket.servers or server in ticket.failures or not server.limit:
                continue
            if now < ticket.not_before.get(server, -math.inf):
                continue
            waiting = (len(server.owes) + reserved.get(server, 0) + 1) / server.slots
            seconds = unknown if server.seconds is None else server.seconds
            # Among equals, the one with the least to do.
            score = (seconds or 1e-6) * max(1.0, waiting) * (1 + 1e-3 * waiting)
            score *= _LOYALTY if server is owner else 1.0
            if score < best_score:
                best, best_score = server, score
        return best

    def planned(self, server: Server, numbers: range) -> list[int]:
        """Which of these tickets the server will probably get."""
        return [number for number in numbers if self._owner(number) is server]

    def _owner(self, number: int) -> Server | None:
        """Deals tickets out by speed, each always to the same server as long as speeds stay the same."""
        if self._shares is None:
            self._shares = self._deal()
        place = number * _GOLDEN % 1.0
        for server, end in self._shares:
            if place < end:
                return server
        return self._shares[-1][0] if self._shares else None

    def _deal(self) -> list[tuple[Server, float]]:
        """The share of each server that is up, as the end of its part of the numbers from 0 to 1."""
        up = [
            each for each in self.servers if each.state is State.UP and each.limit and not each.is_last_resort
        ]
        usual = self._usual_seconds() or 1.0
        speeds = [each.slots / (each.seconds or usual) for each in up]
        ends = itertools.accumulate(speeds)
        return [(server, end / sum(speeds)) for server, end in zip(up, ends, strict=True)]


def _order(ticket: Ticket) -> int:
    return ticket.order
