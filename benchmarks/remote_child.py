"""Runs a function in a process of its own: a fork of this one, which has imported everything and used nothing."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from remote_server import within


def in_a_process(environment: Mapping[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process that has these variables."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(sender, within(environment), function, arguments))
    child.start()
    sender.close()
    try:
        is_result, found = receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"{function.__name__}: its process ended with code {child.exitcode}") from None
    child.join()
    if not is_result:
        raise RuntimeError(f"{function.__name__} failed in its process:\n{found}")
    return found


def _run(
    sender: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        sender.send((True, function(*arguments)))
    except Exception:
        sender.send((False, traceback.format_exc()))
