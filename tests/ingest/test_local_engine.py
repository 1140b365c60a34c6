"""What the engine of this machine does with workers that hang, fail or say too much."""

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import BuildError
from headrace.format.fields import parse_fields
from headrace.ingest import local_engine
from headrace.ingest.conversation import BUILD_SIDE, WORKER_SIDE, Failed, Import, Prepare
from headrace.ingest.jobs import Advanced, CheckResult, GatherShard, ResultChecked, RunTask, TaskDone
from headrace.ingest.local_engine import LocalEngine
from headrace.ingest.plan import BuildTask, Slice
from headrace.ingest.results import BadRecord, TaskResult
from headrace.ingest.task import TaskSettings
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile
from headrace.readers.reader import ReadOptions
from headrace.store.local import LocalStore
from headrace.tokenizers.definition import BYTES, Definition


def settings_for(out: Path) -> TaskSettings:
    return TaskSettings(
        out=str(out),
        fields=parse_fields({"tokens": "uint16[*]"}),
        options=ReadOptions(text_field="text"),
        largest_shard_bytes=2**20,
        max_bad_records=0,
        definition=BYTES,
        encoder="bytes",
    )


def run(engine: LocalEngine, jobs: list[RunTask], settings: TaskSettings, out: LocalStore) -> dict[int, Any]:
    outcomes: dict[int, Any] = {}
    engine.run(jobs, settings, out, outcome=outcomes.__setitem__, advance=lambda _: None)
    return outcomes


def task_of(path: Path) -> BuildTask:
    size = path.stat().st_size
    file = InputFile(str(path), InputFormat.TEXT, size)
    return BuildTask((Slice(file.path, file.format, 0, size),), (file,), size)


TASK = BuildTask(
    (Slice("s3://b/x", InputFormat.CSV, 2**40, 2**41),),
    (InputFile("s3://b/x", InputFormat.CSV, 2**42, '"a"'),),
    9,
)
RESULT = TaskResult(
    [Slice("a ü.txt", InputFormat.TEXT, 0, 7)],
    ["0" * 32],
    [],
    1,
    [BadRecord("a ü.txt", "byte 3", "not UTF-8")],
)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (WORKER_SIDE, Import(["json"])),
        (WORKER_SIDE, Prepare(settings_for(Path("out")))),
        (WORKER_SIDE, RunTask(TASK)),
        (WORKER_SIDE, CheckResult(TASK, RESULT)),
        (WORKER_SIDE, GatherShard(1, 2, 2**64 - 1)),
        (BUILD_SIDE, TaskDone(RESULT)),
        (BUILD_SIDE, ResultChecked(True)),
        (BUILD_SIDE, Advanced(2**40, 2, 3)),
        (BUILD_SIDE, Failed("ValueError", "because", "Traceback ...")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages_come_back_as_they_were(codec: Any, message: Any) -> None:
    back = codec.decode(codec.encode(message))
    assert type(back) is type(message)
    # Lists and tuples are the same to a message.
    assert codec.encode(back) == codec.encode(message)


def test_a_worker_that_does_nothing_is_named_with_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports a module that never ends; each look at the clock is ten minutes later, once it hangs there."""
    text, begun = tmp_path / "a.txt", tmp_path / "begun"
    text.write_text("a document")
    source = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(10**6)\n"
    (tmp_path / "never_imported.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    out = LocalStore(tmp_path / "out")
    out.create()
    looks = iter(range(0, 10**9, 600))
    monkeypatch.setattr(
        "headrace.workers.process.clock", lambda: float(next(looks)) if begun.exists() else 0.0
    )
    with LocalEngine(2, ["never_imported"]) as engine:
        hanging = engine._workers[0].process
        with pytest.raises(BuildError) as caught:
            run(engine, [RunTask(task_of(text))], settings_for(tmp_path / "out"), out)
    said = str(caught.value)
    assert f"process {hanging.pid}) has sent nothing for" in said
    assert f"building from {text} (0 to 10)" in said
    assert "start the same build again to continue" in said
    assert "never_imported.py" in said.split("Its stack was:")[1]
    assert not psutil.pid_exists(hanging.pid)


def test_a_worker_that_computes_without_a_word_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEngine(2) as engine:
        worker = engine._workers[0]
        worker.job = (0, GatherShard(0, 1, 2))
        now = [worker._given_at + local_engine.SILENT_SECONDS + 1]
        monkeypatch.setattr("headrace.workers.process.clock", lambda: now[0])
        # Then it hangs, and only looks now and then whether its parent is still there.
        used = iter([200.0, 350.0, 350.01])
        times = type("Times", (), {"system": 0.0, "user": property(lambda _: next(used))})
        monkeypatch.setattr(psutil.Process, "cpu_times", lambda self: times())
        for _ in range(2):
            worker.look()
            now[0] += local_engine.SILENT_SECONDS + 1
        with pytest.raises(BuildError, match=r"process \d+\) has sent nothing for 903 seconds"):
            worker.look()


def test_a_worker_that_computes_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEngine(2) as engine:
        worker = engine._workers[0]
        worker.job = (0, GatherShard(0, 1, 2))
        # A whole number, so that adding to it is exact.
        worker._given_at = float(math.ceil(worker._given_at + 1))
        now = [worker._given_at]
        monkeypatch.setattr("headrace.workers.process.clock", lambda: now[0])
        times = type("Times", (), {"system": 0.0, "user": property(lambda _: now[0])})
        monkeypatch.setattr(psutil.Process, "cpu_times", lambda self: times())
        while now[0] < worker._given_at + local_engine.COMPUTING_SECONDS - 400:
            now[0] += 400
            worker.look()
        now[0] += 400
        with pytest.raises(BuildError, match=r"has sent nothing for 3,600 seconds"):
            worker.look()


def test_the_last_words_of_a_worker_that_dies_are_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "panics.py").write_text(
        "import os\nprint('thread main panicked at 7', flush=True)\nos.abort()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text, out = tmp_path / "a.txt", LocalStore(tmp_path / "out")
    text.write_text("a document")
    out.create()
    with LocalEngine(2, ["panics"]) as engine, pytest.raises(BuildError) as caught:
        run(engine, [RunTask(task_of(text))], settings_for(tmp_path / "out"), out)
    assert "was killed by SIGABRT" in str(caught.value)
    assert "its last lines:\nthread main panicked at 7" in str(caught.value)


def test_what_workers_print_is_shown_when_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chatty.py").write_text("print('a warning of a library', flush=True)\n")
    monkeypatch.syspath_prepend(tmp_path)
    text, out = tmp_path / "a.txt", LocalStore(tmp_path / "out")
    text.write_text("a document")
    out.create()
    with LocalEngine(2, ["chatty"]) as engine:
        run(engine, [RunTask(task_of(text))], settings_for(tmp_path / "out"), out)
    assert "a warning of a library" in capsys.readouterr().err


def test_settings_of_many_megabytes_reach_every_worker(tmp_path: Path) -> None:
    """A tokenizer travels as content: more than a socket takes at once."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("text")
    out = LocalStore(tmp_path / "out")
    out.create()
    settings = settings_for(tmp_path / "out")
    definition = Definition(
        kind="bytes", name="bytes", vocab_size=258, special_tokens={}, content=os.urandom(2**25)
    )
    with LocalEngine(3) as engine:
        jobs = [RunTask(task_of(tmp_path / f"{number}.txt")) for number in range(3)]
        outcomes = run(engine, jobs, replace(settings, definition=definition), out)
    assert sorted(outcomes) == [0, 1, 2]


def test_a_worker_that_dies_is_told_with_pid_signal_and_what_it_did(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a document")
    out = LocalStore(tmp_path / "out")
    out.create()
    with LocalEngine(2) as engine:
        worker = engine._workers[0].process
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(
            BuildError, match=rf"process {worker.pid}\) was killed by SIGKILL .* while it was building from"
        ):
            run(engine, [RunTask(task_of(text))], settings_for(tmp_path / "out"), out)
