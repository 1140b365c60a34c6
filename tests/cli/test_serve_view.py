"""What `headrace serve` shows: a picture on a terminal, and nothing of it afterwards; plain lines elsewhere."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli.serve_picture import Look, Server, render_server
from headrace.cli.serve_view import ServeView
from headrace.serve.counts import ServiceCounts
from headrace.serve.server import Started
from tests.terminals import Terminal

SERVER = Server(
    "train:make", ["grpc://127.0.0.1:9000", "unix:///run/a.sock"], "http://127.0.0.1:9100", begun=0.0
)
STATE: dict[str, Any] = {
    "clients": [],
    "workers": 4,
    "workers_ready": 4,
    "worker_deaths": 0,
    "slots": 8,
    "running": 8,
    "held_bytes": 500_000_000,
    "memory_bytes": 1_000_000_000,
    "is_ready": True,
    "is_leaving": False,
    **ServiceCounts().to_json(),
}
COUNTED = {"asked": 1000, "answered": 1000, "made": 800, "found": 150, "shared": 50, "ahead": 30}
LATER = {"sent_bytes": 200_000_000, "made_seconds": 8.0, "queued_seconds": 2.0}


def client(name: str, answered: int, waited: float = 0.0) -> dict[str, Any]:
    sent = 100_000 * answered
    return {"name": name, "asked": 3, "answered": answered, "sent_bytes": sent, "waited": waited}


def drawn(*states: dict[str, Any], width: int = 100, fancy: bool = True) -> list[str]:
    """The picture after states that are two seconds apart."""
    from rich.console import Console

    looks = [Look(2.0 * number, {**STATE, **state}) for number, state in enumerate(states)]
    console = Console(width=200, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(render_server(SERVER, looks, width=width, fancy=fancy))
    return captured.get().splitlines()


def test_a_picture_has_what_happened_lately() -> None:
    before = {"clients": [client("process 7", 40)]}
    clients = [client("process 7", 540, 0.02), client("ipv4:10.0.0.9:1", 500, 0.3)]
    lines = drawn(before, {**COUNTED, **LATER, "clients": clients})
    assert lines == [
        "headrace serve  train:make  1,000 batches in 2.0 s",
        "  grpc://127.0.0.1:9000   unix:///run/a.sock   metrics http://127.0.0.1:9100",
        "  500 batches/s   100.0 MB/s   10.00 ms to make   2.00 ms in the queue",
        f"  workers      {'█' * 40} 8.0 of 8 busy   4 of 4 ready   0 deaths",
        f"  memory       {'█' * 20}{' ' * 20} 500 MB of 1,000 MB",
        "  requests     1,000   15% found   5% shared   30 made ahead",
        "  lately       █",
        "  ipv4:10.0.0.9:1  waits 30%  250/s  25.0 MB/s  3 asked",
        "  process 7         waits 2%  250/s  25.0 MB/s  3 asked",
        "  clients wait up to 30% of their time, and the workers are 100% busy: add workers or servers",
    ]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "no clients"),
        ({"is_ready": False, "workers_ready": 0}, "no worker is ready"),
        ({"clients": [client("a", 1, 0.01)]}, r"clients hardly wait \(1% of their time\); .* 100% busy"),
        (
            {"clients": [client("a", 1, 0.5)], "running": 1},
            "but the workers are 12% busy: the network or a client",
        ),
        (
            {"clients": [client("a", 1)], "is_leaving": True},
            "ending, after 3 answers that it owes; Ctrl-C again",
        ),
    ],
)
def test_a_picture_ends_with_a_verdict(state: dict[str, Any], said: str) -> None:
    assert re.search(said, drawn(state, width=120)[-1])


@pytest.mark.parametrize("fancy", [True, False])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_picture_fits_and_hides_nothing_that_acts(width: int, fancy: bool) -> None:
    odd = [client("process \x1b[2J", 5, 0.4), *(client(f"process {number}", 1) for number in range(20))]
    troubled = {
        **COUNTED,
        "failed": 3,
        "refused": 1,
        "worker_deaths": 2,
        "clients": odd,
        "held_bytes": 2 * 10**9,
    }
    lines = drawn({}, {}, troubled, width=width, fancy=fancy)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert fancy or text.isascii()
    assert "3 failed" in text
    assert "1 client refused" in text
    assert "and 13 more clients" in text


def test_connections_of_one_process_are_one_client() -> None:
    lines = drawn({"clients": [client("a", 10), client("a", 20, 0.2)]}, {"clients": [client("a", 110, 0.1)]})
    # One of its connections has ended, so the others are counted from their beginning, if need be.
    assert [line.split()[:4] for line in lines if "asked" in line] == [["a", "waits", "10%", "40/s"]]


class Service:
    """As far as a view looks at one."""

    counts = ServiceCounts(answered=12, sent_bytes=3_400_000)


def test_without_a_terminal_there_are_only_lines(capsys: pytest.CaptureFixture[str]) -> None:
    description: Any = None
    service: Any = Service()
    started = Started(description, ["grpc://127.0.0.1:9", "unix:///a"], "http://127.0.0.1:8", service)
    with ServeView("train:make", live=True) as view:
        view.started(started)
        view.leaving()
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[:3] == [
        "serving train:make on grpc://127.0.0.1:9",
        "serving train:make on unix:///a",
        "health and metrics on http://127.0.0.1:8",
    ]
    assert re.fullmatch(r"ended after [\d,]+ s: 12 batches, 3.4 MB", lines[3])
    assert said.err.splitlines() == [
        "--live needs a terminal; only lines are shown",
        "starting: making the Loader of train:make",
        "ending: answering what was asked; Ctrl-C again ends at once",
    ]


def test_a_server_that_never_started_has_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), ServeView("train:make", live=None):
        raise ValueError
    assert capsys.readouterr() == ("", "starting: making the Loader of train:make\n")


PROGRAM = """
import sys
from headrace.cli import serve_view
from headrace.cli.main import main

# Many pictures in a short time.
serve_view.DRAW_SECONDS = 0.02
main(["serve", "tests.serve.served:records", "--socket", {socket!r}, "--workers", "1"])
"""


def test_a_terminal_shows_the_server_and_is_clean_afterwards(tmp_path: Path) -> None:
    socket = str(tmp_path / "s")
    root = str(Path(__file__).parents[2])
    with Terminal(PROGRAM.format(socket=socket), columns=100, PYTHONPATH=path_with(root)) as terminal:
        shown = terminal.until(lambda shown: "no clients" in shown)
        assert f"unix://{socket}" in shown
        loader = headrace.RemoteLoader(f"unix://{socket}")
        batches = sum(1 for _ in loader)
        shown = terminal.until(
            has(f"{batches} batches in", f"process {os.getpid()}", "clients hardly wait|wait up to")
        )
        assert "1 of 1 ready" in shown
        loader.close()
        terminal.until(lambda shown: "no clients" in shown)
        os.kill(terminal.process.pid, signal.SIGINT)
        final = terminal.end()
    assert terminal.process.returncode == 0
    assert len(final) == 2
    assert re.fullmatch(rf"ended after \d+ s: {batches} batches, [\d.]+ MB", final[1])


def path_with(folder: str) -> str:
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


def has(*patterns: str) -> Callable[[str], bool]:
    return lambda shown: all(re.search(pattern, shown) for pattern in patterns)


def test_workers_are_not_blamed_for_the_time_before_the_first_request() -> None:
    """Nor is the network, when they have been busy ever since."""
    clients = {"clients": [client("a", 9, 0.9)]}
    begun = {**clients, "asked": 20, "answered": 9}
    lines = drawn({"running": 0}, {"running": 0}, {**begun, "running": 8})
    assert "the workers are 100% busy: add workers or servers" in lines[-1]
