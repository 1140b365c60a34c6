"""What `headrace serve` shows: a picture that is drawn again and again on a terminal, and plain lines elsewhere."""

import asyncio
import contextlib
import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.terminal import counted

if TYPE_CHECKING:
    from headrace.cli.serve_picture import Look
    from headrace.serve.server import Started

DRAW_SECONDS = 0.5
_LOOKS = 60


class ServeView:
    """A context: the terminal is as it was when it is left. `started` and `leaving` are called in the server's loop."""

    def __init__(self, target: str, live: bool | None, as_json: bool = False) -> None:
        self._target, self._as_json = target, as_json
        self._is_live = not as_json and _can_be_live(live)
        self._started: Started | None = None
        self._begun = 0.0
        self._looks: tuple[Look, ...] = ()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "ServeView":
        if not self._as_json:
            click.echo(f"starting: making the Loader of {self._target}", err=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if self._started is not None and not self._as_json:
            counts = self._started.service.counts
            sent = f"{counted(counts.answered, 'batch', 'batches')}, {counts.sent_bytes / 1e6:,.1f} MB"
            click.echo(f"ended after {time.monotonic() - self._begun:,.0f} s: {sent}")

    def started(self, started: "Started") -> None:
        self._started, self._begun = started, time.monotonic()
        if self._is_live:
            self._draw_from_now_on(started)
            return
        if self._as_json:
            said = {"target": self._target, "addresses": started.addresses, "metrics": started.metrics}
            click.echo(json.dumps({**said, "fingerprint": started.description.fingerprint}))
            return
        for address in started.addresses:
            click.echo(f"serving {self._target} on {address}")
        if started.metrics is not None:
            click.echo(f"health and metrics on {started.metrics}")

    def leaving(self) -> None:
        # The picture says it by itself.
        if not self._is_live:
            click.echo("ending: answering what was asked; Ctrl-C again ends at once", err=True)

    def _draw_from_now_on(self, started: "Started") -> None:
        """The state is read in the server's loop, which takes microseconds; drawing has a thread of its own."""
        from headrace.cli.serve_picture import Server, render_server
        from headrace.measure.watching.live import LiveView
        from headrace.measure.watching.repeating import Repeating

        # The picture shows deaths and failures; lines would come between.
        logging.getLogger("headrace").addHandler(logging.NullHandler())
        server = Server(self._target, started.addresses, started.metrics, self._begun)
        self._look(started)
        view = self._open.enter_context(LiveView(sys.stdout))

        def rendered(width: int, fancy: bool) -> Any:
            return render_server(server, self._looks, width=width, fancy=fancy)

        self._open.enter_context(Repeating(lambda: view.draw(rendered), DRAW_SECONDS))

    def _look(self, started: "Started") -> None:
        from headrace.cli.serve_picture import Look

        look = Look(time.monotonic(), started.state())
        # A new tuple, as the thread that draws may have the old one.
        self._looks = (*self._looks, look)[-_LOOKS:]
        asyncio.get_running_loop().call_later(DRAW_SECONDS, self._look, started)


def _can_be_live(live: bool | None) -> bool:
    from headrace.measure.watching.live import can_draw

    if live is False:
        return False
    can = can_draw(sys.stdout)
    if live and not can:
        click.echo("--live needs a terminal; only lines are shown", err=True)
    return can
