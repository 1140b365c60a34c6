"""What the batches of servers count as: the time in which they wait, are made, and are on their way; and those that
have come when a server is lost."""

import contextlib

import numpy as np
import pytest

from headrace.observe.counting import Counters
from headrace.serve.conversations import Conversations
from headrace.serve.greetings import Greetings
from headrace.serve.messages import Answer
from headrace.serve.packed import pack
from headrace.serve.peers import Batch, Peer, count


def seconds(answer: Answer, *, asked_at: float, sent_at: float, now: float) -> dict[str, float]:
    counters = Counters()
    count(Batch(0, counters=counters, asked_at=asked_at), answer, sent_at, now)
    return {name: stage.seconds for name, stage in counters.stats().stages.items()}


def test_what_a_server_says_counts_and_not_what_was_asked_for_early() -> None:
    """A batch far ahead of the loop stays here until a server has room: nobody waits for it."""
    spent = (("gather", 1, 10**8), ("transform", 1, 9 * 10**8))
    answer = Answer(1, b"", 0, queued_seconds=0.5, made_seconds=1.0, spent=spent)
    counted = seconds(answer, asked_at=1.0, sent_at=3.0, now=4.75)
    assert counted == pytest.approx(
        {"server queue": 0.5, "server gather": 0.1, "server transform": 0.9, "network": 0.25}
    )


def test_a_batch_that_was_there_already_is_only_on_its_way() -> None:
    counted = seconds(Answer(1, b"", 0), asked_at=1.0, sent_at=1.0, now=1.2)
    assert counted == pytest.approx({"server queue": 0.0, "network": 0.2})


def test_clocks_that_disagree_give_no_negative_times() -> None:
    counted = seconds(Answer(1, b"", 0, made_seconds=9.0), asked_at=1.0, sent_at=1.0, now=2.0)
    assert counted["network"] == 0


def test_a_batch_that_has_come_counts_although_its_server_is_lost_then() -> None:
    """A loop that waits for another batch has not taken it yet."""
    greetings = Greetings(None, None, "nobody")
    talk = Conversations(greetings, wake=lambda: None, unless_interrupted=contextlib.nullcontext())
    peer, batch, other = Peer("a"), Batch(0), Batch(1)
    talk.dispatch.came_up(peer, 1, 0.0)
    talk.dispatch.want(batch)
    talk.carry_out(talk.dispatch.due(0.0))
    (number,) = peer.asked
    talk.arrivals._waiting.append(other)
    packed = pack({"x": 3})
    talk.events_of(peer).answers([(Answer(number, packed.head, 0), np.empty(0, np.uint8))])
    assert batch.outcome is None
    talk.events_of(peer).lost("it has ended")
    assert batch.outcome == {"x": 3}
