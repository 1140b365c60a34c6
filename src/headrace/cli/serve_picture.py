"""A server at a glance.

    headrace serve  train:make_loader  12,345 batches in 0:12:03
      grpc://127.0.0.1:9000   unix:///run/headrace.sock   metrics http://127.0.0.1:9100
      412 batches/s   52.1 MB/s   2.61 ms to make   3.85 ms in the queue
      workers      ██████████████▌      7.2 of 8 busy   8 of 8 ready   0 deaths
      memory       █████▎               310 MB of 1,074 MB
      requests     12,345   4% found   3% shared   812 made ahead
      lately       ▁▂▅▇█▇█
      process 4243  waits 14%  202/s  26.1 MB/s  4 asked
      process 4242  waits 12%  210/s  26.0 MB/s  4 asked
      clients wait up to 14% of their time, and the workers are 90% busy: add workers or servers

Rates and times are those of the last seconds; requests, deaths and failures are all since the start.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.cli.terminal import bar, counted, safe_text
from headrace.measure.watching.live import count_of_batches, duration, rate, sparkline
from headrace.observe.stats import is_waiting

WINDOW_SECONDS = 5.0
_MOST_CLIENTS = 8
_LONGEST_BAR = 40
_NAME = 13
_BUSY_SHARE = 0.85
_MB = 1e6


@dataclass(frozen=True)
class Look:
    """The state of a server (`serve.service.state_of`) at some time."""

    at: float
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Server:
    """What does not change."""

    target: str
    addresses: Sequence[str]
    metrics: str | None
    begun: float


def render_server(server: Server, looks: Sequence[Look], *, width: int, fancy: bool) -> Any:
    """A rich renderable; no line is longer than `width`. `looks` are in order, and there is at least one."""
    from rich.console import Group
    from rich.text import Text

    recent = _Recent(looks)
    words, style = _verdict(recent)
    lines = [
        Text.assemble(
            ("headrace serve", "bold cyan"), f"  {safe_text(server.target)}  {_heading(server, recent)}"
        ),
        *(Text(f"  {safe_text(line)}") for line in _packed(_places(server), width - 2)),
        Text(f"  {'   '.join(_speeds(recent))}"),
        *_bar_lines(recent, width, fancy),
        *(
            _line("" if number else "requests", line)
            for number, line in enumerate(_packed(list(_requests(recent)), width - _NAME - 2))
        ),
        _line("lately", sparkline(recent.history[-max(1, width - _NAME - 2) :], fancy)),
        *_client_lines(recent),
        *(Text(f"  {line}", style) for line in textwrap.wrap(words, width - 2)),
    ]
    for line in lines:
        line.truncate(width, overflow="crop")
        line.no_wrap = True
    return Group(*lines)


class _Recent:
    """The latest look, and what happened in the seconds before it."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self.latest = looks[-1]
        self.now = self.latest.state
        within = [look for look in looks if self.latest.at - look.at <= WINDOW_SECONDS]
        self._first = within[0]
        self.seconds = self.latest.at - self._first.at
        # Before the first request, workers had nothing to do.
        asked = [look for look in within if look.state["asked"]] or [self.latest]
        self.busy = _mean([_busy_share(look.state) for look in asked])
        self.history = _shares_of_the_best(looks)

    def grown(self, name: str) -> float:
        grown: float = self.now[name] - self._first.state[name]
        return grown

    def per_second(self, name: str) -> float:
        return self.grown(name) / self.seconds if self.seconds > 0 else 0.0

    def mean_ms(self, seconds: str, count: str) -> float:
        """Lately, or over all time if there was nothing lately."""
        if self.grown(count):
            return 1e3 * self.grown(seconds) / self.grown(count)
        return 1e3 * self.now[seconds] / self.now[count] if self.now[count] else 0.0

    def clients(self) -> list["_Client"]:
        before = _by_name(self._first.state["clients"])
        found = []
        for name, client in _by_name(self.now["clients"]).items():
            # One that has connected since then is counted from its beginning.
            earlier = before.get(name, _Client(name))
            answered, sent = client.answered - earlier.answered, client.sent_bytes - earlier.sent_bytes
            if answered < 0:
                answered, sent = client.answered, client.sent_bytes
            found.append(_Client(name, answered, sent, client.asked, client.waited))
        return sorted(found, key=lambda client: -client.waited)


@dataclass(frozen=True)
class _Client:
    name: str
    answered: int = 0
    sent_bytes: int = 0
    asked: int = 0
    waited: float = 0.0


def _by_name(clients: Sequence[Mapping[str, Any]]) -> dict[str, _Client]:
    """All connections of a process together."""
    found: dict[str, _Client] = {}
    for each in clients:
        known = found.get(each["name"], _Client(each["name"]))
        found[each["name"]] = _Client(
            known.name,
            known.answered + each["answered"],
            known.sent_bytes + each["sent_bytes"],
            known.asked + each["asked"],
            max(known.waited, each["waited"]),
        )
    return found


def _busy_share(state: Mapping[str, Any]) -> float:
    return state["running"] / state["slots"] if state["slots"] else 0.0


def _shares_of_the_best(looks: Sequence[Look]) -> list[float]:
    """The rate between each two looks, as a share of the highest one."""
    rates = [
        (later.state["answered"] - look.state["answered"]) / max(later.at - look.at, 1e-9)
        for look, later in zip(looks, looks[1:], strict=False)
    ]
    best = max(rates, default=0.0)
    return [each / best if best else 0.0 for each in rates]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# Lines


def _line(name: str, text: str) -> Any:
    from rich.text import Text

    return Text(f"  {name:<{_NAME}}{text}")


def _heading(server: Server, recent: _Recent) -> str:
    return f"{count_of_batches(recent.now['answered'])} in {duration(recent.latest.at - server.begun)}"


def _places(server: Server) -> list[str]:
    metrics = [] if server.metrics is None else [f"metrics {server.metrics}"]
    return [*server.addresses, *metrics]


def _speeds(recent: _Recent) -> list[str]:
    return [
        f"{rate(recent.per_second('answered'))} batches/s",
        f"{recent.per_second('sent_bytes') / _MB:,.1f} MB/s",
        f"{recent.mean_ms('made_seconds', 'made'):,.2f} ms to make",
        f"{recent.mean_ms('queued_seconds', 'answered'):,.2f} ms in the queue",
    ]


def _packed(words: Sequence[str], width: int) -> list[str]:
    """Words in as few lines as have room for them."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f"   {word}"
        else:
            lines.append(word)
    return lines


def _bar_lines(recent: _Recent, width: int, fancy: bool) -> Iterator[Any]:
    """How busy the workers are, and how full the memory is."""
    state = recent.now
    busy = f"{recent.busy * state['slots']:.1f} of {state['slots']} busy"
    ready = f"{state['workers_ready']} of {state['workers']} ready"
    deaths = counted(state["worker_deaths"], "death")
    held, allowed = state["held_bytes"], state["memory_bytes"]
    held_text = f"{held / _MB:,.0f} MB of {allowed / _MB:,.0f} MB"
    longest = max(len(f"{busy}   {ready}   {deaths}"), len(held_text))
    columns = max(4, min(_LONGEST_BAR, width - 2 - _NAME - 1 - longest))
    workers = _line("workers", "")
    workers.append(f"{bar(recent.busy, columns, fancy):<{columns}} ", "blue")
    workers.append(f"{busy}   {ready}   ")
    workers.append(deaths, "red" if state["worker_deaths"] else "")
    yield workers
    memory = _line("memory", "")
    memory.append(f"{bar(min(1.0, held / max(allowed, 1)), columns, fancy):<{columns}} ", "blue")
    memory.append(held_text)
    yield memory


def _requests(recent: _Recent) -> Iterator[str]:
    state = recent.now
    asked = max(1, state["asked"])
    yield f"{state['asked']:,}"
    yield f"{state['found'] / asked:.0%} found"
    yield f"{state['shared'] / asked:.0%} shared"
    yield f"{state['ahead']:,} made ahead"
    if state["failed"]:
        yield f"{state['failed']:,} failed"
    if state["refused"]:
        yield f"{counted(state['refused'], 'client')} refused"


def _client_lines(recent: _Recent) -> Iterator[Any]:
    """Those that wait most come first."""
    from rich.text import Text

    clients = recent.clients()
    shown = clients[:_MOST_CLIENTS]
    seconds = max(recent.seconds, 1e-9)
    rows = [
        (
            safe_text(client.name),
            f"waits {client.waited:.0%}",
            f"{rate(client.answered / seconds)}/s",
            f"{client.sent_bytes / seconds / _MB:,.1f} MB/s",
            f"{client.asked} asked",
        )
        for client in shown
    ]
    rooms = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for client, (name, waits, *others) in zip(shown, rows, strict=True):
        line = Text(f"  {name:<{rooms[0]}}  ")
        line.append(f"{waits:>{rooms[1]}}", "red" if is_waiting(client.waited) else "green")
        for cell, room in zip(others, rooms[2:], strict=True):
            line.append(f"  {cell:>{room}}")
        yield line
    if len(clients) > len(shown):
        yield Text(f"  and {counted(len(clients) - len(shown), 'more client')}")


def _verdict(recent: _Recent) -> tuple[str, str]:
    """In words, and the style of them."""
    state = recent.now
    if state["is_leaving"]:
        asked = sum(client["asked"] for client in state["clients"])
        return (
            f"ending, after {counted(asked, 'answer')} that it owes; Ctrl-C again ends it at once",
            "bold yellow",
        )
    if not state["is_ready"]:
        return "no worker is ready", "bold red"
    if not state["clients"]:
        return "no clients", "bold"
    waited = max(client["waited"] for client in state["clients"])
    busy = f"the workers are {recent.busy:.0%} busy"
    if not is_waiting(waited):
        return f"clients hardly wait ({waited:.0%} of their time); {busy}", "bold green"
    if recent.busy >= _BUSY_SHARE:
        return (
            f"clients wait up to {waited:.0%} of their time, and {busy}: add workers or servers",
            "bold red",
        )
    said = f"clients wait up to {waited:.0%} of their time, but {busy}: the network or a client is slow"
    return said, "bold yellow"
