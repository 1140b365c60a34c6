"""The process of a server on a node of a Ray cluster. It tells the actor that has started it how it is doing.

actor                                    server
the node's address, settings        ->
                                    <-   ready, its addresses
                                    <-   state, every second
SIGTERM                             ->
                                    <-   (the end)
"""

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from headrace.errors import HeadraceError, StageError
from headrace.serve.ray.node_server import FrontSettings, decode_settings
from headrace.serve.server import Listening, Started, run_server
from headrace.serve.service import ServiceSettings
from headrace.serve.worker import Served
from headrace.workers import wire
from headrace.workers.crew_worker import trace_of
from headrace.workers.worker import Link, attach, flush_output

_TELL_SECONDS = 1.0


def main() -> NoReturn:
    link = attach(sys.argv[1:], wire.JSON)
    message = link.messages.get()
    (node_address,) = message.head
    try:
        _run(link, decode_settings(message.body), node_address)
    except BaseException as error:
        _fail(link, error)
    flush_output()
    # Without the interpreter's clean-up, which would wait for clients that are still connected.
    os._exit(0)


def _run(link: Link, settings: FrontSettings, node_address: str) -> None:
    # Datasets and modules may be named by relative paths. If the directory is not there, they are not found either.
    with contextlib.suppress(OSError):
        os.chdir(settings.directory)
    listening = Listening(
        host=settings.host or node_address,
        port=0,
        certificate=_in_memory(settings.certificate),
        key=_in_memory(settings.key),
        insecure=settings.insecure,
        drain_seconds=settings.drain_seconds,
    )
    served = Served(settings.name, settings.loader_settings)
    name = f"?name={settings.certified_name}" if settings.certified_name else ""

    def tell(started: Started) -> None:
        link.send(["ready", [f"{address}{name}" for address in started.addresses]])
        _tell_state(link, started)

    run_server(served, ServiceSettings(**settings.service), listening, tell)


def _tell_state(link: Link, started: Started) -> None:
    link.send(["state", started.state()])
    asyncio.get_running_loop().call_later(_TELL_SECONDS, _tell_state, link, started)


def _in_memory(content: bytes | None) -> Path | None:
    """A path at which this process finds the content, which nobody else does, and which is on no disk."""
    if content is None:
        return None
    descriptor = wire.anonymous_file()
    os.write(descriptor, content)
    return Path(f"/proc/self/fd/{descriptor}")


def _fail(link: Link, error: BaseException) -> NoReturn:
    is_ours = isinstance(error, HeadraceError)
    kind = type(error).__name__ if is_ours else StageError.__name__
    said = str(error) if is_ours else f"{type(error).__name__}: {error}\n\n{trace_of(error)}"
    link.send(["failed", kind, said])
    while True:
        # Until the actor has passed it on, and ends.
        link.messages.get()


if __name__ == "__main__":
    # Import this module under its own name, because `__main__` will become the user's script.
    from headrace.serve.ray import front

    front.main()
