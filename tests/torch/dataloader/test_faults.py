"""What is left when things die: nothing, and an error that says what happened."""

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock

pytest.importorskip("torch", reason="needs torch")

import torch

from penstock.torch import DataLoader
from tests.torch.dataloader import fault_datasets as faults


def _shared_memory() -> set[str]:
    """Shared memory with a name; semaphores of multiprocessing belong to other tests that run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def _workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "tracker" not in " ".join(child.cmdline())]


def _threads() -> int:
    return sum(thread.name.startswith("DataLoader") for thread in threading.enumerate())


def _left() -> tuple[int, int, int, set[str]]:
    return len(os.listdir("/proc/self/fd")), len(_workers()), _threads(), _shared_memory()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    # It is multiprocessing's, starts with the first spawned process, and stays.
    multiprocessing.resource_tracker.ensure_running()
    gc.collect()
    before = _left()
    yield
    gc.collect()
    assert _left() == before


@pytest.mark.usefixtures("nothing_left")
def test_a_worker_that_is_killed_at_any_moment_shows_at_once() -> None:
    rng = random.Random(0)
    for turn in range(200):
        loader = DataLoader(faults.Numbered(seconds=0.0005), batch_size=2, num_workers=2)
        batches = iter(loader)
        for _ in range(rng.randrange(4)):
            next(batches)
        victim = rng.choice(_workers())
        time.sleep(rng.random() * 0.003)
        victim.kill()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"worker \(pid {victim.pid}\) is killed by signal: Killed"):
            for _ in batches:
                pass
        assert time.monotonic() - began < 5, f"turn {turn}: the error came late"
        with pytest.raises(RuntimeError, match=str(victim.pid)):
            next(batches)
        del batches


@pytest.mark.usefixtures("nothing_left")
def test_all_workers_killed_while_the_loop_waits_for_a_slow_batch() -> None:
    batches = iter(DataLoader(faults.Hanging(), batch_size=2, num_workers=2))
    next(batches)
    threading.Timer(0.3, lambda: [worker.kill() for worker in _workers()]).start()
    with pytest.raises(RuntimeError, match="killed by signal: Killed"):
        for _ in batches:
            pass


@pytest.mark.usefixtures("nothing_left")
def test_a_worker_that_exits_shows_with_its_code() -> None:
    with pytest.raises(RuntimeError, match=r"\(pid\(s\) \d+\) exited unexpectedly with exit code 7"):
        list(DataLoader(faults.Exiting(), num_workers=2))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_spawned_worker_that_is_killed_shows_with_pid_and_signal(method: str) -> None:
    loader = DataLoader(faults.Numbered(seconds=0.01), num_workers=2, multiprocessing_context=method)
    batches = iter(loader)
    next(batches)
    pids = batches._workers.pids()
    os.kill(pids[1], signal.SIGSEGV)
    with pytest.raises(RuntimeError, match=rf"worker \(pid {pids[1]}\) is killed by signal: Segmentation"):
        for _ in batches:
            pass
    del batches, loader
    if method == "forkserver":
        # multiprocessing's server would live as long as this process.
        multiprocessing.forkserver._forkserver._stop()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("workers", ["process", "thread"])
def test_a_dataset_that_hangs_meets_the_timeout(workers: str) -> None:
    loader = DataLoader(faults.Hanging(), batch_size=2, num_workers=2, timeout=0.5, workers=workers)
    batches = iter(loader)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 0.5 seconds"):
        for _ in batches:
            pass
    if workers == "process":
        victims = _workers()
        began = time.monotonic()
        del batches
        assert time.monotonic() - began < 12
        assert not any(psutil.pid_exists(victim.pid) for victim in victims)
    else:
        # Nobody can end a thread: let it go on.
        _release_hanging_threads()
        del batches
        assert not _threads()


def _release_hanging_threads() -> None:
    """Those that wait for an event which no one else knows: it is found where it is."""
    for thread, frame in sys._current_frames().items():
        # To look at a frame's variables keeps them alive: not those of the test itself.
        while thread != threading.get_ident() and frame is not None:
            waiting = frame.f_locals.get("self")
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            if isinstance(waiting, threading.Event) and "fault_datasets" in caller:
                waiting.set()
            frame = frame.f_back  # type: ignore[assignment]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("workers", ["process", "thread"])
def test_large_batches_of_uneven_sizes_arrive_whole(workers: str) -> None:
    for batch in DataLoader(faults.Huge(10), batch_size=None, num_workers=2, workers=workers):
        number = int(batch["tensor"][0])
        size = (1, 70_000_000, 10, 3_000_000, 100_000)[number % 5]
        assert batch["tensor"].shape == (size,)
        assert bool((batch["tensor"] == number).all())
        assert batch["array"].shape == (size // 2,)
        assert batch["bytes"] == bytes([number]) * (size // 4)
        assert batch["meta"].shape == (size,)
        assert batch["meta"].device.type == "meta"
        assert batch["strings"] == [str(number)] * min(size, 50_000)


@pytest.mark.usefixtures("nothing_left")
def test_a_batch_is_never_written_to_while_anyone_holds_it() -> None:
    dataset = faults.Keeping(600)
    loader = DataLoader(dataset, batch_size=1, num_workers=2, collate_fn=dataset.collate)
    rng, held = random.Random(1), {}
    for number, batch in enumerate(loader):
        held[number] = batch[0, 5:]  # a view of a view
        del batch
        if len(held) > 12:
            gone = rng.choice(sorted(held))
            assert bool((held.pop(gone) == gone).all())
    for number, part in held.items():
        assert bool((part == number).all())


@pytest.mark.usefixtures("nothing_left")
def test_batches_of_worker_processes_can_be_written_to_and_outlive_them() -> None:
    batches = list(DataLoader(faults.Numbered(40), batch_size=4, num_workers=2))
    assert not _workers()
    for number, batch in enumerate(batches):
        batch += 1
        assert batch[:, 0].tolist() == [4 * number + row + 1 for row in range(4)]


@pytest.mark.usefixtures("nothing_left")
def test_without_shared_memory_batches_come_through_the_socket() -> None:
    loader = DataLoader(
        faults.Numbered(60), batch_size=6, num_workers=2, worker_init_fn=faults.no_files_of_that_size
    )
    firsts = [batch[:, -1].tolist() for batch in loader]
    assert firsts == [list(range(first, first + 6)) for first in range(0, 60, 6)]


def test_a_full_dev_shm_does_no_harm(child_environment: dict[str, str]) -> None:
    """PyTorch's workers die of it, with a bus error."""
    script = _script(
        """
        with open("/dev/shm/filler", "wb") as file, contextlib.suppress(OSError):
            file.write(bytes(2**20))
        batches = [batch[:, 0].tolist() for batch in DataLoader(Numbered(40), batch_size=8, num_workers=2)]
        assert batches == [list(range(first, first + 8)) for first in range(0, 40, 8)]
        print("done")
        """
    )
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("may not mount file systems here")
    ran = subprocess.run(
        [*alone, sys.executable, "-c", script],
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "done\n", ran.stderr


def _script(body: str) -> str:
    here = str(Path(__file__).parents[3])
    head = f"""
        import contextlib, os, signal, sys, threading, time
        sys.path.insert(0, {here!r})
        from tests.torch.dataloader.fault_datasets import Hanging, Numbered
        from penstock.torch import DataLoader
    """
    return textwrap.dedent(head) + textwrap.dedent(body)


_LIVING = """
    loader = DataLoader({dataset}, batch_size=2, num_workers=2, persistent_workers={persistent}, workers={workers!r})
    batches = iter(loader)
    next(batches)
    pids = batches._workers.pids() if {workers!r} == "process" else []
    print(*pids, flush=True)
"""
ENDINGS: dict[str, tuple[str, Callable[[int], None], int]] = {
    "normal exit": ("", lambda pid: None, 0),
    "exception": ("raise ValueError('enough')", lambda pid: None, 1),
    "sys.exit": ("sys.exit(3)", lambda pid: None, 3),
    "Ctrl-C": (
        "for _ in batches: time.sleep(0.01)",
        lambda pid: os.killpg(pid, signal.SIGINT),
        -signal.SIGINT,
    ),
    "SIGTERM": (
        "for _ in batches: time.sleep(0.01)",
        lambda pid: os.kill(pid, signal.SIGTERM),
        -signal.SIGTERM,
    ),
    "kill -9": (
        "for _ in batches: time.sleep(0.01)",
        lambda pid: os.kill(pid, signal.SIGKILL),
        -signal.SIGKILL,
    ),
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_the_process_ends_its_workers_and_memory_go(
    ending: str, persistent: bool, child_environment: dict[str, str]
) -> None:
    last, how, code = ENDINGS[ending]
    _run_to_its_end("Numbered(10_000)", "process", persistent, last, how, code, child_environment)


@pytest.mark.parametrize("ending", ["normal exit", "Ctrl-C", "kill -9"])
def test_however_the_process_ends_with_threads(ending: str, child_environment: dict[str, str]) -> None:
    last, how, code = ENDINGS[ending]
    _run_to_its_end("Numbered(10_000)", "thread", False, last, how, code, child_environment)


def test_workers_that_hang_go_with_the_process_that_is_killed(child_environment: dict[str, str]) -> None:
    last, how, code = ENDINGS["kill -9"]
    _run_to_its_end("Hanging(10_000)", "process", False, last, how, code, child_environment)


def _run_to_its_end(
    dataset: str,
    workers: str,
    persistent: bool,
    last: str,
    how: Callable[[int], None],
    code: int,
    environment: dict[str, str],
) -> None:
    shared = _shared_memory()
    script = _script(
        textwrap.dedent(_LIVING.format(dataset=dataset, workers=workers, persistent=persistent)) + last
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == (2 if workers == "process" else 0)
    how(process.pid)
    said = process.stderr.read()
    assert process.wait(30) == code, said
    for wrong in ("Exception ignored", "resource_tracker", "Fatal Python error", "leaked"):
        assert wrong not in said
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlived the process that started them"
        time.sleep(0.01)
    assert _shared_memory() <= shared
    process.stdout.close()
    process.stderr.close()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("workers", "turns"),
    [("thread", 1000), ("process", 200), pytest.param("process", 1000, marks=pytest.mark.soak)],
)
def test_iterators_left_halfway_leave_nothing(workers: str, turns: int) -> None:
    loader = DataLoader(faults.Numbered(), batch_size=2, num_workers=1, workers=workers)
    memory = []
    for turn in range(turns):
        batches = iter(loader)
        next(batches)
        if turn % 2:
            next(batches)
        del batches
        if turn % 20 == 19:
            gc.collect()
            memory.append(psutil.Process().memory_full_info().uss)
    assert min(memory[-3:]) < min(memory[:3]) + 20 * 2**20, memory


@pytest.mark.usefixtures("nothing_left")
def test_forking_while_threads_run() -> None:
    data = penstock.from_arrays({"x": np.arange(4000)})
    ahead = iter(penstock.Loader(data, batch_size=4, workers=3))
    next(ahead)
    threaded = iter(DataLoader(faults.Numbered(), batch_size=2, num_workers=3, workers="thread"))
    next(threaded)
    for _ in range(5):
        got = list(DataLoader(faults.Numbered(40, 3), batch_size=4, num_workers=2))
        assert torch.cat(got)[:, 0].tolist() == list(range(40))
        next(ahead), next(threaded)
    ahead.close()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("nothing_left")
def test_loaders_in_loaders() -> None:
    wanted = [row.item() + 100 * index for index in range(4) for row in torch.arange(8)]

    def flat(loader: Any) -> list[int]:
        return [int(row[0]) for batch in loader for row in batch[0]]

    inner = faults.Inner(DataLoader)
    for workers in ("process", "thread"):
        assert flat(DataLoader(inner, num_workers=2, workers=workers)) == wanted
    threads_inside = faults.Inner(DataLoader, num_workers=2, workers="thread")
    for workers in ("process", "thread"):
        assert flat(DataLoader(threads_inside, num_workers=2, workers=workers)) == wanted
    processes_inside = faults.Inner(DataLoader, num_workers=1)
    assert flat(DataLoader(processes_inside)) == wanted
    # As with PyTorch: a worker is a daemon, and those may have no children.
    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        flat(DataLoader(processes_inside, num_workers=1))


@pytest.mark.usefixtures("nothing_left")
def test_an_iteration_goes_on_only_in_its_own_process() -> None:
    threaded = iter(DataLoader(faults.Numbered(), num_workers=1, workers="thread"))
    next(threaded)
    # With a batch that is here already, the fork must not take it either.
    deadline = time.monotonic() + 30
    while not threaded._workers.waiting() and not threaded._arrived and time.monotonic() < deadline:
        time.sleep(0.001)
    next(threaded)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            try:
                next(threaded)
            except RuntimeError as error:
                os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert b"after a fork, begin one of your own" in os.read(reading, 1000)
    os.close(reading)
    next(threaded)


@pytest.mark.usefixtures("nothing_left")
def test_a_fork_keeps_the_batches_that_it_has() -> None:
    loader = DataLoader(faults.Numbered(200), batch_size=2, num_workers=1)
    batches = iter(loader)
    next(batches)
    held = next(batches)
    go_reading, go_writing = os.pipe()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        # What the parent and its worker do meanwhile must not show here.
        os.read(go_reading, 1)
        os.write(writing, bytes(held[:, 5].tolist()))
        os._exit(0)
    del held
    for _ in range(50):
        next(batches)
    os.write(go_writing, b"x")
    os.waitpid(child, 0)
    assert os.read(reading, 10) == bytes([2, 3])
    for descriptor in (go_reading, go_writing, reading, writing):
        os.close(descriptor)
    del batches


def _maps() -> int:
    with open("/proc/self/maps") as maps:
        return sum("penstock" in line for line in maps)


@pytest.mark.usefixtures("nothing_left")
def test_epochs_that_are_left_early_use_the_same_memory() -> None:
    loader = DataLoader(faults.Numbered(400), batch_size=4, num_workers=2, persistent_workers=True)
    counts = []
    for _ in range(40):
        for number, _ in enumerate(loader):
            if number == 5:
                break
        counts.append(_maps())
    assert max(counts[20:]) <= max(counts[:10]) + 4, counts


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("where", ["start", "state"])
def test_a_worker_thread_that_cannot_go_on_is_an_error_and_not_a_wait(where: str) -> None:
    if where == "start":
        loader = DataLoader(faults.Numbered(8), num_workers=1, workers="thread", worker_init_fn=faults.leave)
    else:
        loader = DataLoader(faults.KeepsLock(8), num_workers=1, workers="thread")
    with pytest.raises((SystemExit, TypeError), match=r"3|cannot pickle"):
        next(iter(loader))


@pytest.mark.usefixtures("nothing_left")
def test_a_worker_that_leaves_a_child_behind_is_missed_all_the_same(tmp_path: Path) -> None:
    """The child has the worker's socket, which therefore does not end with it."""
    loader = DataLoader(
        faults.LeavesChild(str(tmp_path / "pid")), num_workers=1, multiprocessing_context="spawn"
    )
    with pytest.raises(RuntimeError, match="exited unexpectedly with exit code 3"):
        list(loader)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
