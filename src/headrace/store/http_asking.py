"""Asking: many requests at once, by one thread, each sent a second time if it is slow.

A thread for each request would cost more processor time than the request: the first batch of a dataset in a bucket
needs hundreds of small ones. So one thread sends them all, and waits for whatever comes.
"""

import math
import select
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from headrace.store.http import Connections, Exchange
from headrace.store.http_connection import ConnectionFailure
from headrace.store.http_messages import Answer, Request

AT_ONCE = 128
Outcome = Answer | ConnectionFailure


def first_answer(connections: Connections, request: Request, patience: float | None) -> Answer:
    """The answer to a request. It is sent a second time if it takes longer than `patience`: the first answer counts."""
    (outcome,) = outcomes_of(connections, [request], patience)
    if isinstance(outcome, ConnectionFailure):
        raise outcome
    return outcome


def outcomes_of(
    connections: Connections, requests: Sequence[Request], patience: float | None
) -> list[Outcome]:
    """What becomes of each request. At most `AT_ONCE` are under way at the same time."""
    outcomes: dict[int, Outcome] = {}
    going: dict[int, _Asked] = {}
    waiting = iter(enumerate(requests))
    try:
        while len(outcomes) < len(requests):
            for number, request in islice(waiting, AT_ONCE - len(going)):
                going[number] = _Asked(connections, request, patience)
            for number in list(going):
                outcome = going[number].outcome()
                if outcome is not None:
                    outcomes[number] = outcome
                    going.pop(number).drop()
            if len(going) == AT_ONCE or len(outcomes) + len(going) == len(requests):
                _wait(going.values())
    finally:
        for asked in going.values():
            asked.drop()
    return [outcomes[number] for number in range(len(requests))]


class _Asked:
    """A request, and the exchanges that may answer it: one, or two if the first one is slow."""

    def __init__(self, connections: Connections, request: Request, patience: float | None) -> None:
        self._connections, self._request = connections, request
        self._exchanges: list[Exchange] = []
        self._failure: ConnectionFailure | None = None
        self._is_hedged = False
        self.hedge_at = math.inf if patience is None else time.monotonic() + patience
        self._send()

    def _send(self) -> None:
        try:
            exchange = self._connections.ask(self._request)
        except ConnectionFailure as failure:
            self._failure = self._failure or failure
        else:
            self._exchanges.append(exchange)

    def going(self) -> Iterator[Exchange]:
        return (exchange for exchange in self._exchanges if not exchange.is_over)

    def hedge(self) -> None:
        """Send the request a second time, unless many others were already."""
        self.hedge_at = math.inf
        self._is_hedged = self._connections.may_hedge()
        if self._is_hedged:
            self._send()

    def outcome(self) -> Outcome | None:
        """None as long as it is open."""
        answers = [exchange.answer for exchange in self._exchanges if exchange.answer is not None]
        # A server that is overloaded refuses the second request quickly, while the first one may still succeed.
        final = [answer for answer in answers if answer.status < 500 and answer.status != 429]
        if final:
            return final[0]
        if any(True for _ in self.going()):
            return None
        failures = (exchange.failure for exchange in self._exchanges)
        failure = next((each for each in failures if each is not None), self._failure)
        return answers[0] if answers else failure or ConnectionFailure("there was no answer")

    def drop(self) -> None:
        """What is still open is not needed any more."""
        for exchange in self._exchanges:
            exchange.drop()
        if self._is_hedged:
            self._is_hedged = False
            self._connections.has_hedged()


def _wait(asked: Iterable[_Asked]) -> None:
    """Wait until something happens to one of them, and take what has come."""
    if not asked:
        return
    waiting = select.poll()
    going: dict[int, Exchange] = {}
    until = math.inf
    for each in asked:
        until = min(until, each.hedge_at)
        for exchange in each.going():
            events = exchange.expect()
            descriptor = exchange.connection.socket.fileno()
            waiting.register(descriptor, events)
            going[descriptor] = exchange
            until = min(until, exchange.deadline())
    left = until - time.monotonic()
    for descriptor, _ in waiting.poll(max(1.0, left * 1000)):
        going[descriptor].advance()
    now = time.monotonic()
    if now < until:
        return
    for exchange in going.values():
        if exchange.is_over or now < exchange.deadline():
            continue
        exchange.advance()
        if not exchange.is_over and now >= exchange.deadline():
            exchange.expire()
    for each in asked:
        if now >= each.hedge_at:
            each.hedge()
