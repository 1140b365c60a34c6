"""The systems that make batches elsewhere: how each is started, what it needs, and what its user should know."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import serve_headrace
import serve_ray
import serve_tfdata
from serve_system import Settings, System

REFERENCE = "Headrace, grpc"
QUESTIONS = ("burning", "waiting", "killing")
GRAPH = "10 ms of graph operations instead of the function, because the service runs no Python"


@dataclass(frozen=True, kw_only=True)
class ServePeer:
    start: Callable[[Settings], AbstractContextManager[System]]
    """Starts the system, which ends with the context."""
    needs: tuple[str, ...]
    """Packages as pip names them."""
    modules: tuple[str, ...]
    """What a script of its user imports."""
    questions: tuple[str, ...] = QUESTIONS
    """What it is asked."""
    cannot: dict[str, str] = field(default_factory=dict)
    """What it cannot be asked, and why."""
    is_tfdata: bool = False
    """Whether it has an environment of its own, with TensorFlow."""
    note: str = ""
    quick: bool = False
    """Whether it is part of a quick run that names no peers."""


def _headrace(scheme: str, **more: Any) -> ServePeer:
    return ServePeer(
        start=partial(serve_headrace.start, scheme=scheme, servers=more.pop("servers", 1)),
        needs=("headrace", "pyarrow"),
        modules=("headrace",),
        **more,
    )


def _ray(preserve_order: bool) -> ServePeer:
    return ServePeer(
        start=partial(serve_ray.start, preserve_order=preserve_order),
        needs=("ray", "pandas", "pyarrow"),
        modules=("ray", "ray.data"),
        note="a task makes up to 50 batches, or 20 that wait, and its block arrives as a whole",
    )


def _tfdata(restarts: bool, **more: Any) -> ServePeer:
    return ServePeer(
        start=partial(serve_tfdata.start, restarts=restarts),
        needs=("tensorflow-cpu",),
        modules=("tensorflow",),
        is_tfdata=True,
        **more,
    )


PEERS = {
    REFERENCE: _headrace("grpc", quick=True),
    "Headrace, unix": _headrace("unix", quick=True),
    "Headrace, grpc, one of two servers": _headrace(
        "grpc",
        servers=2,
        questions=("killing",),
        note="two servers with one worker each; one server is killed and stays away",
    ),
    "Ray Data": _ray(preserve_order=False),
    "Ray Data, preserve_order": _ray(preserve_order=True),
    "tf.data service": _tfdata(
        restarts=True,
        questions=("burning", "killing"),
        cannot={
            "waiting": "runs no Python function (its documentation, Limitations), and TensorFlow documents no "
            "operation that waits"
        },
        note=f"{GRAPH}; a killed worker is started again at its address after a second, as by a supervisor",
    ),
    "tf.data service, no supervisor": _tfdata(
        restarts=False, questions=("killing",), note=f"{GRAPH}; a killed worker stays away"
    ),
}
