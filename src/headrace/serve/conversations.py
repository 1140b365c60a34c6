"""What servers are told, and what they say: requests for batches, answers, and the loss of connections.

Every connection has threads of its own, which receive. Whoever has news tells `Dispatch` under the lock, and carries
out what it decides.
"""

import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import numpy as np

from headrace.errors import HeadraceError, StageError
from headrace.serve import messages
from headrace.serve.arrivals import Arrival, Arrivals
from headrace.serve.connection import Arrived, Bytes, Events
from headrace.serve.dispatch import Action, Dispatch, Drop, Fail, Ping, Send, State, Stop
from headrace.serve.greetings import Greetings
from headrace.serve.messages import ON_THE_SERVER, Answer, Ask, Cancel, Failed, Reply, Request
from headrace.serve.peers import Batch, Peer, count, error_of, opened

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""How long to wait before connecting again, after so many failures in a row."""
_REFUSED_SECONDS = 15.0
_LONG_SECONDS = 1.0
"""A loop that waits so long for one batch waits all of its time."""


class Conversations:
    def __init__(
        self, greetings: Greetings, wake: Callable[[], None], unless_interrupted: AbstractContextManager[None]
    ) -> None:
        """`wake` is called when there is something to do for the thread that keeps time."""
        self._greetings, self._wake, self._unless_interrupted = greetings, wake, unless_interrupted
        self.lock = threading.Lock()
        self.dispatch = Dispatch(time.monotonic())
        """What is wanted, and from whom. Used with the lock held."""
        self.arrivals = Arrivals(self._take)
        self.told_share = 0.0
        """The share of its time in which the loop has waited lately."""
        self.waiting_since: float | None = None
        """Since when the loop waits for the batch that is due."""
        self._numbers = itertools.count(1)

    # News from connections

    def events_of(self, peer: Peer) -> Events:
        number = peer.generation
        return Events(
            hello=self._greetings.hello,
            reply=partial(self._reply, peer, number),
            place=partial(self._place, peer),
            answers=partial(self._answers, peer),
            unusable=partial(self._unusable, peer, number),
            lost=partial(self.lost, peer, number),
        )

    def _reply(self, peer: Peer, generation: int, reply: Reply) -> None:
        now = time.monotonic()
        if peer.generation != generation:
            return
        if isinstance(reply, messages.Welcome):
            self._welcome(peer, generation, reply)
        elif isinstance(reply, messages.Refused):
            self._refused(peer, reply)
        elif isinstance(reply, Failed):
            self._failed(peer, reply)
        elif isinstance(reply, messages.Reported):
            self._reported(peer, reply)
        else:
            with self.lock:
                if isinstance(reply, messages.Leaving):
                    self.dispatch.leaves(peer, now)
                else:
                    self.dispatch.heard(peer, now)
                actions = self.dispatch.due(now)
            self.carry_out(actions)

    def _welcome(self, peer: Peer, generation: int, welcome: messages.Welcome) -> None:
        problem = self._greetings.problem_of(welcome, peer.name)
        now = time.monotonic()
        if problem:
            with self.lock:
                self._mark_refused(peer, problem, now)
            self.lost(peer, generation, problem, close=True)
            return
        with self.lock:
            peer.connecting_since, peer.failures_in_a_row, peer.problem = None, 0, ""
            peer.is_refused = False
            self.dispatch.came_up(peer, welcome.slots, now)
            actions = self.dispatch.due(now)
        _log.info("the server %s is used", peer.name)
        self.carry_out(actions)

    def _refused(self, peer: Peer, refused: messages.Refused) -> None:
        self._unusable(peer, peer.generation, self._greetings.problem_of_refusal(refused))

    def _unusable(self, peer: Peer, generation: int, problem: str) -> None:
        with self.lock:
            if peer.generation == generation:
                self._mark_refused(peer, problem, time.monotonic())

    def _mark_refused(self, peer: Peer, problem: str, now: float) -> None:
        if not peer.is_refused or peer.problem != problem:
            _log.warning("the server %s is not used: %s", peer.name, problem)
        peer.is_refused, peer.problem, peer.again_at = True, problem, now + _REFUSED_SECONDS
        peer.connecting_since = None

    def _place(self, peer: Peer, answer: Answer) -> Bytes | None:
        with self.lock:
            batch = peer.asked.get(answer.id)
            if batch is None or batch.is_done:
                return None
            pool = batch.pool
        place: Bytes = pool.arrays([("body", np.uint8, (answer.body_bytes,))])["body"]
        return place

    def _answers(self, peer: Peer, arrived: Sequence[Arrived]) -> None:
        now = time.monotonic()
        self.arrivals.put([(peer, answer, body, now) for answer, body in arrived])

    def _take(self, arrivals: "deque[Arrival]") -> None:
        """Take batches that have arrived, all that there are."""
        with self._unless_interrupted:
            self._take_each(arrivals)

    def _take_each(self, arrivals: "deque[Arrival]") -> None:
        first: list[tuple[Peer, Batch, Answer, Bytes, float, float]] = []
        with self.lock:
            while arrivals:
                peer, answer, body, at = arrivals.popleft()
                batch = peer.asked.pop(answer.id, None)
                if batch is None:
                    continue
                sent_at = peer.owes[batch].sent_at if batch in peer.owes else batch.asked_at
                peer.bytes += answer.body_bytes
                peer.answer_seconds += at - sent_at
                if self.dispatch.answered(peer, batch, at) and body is not None:
                    first.append((peer, batch, answer, body, sent_at, at))
            actions = self.dispatch.due(time.monotonic())
        for peer, batch, answer, body, sent_at, at in first:
            batch.body_bytes = answer.body_bytes
            self._finish(batch, opened(peer, answer, body))
            count(batch, answer, sent_at, at)
        self.carry_out(actions)

    def _reported(self, peer: Peer, reported: messages.Reported) -> None:
        now = time.monotonic()
        with self.lock:
            batch = peer.asked.pop(reported.id, None)
            is_first = batch is not None and self.dispatch.answered(peer, batch, now)
        if batch is not None and is_first:
            try:
                self._finish(batch, json.loads(reported.content))
            except ValueError as error:
                self._finish(
                    batch,
                    StageError(f"the server {peer.name} has sent a report that cannot be read: {error}"),
                )

    def _failed(self, peer: Peer, failed: Failed) -> None:
        now = time.monotonic()
        with self.lock:
            batch = peer.asked.pop(failed.id, None)
            if batch is None:
                return
            why = f"{failed.kind} {failed.message}"
            has_failed = self.dispatch.failed(peer, batch, why, elsewhere=failed.elsewhere, now=now)
            actions = self.dispatch.due(now)
        if has_failed:
            self._finish(batch, error_of(failed.kind, _with_server(failed.message, peer.name)))
        self.carry_out(actions)

    def lost(self, peer: Peer, generation: int, reason: str, *, close: bool = False) -> None:
        # What has come before that counts.
        self.arrivals.take_all()
        now = time.monotonic()
        with self.lock:
            if peer.generation != generation:
                return
            connection, peer.connection = peer.connection, None
            peer.generation += 1
            peer.asked.clear()
            peer.connecting_since = None
            if not peer.is_refused:
                peer.problem = reason
                wait_seconds = _AGAIN_SECONDS[min(peer.failures_in_a_row, len(_AGAIN_SECONDS) - 1)]
                peer.failures_in_a_row += 1
                peer.again_at = now + wait_seconds
            was_there = peer.state is not State.DOWN
            self.dispatch.lost(peer, now)
            actions = self.dispatch.due(now)
        if was_there:
            _log.info("the server %s is left: %s", peer.name, reason)
        if close and connection is not None:
            connection.close()
        self.carry_out(actions)
        self._wake()

    def _finish(self, batch: Batch, outcome: "dict[str, Any] | HeadraceError") -> None:
        batch.outcome = outcome
        batch.came.put(None)

    # Carrying out

    def carry_out(self, actions: Sequence[Action]) -> None:
        requests: dict[Peer, list[Request]] = {}
        for action in actions:
            if isinstance(action, Fail):
                batch = action.ticket
                assert isinstance(batch, Batch)
                said = "; ".join(f"{server.name}: {why}" for server, why in batch.failures.items())
                self._finish(batch, StageError(f"no server can make this batch: {said}"))
                continue
            peer = action.server
            assert isinstance(peer, Peer)
            if isinstance(action, Drop):
                self.lost(peer, peer.generation, "it gives no sign of life", close=True)
            else:
                requests.setdefault(peer, []).extend(self._requests_for(peer, action))
        for peer, listed in requests.items():
            self._tell(peer, listed)

    def _requests_for(self, peer: Peer, action: Send | Stop | Ping) -> list[Request]:
        if isinstance(action, Ping):
            return [messages.Ping(next(self._numbers), self._waited_share())]
        batch = action.ticket
        assert isinstance(batch, Batch)
        with self.lock:
            if isinstance(action, Stop):
                return [Cancel(number) for number, asked in peer.asked.items() if asked is batch]
            number = next(self._numbers)
            peer.asked[number] = batch
        if batch.is_report:
            return [messages.Report(number)]
        return [Ask(number, batch.rows, batch.fields, batch.stages, (), self._waited_share())]

    def _waited_share(self) -> float:
        """What servers are told, who may become more if clients wait."""
        since = self.waiting_since
        has_waited_long = since is not None and time.monotonic() - since > _LONG_SECONDS
        return 1.0 if has_waited_long else self.told_share

    def _tell(self, peer: Peer, requests: list[Request]) -> None:
        last = requests[-1] if requests else None
        if isinstance(last, Ask):
            with self.lock:
                batch = peer.asked.get(last.id)
                ahead = () if batch is None else batch.ahead(peer)
            requests[-1] = msgspec.structs.replace(last, ahead=ahead)
        connection = peer.connection
        if connection is not None and requests:
            connection.send(requests)


def _with_server(message: str, name: str) -> str:
    """The message with the server's name in the heading of its traceback, or behind it if there is none."""
    if ON_THE_SERVER in message:
        return message.replace(ON_THE_SERVER, f"On the server {name}:", 1)
    return f"{message} (on the server {name})"
