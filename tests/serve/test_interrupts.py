"""Ctrl-C in a loop that takes batches of servers: nothing is lost, and no other loop waits for ever."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
import headrace.serve
from headrace.errors import StageError
from headrace.serve.worker import Served
from tests.ctrl_c import CtrlCAt
from tests.properties import TIMES
from tests.serve import served
from tests.serve.servers import (
    SECONDS,
    ThreadServer,
    assert_equal_batches,
    assert_equal_values,
    thread_server,
)

FOLDER = str(Path(headrace.serve.__file__).parent)
MOMENTS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    with thread_server(Served(loader=served.records()), tmp_path_factory.mktemp("interrupts")) as server:
        yield server


def test_ctrl_c_at_any_moment(server: ThreadServer) -> None:
    """A new loop goes on where the interrupted one was. Another one that was running goes on, or says that it
    cannot."""
    expected = list(served.records())
    remote = headrace.RemoteLoader(server.unix, timeout_seconds=SECONDS, prefetch=2)
    begin = remote.state_dict()
    with CtrlCAt(within=FOLDER) as counting:
        take_four(remote, expected, [])
    step = 1 if TIMES > 1 else max(1, counting.passed // MOMENTS)
    interrupted = 0
    for moment in range(1, counting.passed, step):
        remote.load_state_dict(begin)
        other = iter(remote)
        assert_equal_batches(next(other), expected[0])
        remote.load_state_dict(begin)
        taken: list[int] = []
        try:
            with CtrlCAt(moment, within=FOLDER):
                take_four(remote, expected, taken)
        except KeyboardInterrupt:
            interrupted += 1
        with contextlib.suppress(StageError):
            assert_equal_batches(next(other), expected[1])
        assert remote.state_dict()["position"] == len(taken) * remote.settings.batch_size
        for number, batch in enumerate(remote, len(taken)):
            for name in batch:
                assert_equal_values(batch[name], expected[number][name])
            if number == len(taken) + 2:
                break
    assert interrupted > MOMENTS / 2


def take_four(remote: headrace.RemoteLoader, expected: list[Any], taken: list[int]) -> None:
    for batch in remote:
        assert_equal_batches(batch, expected[len(taken)])
        taken.append(1)
        if len(taken) == 4:
            return
