"""The threads that make requests."""

import _thread
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from headrace.errors import StorageError
from headrace.store.fetching import Fetching


def test_without_more_threads_those_that_there_are_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = _thread.start_new_thread, [1]

    def start_few(*arguments: object) -> int:
        if not left.pop() if left else True:
            raise RuntimeError("can't start new thread")
        return start(*arguments)  # type: ignore[arg-type]

    fetching = Fetching()
    monkeypatch.setattr(_thread, "start_new_thread", start_few)
    for _ in range(200):
        assert fetching.urgent([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]


def test_without_any_thread_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise RuntimeError("can't start new thread")

    fetching = Fetching()
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        for _ in range(100):
            with pytest.raises(StorageError, match="no thread can be started"):
                fetching.ahead(lambda: 1)
    assert fetching.ahead(lambda: 5).result(60) == 5


def test_what_is_fetched_ahead_may_fetch_ahead() -> None:
    fetching = Fetching(ahead_at_once=2)
    found = [fetching.ahead(lambda: fetching.ahead(lambda: 3).result()) for _ in range(20)]
    assert [each.result(60) for each in found] == [3] * 20


def test_what_has_not_begun_when_a_call_fails_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many requests to a server that is gone would be repeated for a minute."""
    has_cancelled = threading.Event()
    cancel, begun = Future.cancel, []

    def noticed_cancel(future: Any) -> bool:
        is_cancelled = cancel(future)
        if is_cancelled:
            has_cancelled.set()
        return is_cancelled

    def fail() -> None:
        raise ValueError("wrong")

    def hold() -> None:
        begun.append(1)
        has_cancelled.wait(60)

    monkeypatch.setattr(Future, "cancel", noticed_cancel)
    with pytest.raises(ValueError, match="wrong"):
        Fetching(urgent_at_once=3).urgent([fail, *[hold] * 100])
    assert len(begun) < 100


def test_errors_come_after_all_calls_have_ended() -> None:
    ended = []

    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        Fetching().urgent([fail, lambda: ended.append(1), fail, lambda: ended.append(2)])
    assert sorted(ended) == [1, 2]
