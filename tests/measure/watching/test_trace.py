"""Timelines: files that the Perfetto viewer and chrome://tracing open, and that show what happened."""

import itertools
import logging
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError
from headrace.measure.watching.monitor import monitor
from headrace.measure.watching.trace import Recording, trace, trace_events
from headrace.observe.counting import StageSpan
from tests.measure.said import small_loader
from tests.measure.timelines import count, read, stages_by_lane


def test_threads_of_a_loader_have_lanes(tmp_path: Path) -> None:
    documents = [np.arange(1, 20 + n % 50, dtype=np.uint16) for n in range(4000)]
    data = headrace.from_arrays({"tokens": documents})
    loader = headrace.Loader(data, seq_len=128, batch_size=8, workers=2).map(lambda batch: batch, per="batch")
    begun = time.perf_counter()
    with trace(loader, tmp_path / "trace.json"):
        batches = len(list(loader))
    events = read(tmp_path / "trace.json", time.perf_counter() - begun)
    lanes = stages_by_lane(events)
    assert lanes.pop("loop (MainThread)") == {"start", "wait", "step"}
    assert len(lanes) in (1, 2)  # one thread may have been faster than the other could start
    assert all(name.startswith("headrace-") for name in lanes)
    assert set.union(*lanes.values()) == {"plan", "gather", "transform"}
    assert count(events, "wait") == batches + 1
    assert count(events, "transform") == batches


def test_any_loader_shows_its_loop(tmp_path: Path) -> None:
    with trace([[1, 2]] * 16, tmp_path / "trace.json") as traced:
        assert len(traced) == 16
        assert sum(len(batch) for batch in traced) == 32
    events = read(tmp_path / "trace.json")
    assert stages_by_lane(events) == {"loop (MainThread)": {"start", "wait", "step"}}
    assert count(events, "step") == 16


def test_the_file_is_written_when_the_loop_fails_and_the_error_is_the_users(tmp_path: Path) -> None:
    failure = RuntimeError("diverged")
    loader = small_loader()

    def loop() -> None:
        with trace(loader, tmp_path / "trace.json"):
            for number, _ in enumerate(loader):
                if number == 5:
                    raise failure

    with pytest.raises(RuntimeError, match="diverged") as caught:
        loop()
    assert caught.value is failure
    assert count(read(tmp_path / "trace.json"), "wait") == 6
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_disk_that_fails_does_not_hide_the_users_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "runs"
    place.mkdir()

    def loop() -> None:
        with trace([1], place / "trace.json"):
            place.rmdir()
            raise RuntimeError("diverged")

    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="diverged"):
        loop()
    assert "trace.json: the timeline could not be written" in caplog.text
    with pytest.raises(OSError), trace([1], tmp_path / "trace.json"):
        (tmp_path / "trace.json").mkdir()


def test_places_where_nothing_can_be_written_are_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "trace.json"):
        with pytest.raises(SettingsError, match=str(path)), trace([1], path):
            pytest.fail("entered")
    with pytest.raises(SettingsError, match="max_spans=0"), trace([1], tmp_path / "x", max_spans=0):
        pytest.fail("entered")


def test_one_recording_at_a_time_and_another_after_it(tmp_path: Path) -> None:
    loader = small_loader()
    with (
        trace(loader, tmp_path / "a.json"),
        pytest.raises(SettingsError, match="already being recorded"),
        trace(loader, tmp_path / "b.json"),
    ):
        pytest.fail("entered")
    list(loader)
    with trace(loader, tmp_path / "b.json"):
        list(itertools.islice(loader, 3))
    assert count(read(tmp_path / "a.json"), "wait") == 0
    assert count(read(tmp_path / "b.json"), "wait") == 3


def test_the_latest_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        trace(range(1000), tmp_path / "trace.json", max_spans=10) as traced,
    ):
        list(traced)
    events = read(tmp_path / "trace.json")
    assert count(events, "wait") + count(events, "step") == 10
    assert "only the last 10 pieces" in caplog.text


def test_finish_writes_once_and_a_loader_of_ours_stays_itself(tmp_path: Path) -> None:
    loader = small_loader()
    recording = Recording(loader, tmp_path / "trace.json")
    assert recording.loader is loader
    list(loader)
    recording.finish()
    assert count(read(tmp_path / "trace.json"), "wait") == 17
    os.unlink(tmp_path / "trace.json")
    recording.finish()
    list(loader)
    assert list(tmp_path.iterdir()) == []


def test_the_monitor_writes_one_too(tmp_path: Path) -> None:
    with monitor(small_loader(), view="off", trace=tmp_path / "trace.json") as watched:
        list(watched)
    assert count(read(tmp_path / "trace.json"), "wait") == 17


def test_what_overlaps_goes_to_another_track() -> None:
    spans = [StageSpan("read", a, b, b - a, "worker 0") for a, b in [(1, 2), (0, 4), (3, 6), (5, 9), (6, 8)]]
    events = list(trace_events(spans))
    tracks = Counter(event["tid"] for event in events if event["ph"] == "X")
    assert tracks == {1: 4, 2: 1}  # [3, 6] overlaps [0, 4]; when [5, 9] begins, the first track is free again
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["worker 0", "worker 0 2"]
    assert not [e for e in trace_events(spans, [(1, {"ready": 2})], begun=7) if e["ph"] in "XC"]
