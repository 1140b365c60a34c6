"""Which server is asked for which batch, with servers and a clock that are only numbers."""

import heapq
import itertools
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serve.dispatch import Dispatch, Drop, Fail, Ping, Send, Server, State, Stop, Ticket
from tests.properties import examples

TICK = 0.04


@dataclass(eq=False)
class Simulated:
    """A server that takes `seconds` for a ticket, for `slots` of them at a time, in the order of the requests."""

    server: Server
    seconds: float
    waiting: list[Ticket] = field(default_factory=list)
    busy: int = 0
    is_paused: bool = False
    is_dead: bool = False
    generation: int = 0


class World:
    """Runs a loop that wants tickets 0, 1, 2, ... in order, `window` ahead, against simulated servers."""

    def __init__(self, speeds: list[tuple[float, int]], window: int, step_seconds: float) -> None:
        self.dispatch, self.now, self.window, self.step_seconds = Dispatch(), 0.0, window, step_seconds
        self.events: list[tuple[float, int, object]] = []
        self.numbers = itertools.count()
        self.tickets: list[Ticket] = []
        self.answers: list[list[float]] = []
        """When each ticket was answered for the first time; others are counted too, and must be ignored."""
        self.handed: list[float] = []
        self.made = 0
        self.simulated: dict[Server, Simulated] = {}
        for number, (seconds, slots) in enumerate(speeds):
            server = Server(f"s{number}")
            self.simulated[server] = Simulated(server, seconds)
            self.dispatch.servers.append(server)
            self.dispatch.came_up(server, slots, 0.0)
        self.at(0.0, self.tick)
        self.at(0.0, self.take)

    def at(self, when: float, what: object) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def run(self, batches: int) -> None:
        while len(self.handed) < batches:
            self.now, _, what = heapq.heappop(self.events)
            assert self.now < 10_000, "nothing happens any more"
            what()  # type: ignore[operator]

    # The loop

    def take(self) -> None:
        """The loop asks for its next batch, and takes it when it is there."""
        due = len(self.handed)
        while len(self.tickets) <= due + self.window:
            ticket = Ticket(len(self.tickets))
            self.tickets.append(ticket)
            self.answers.append([])
            self.dispatch.want(ticket)
        self.carry_out(self.dispatch.due(self.now))
        if self.answers[due]:
            self.handed.append(self.now)
            self.at(self.now + self.step_seconds, self.take)
        else:
            self.at(self.now + 0.001, self.take)

    def tick(self) -> None:
        self.carry_out(self.dispatch.look(self.now))
        self.at(self.now + TICK, self.tick)

    def carry_out(self, actions: list[object]) -> None:
        for action in actions:
            assert not isinstance(action, Fail)
            simulated = self.simulated[action.server]  # type: ignore[attr-defined]
            if isinstance(action, Send):
                assert not simulated.is_dead
                simulated.waiting.append(action.ticket)
                self.work(simulated)
            elif isinstance(action, Stop) and action.ticket in simulated.waiting:
                simulated.waiting.remove(action.ticket)
            elif isinstance(action, Ping) and not simulated.is_paused:
                self.at(self.now + 0.001, lambda server=action.server: self.hear(server))
            elif isinstance(action, Drop):
                simulated.waiting.clear()

    def hear(self, server: Server) -> None:
        if server.state is not State.DOWN:
            self.dispatch.heard(server, self.now)

    # Servers

    def work(self, simulated: Simulated) -> None:
        while simulated.waiting and simulated.busy < simulated.server.slots and not simulated.is_paused:
            ticket = simulated.waiting.pop(0)
            simulated.busy += 1
            generation = simulated.generation
            self.at(self.now + simulated.seconds, partial(self.answer, simulated, ticket, generation))

    def answer(self, simulated: Simulated, ticket: Ticket, generation: int) -> None:
        if generation != simulated.generation:
            return
        if simulated.is_paused:
            self.at(self.now + TICK, lambda: self.answer(simulated, ticket, generation))
            return
        simulated.busy -= 1
        self.made += 1
        if self.dispatch.answered(simulated.server, ticket, self.now):
            self.answers[ticket.order].append(self.now)
        self.carry_out(self.dispatch.due(self.now))
        self.work(simulated)

    def kill(self, simulated: Simulated) -> None:
        if simulated.is_dead:
            return
        simulated.is_dead, simulated.busy, simulated.generation = True, 0, simulated.generation + 1
        simulated.waiting.clear()
        self.dispatch.lost(simulated.server, self.now)
        self.carry_out(self.dispatch.due(self.now))

    def restart(self, simulated: Simulated) -> None:
        if simulated.is_dead:
            simulated.is_dead = simulated.is_paused = False
            self.dispatch.came_up(simulated.server, simulated.server.slots, self.now)
            self.carry_out(self.dispatch.due(self.now))

    def pause(self, simulated: Simulated) -> None:
        simulated.is_paused = True

    def go_on(self, simulated: Simulated) -> None:
        simulated.is_paused = False
        self.work(simulated)
        if not simulated.is_dead:
            self.hear(simulated.server)


speeds = st.lists(st.tuples(st.floats(0.005, 0.2), st.integers(1, 4)), min_size=2, max_size=4)
faults = st.lists(
    st.tuples(
        st.floats(0.0, 6.0), st.integers(1, 3), st.sampled_from(["kill", "pause"]), st.floats(0.1, 20.0)
    ),
    max_size=6,
)


@examples(60)
@given(speeds, faults, st.integers(0, 20), st.floats(0.001, 0.05))
def test_every_batch_comes_once_and_soon(
    speeds: list[tuple[float, int]],
    faults: list[tuple[float, int, str, float]],
    window: int,
    step_seconds: float,
) -> None:
    """Whatever happens to all servers but the first: no batch is lost, and none keeps the loop waiting for long."""
    world = World(speeds, window, step_seconds)
    others = list(world.simulated.values())[1:]
    for at, number, what, seconds in faults:
        simulated = others[number % len(others)]
        begin, end = (world.kill, world.restart) if what == "kill" else (world.pause, world.go_on)
        world.at(at, lambda begin=begin, simulated=simulated: begin(simulated))
        world.at(at + seconds, lambda end=end, simulated=simulated: end(simulated))
    world.run(120)
    assert all(len(answers) <= 1 for answers in world.answers)
    assert all(world.answers[number] for number in range(120))
    seconds, slots = speeds[0]
    # All that the first server may have been given before the batch that is due, and one second.
    most = 1.0 + seconds * (4 * max(2, 2 * slots) / slots + 2)
    gaps = [after - before for before, after in itertools.pairwise([0.0, *world.handed])]
    assert max(gaps) < most + step_seconds


@examples(30)
@given(speeds, st.integers(4, 20))
def test_servers_are_used_by_their_speed(speeds: list[tuple[float, int]], window: int) -> None:
    """A loop that only takes gets nearly what all servers together can make, and hardly anything is made twice."""
    window = max(window, 2 * sum(slots for _, slots in speeds))
    world = World(speeds, window, 0.0001)
    world.run(400)
    together = sum(slots / seconds for seconds, slots in speeds)
    passed = world.handed[-1] - world.handed[99]
    assert 300 / passed > 0.6 * together
    assert world.made < 1.15 * 400 + 2 * window


def test_a_paused_server_is_left_within_a_second() -> None:
    world = World([(0.02, 1), (0.02, 1)], 8, 0.01)
    # Others answer in its place long before its silence is noticed, and it is noticed all the same.
    second = list(world.simulated.values())[1]
    world.at(1.0, lambda: world.pause(second))
    world.run(300)
    assert second.server.state in (State.SILENT, State.DOWN)
    gaps = [after - before for before, after in itertools.pairwise(world.handed)]
    assert max(gaps) < 1.0


def test_failures() -> None:
    dispatch, ticket = Dispatch(), Ticket(0)
    servers = [Server("a"), Server("b"), Server("c")]
    for server in servers:
        dispatch.came_up(server, 1, 0.0)
    dispatch.want(ticket)
    (first,) = dispatch.due(0.0)
    assert isinstance(first, Send)
    assert not dispatch.failed(first.server, ticket, "no", elsewhere=False, now=0.1)
    (second,) = dispatch.due(0.1)
    assert isinstance(second, Send)
    assert second.server is not first.server
    # Two servers have failed on it, so the third would too.
    assert dispatch.failed(second.server, ticket, "no", elsewhere=False, now=0.2)
    assert dispatch.due(0.2) == []


def test_a_ticket_that_failed_on_the_only_server_left() -> None:
    dispatch, ticket = Dispatch(), Ticket(0)
    one, other = Server("a"), Server("b")
    for server in (one, other):
        dispatch.came_up(server, 1, 0.0)
    dispatch.want(ticket)
    (sent,) = dispatch.due(0.0)
    assert not dispatch.failed(sent.server, ticket, "no", elsewhere=False, now=0.1)  # type: ignore[union-attr]
    left = other if sent.server is one else one  # type: ignore[union-attr]
    dispatch.due(0.1)
    dispatch.lost(left, 0.2)
    assert dispatch.look(0.2) == [Fail(ticket)]


def test_a_server_without_time_is_asked_again_later() -> None:
    dispatch, server, ticket = Dispatch(), Server("a"), Ticket(0)
    dispatch.came_up(server, 1, 0.0)
    dispatch.want(ticket)
    assert dispatch.due(0.0) == [Send(server, ticket)]
    assert not dispatch.failed(server, ticket, "busy", elsewhere=True, now=0.01)
    assert dispatch.look(0.02) == []
    assert dispatch.look(0.2) == [Send(server, ticket)]


def test_the_last_resort_is_asked_only_when_nobody_else_is_there() -> None:
    dispatch = Dispatch()
    server, here = Server("a"), Server("here", is_last_resort=True)
    dispatch.came_up(server, 4, 0.0)
    dispatch.came_up(here, 4, 0.0)
    tickets = [Ticket(number) for number in range(3)]
    for ticket in tickets:
        dispatch.want(ticket)
    assert {action.server for action in dispatch.due(0.0)} == {server}  # type: ignore[union-attr]
    dispatch.lost(server, 1.0)
    assert dispatch.look(1.1) == []
    assert [action.server for action in dispatch.look(2.0)] == [here] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("state", [State.LEAVING, State.SILENT, State.DOWN])
def test_servers_that_are_not_up_get_nothing_new(state: State) -> None:
    dispatch, server = Dispatch(), Server("a")
    dispatch.came_up(server, 1, 0.0)
    server.state = state
    dispatch.want(Ticket(0))
    assert not any(isinstance(action, Send) for action in dispatch.due(0.0))
