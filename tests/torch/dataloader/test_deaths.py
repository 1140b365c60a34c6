"""Workers that die, exit or hang: an error that says what happened, and nothing is left of them."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="needs torch")

from headrace.torch import DataLoader
from headrace.torch.workers import children, processes
from tests.torch.dataloader import fault_datasets as faults
from tests.torch.leftovers import is_alive, is_receiving, wait_until, worker_threads

# Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


@pytest.mark.parametrize("turns", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_a_worker_that_is_killed_at_any_moment_shows_at_once(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It shows by its socket, and not when the loader looks after its workers now and then.
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 600)
    rng = random.Random(0)
    for _ in range(turns):
        loader = DataLoader(faults.Numbered(seconds=0.0005), batch_size=2, num_workers=2)
        batches = iter(loader)
        for _ in range(rng.randrange(4)):
            next(batches)
        victim = rng.choice(batches._workers.pids())
        time.sleep(rng.random() * 0.003)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=rf"worker \(pid {victim}\) is killed by signal: Killed"):
            for _ in batches:
                pass
        with pytest.raises(RuntimeError, match=str(victim)):
            next(batches)
        del batches


def test_all_workers_killed_while_the_loop_waits_for_a_slow_batch() -> None:
    batches = iter(DataLoader(faults.Hanging(), batch_size=2, num_workers=2))
    pids: list[int] = batches._workers.pids()
    handed: list[Any] = []

    def take_all() -> None:
        for batch in batches:
            handed.append(batch)

    def kill_all() -> None:
        # The fourth batch does not come.
        wait_until(lambda: len(handed) == 3 and is_receiving(threading.main_thread()))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    killing = threading.Thread(target=kill_all)
    killing.start()
    with pytest.raises(RuntimeError, match="killed by signal: Killed"):
        take_all()
    killing.join()


def test_a_worker_that_exits_shows_with_its_code() -> None:
    with pytest.raises(RuntimeError, match=r"\(pid\(s\) \d+\) exited unexpectedly with exit code 7"):
        list(DataLoader(faults.Exiting(), num_workers=2))


def test_a_worker_of_a_server_that_is_killed_shows_with_pid_and_signal(forkserver: Any) -> None:
    loader = DataLoader(faults.Numbered(seconds=0.001), num_workers=2, multiprocessing_context=forkserver)
    batches = iter(loader)
    next(batches)
    victim = batches._workers.pids()[1]
    os.kill(victim, signal.SIGSEGV)
    with pytest.raises(RuntimeError, match=rf"worker \(pid {victim}\) is killed by signal: Segmentation"):
        for _ in batches:
            pass


def test_a_dataset_that_hangs_in_a_process_meets_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_STOP_SECONDS", 0.2)
    batches = iter(DataLoader(faults.Hanging(), batch_size=2, num_workers=2, timeout=0.2))
    with pytest.raises(RuntimeError, match="DataLoader timed out after 0.2 seconds"):
        _ask_until_it_hangs(batches)
    victims = batches._workers.pids()
    del batches
    assert not any(psutil.pid_exists(victim) for victim in victims)


def test_a_dataset_that_hangs_in_a_thread_meets_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.Hanging, "let_go", threading.Event())
    loader = DataLoader(faults.Hanging(), batch_size=2, num_workers=2, timeout=0.2, worker_kind="thread")
    batches = iter(loader)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 0.2 seconds"):
        _ask_until_it_hangs(batches)
    # Nobody can end a thread: it goes when it is let go.
    faults.Hanging.let_go.set()
    del batches
    wait_until(lambda: not worker_threads())


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
def test_a_worker_that_does_not_even_read_meets_the_timeout(
    pin_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose code holds the interpreter's lock. Its socket is full, with indices of a megabyte."""
    monkeypatch.setattr(children, "_STOP_SECONDS", 0.2)
    loader = DataLoader(
        faults.Indices(),
        batch_sampler=[[number] * 10**5 for number in range(9)],
        num_workers=1,
        collate_fn=len,
        timeout=2,
        pin_memory=pin_memory,
    )
    batches = iter(loader)
    assert next(batches) == 10**5
    (victim,) = batches._workers.pids()
    os.kill(victim, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 2 seconds"):
        list(batches)
    os.kill(victim, signal.SIGCONT)
    del batches


def test_indices_that_fill_the_socket_all_arrive() -> None:
    sizes = [1, 10**5, 3, 2 * 10**5, 5]
    loader = DataLoader(
        faults.Indices(),
        batch_sampler=[[0] * size for size in sizes * 3],
        num_workers=2,
        prefetch_factor=7,
        collate_fn=len,
    )
    assert list(loader) == sizes * 3


def _ask_until_it_hangs(batches: Any) -> None:
    """Three batches come, each of them perhaps late; the fourth does not."""
    came = 0
    while came < 3:
        try:
            next(batches)
            came += 1
        except RuntimeError as error:
            assert "timed out" in str(error)
    next(batches)


@pytest.mark.parametrize("where", ["start", "state"])
def test_a_worker_thread_that_cannot_go_on_is_an_error_and_not_a_wait(where: str) -> None:
    if where == "start":
        loader = DataLoader(
            faults.Numbered(8), num_workers=1, worker_kind="thread", worker_init_fn=faults.leave
        )
    else:
        loader = DataLoader(faults.KeepsLock(8), num_workers=1, worker_kind="thread")
    with pytest.raises((SystemExit, TypeError), match=r"3|cannot pickle"):
        next(iter(loader))


@pytest.mark.parametrize("worker_kind", ["process", "thread"])
def test_workers_that_stay_and_cannot_say_how_they_begin_are_an_error_and_not_a_wait(
    worker_kind: str,
) -> None:
    loader = DataLoader(
        faults.SpoilsState(8),
        num_workers=1,
        worker_kind=worker_kind,
        persistent_workers=True,
        snapshot_every_n_steps=0,
    )
    assert len(list(loader)) == 8
    with pytest.raises(TypeError, match="cannot pickle"):
        iter(loader)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_that_leaves_a_child_behind_is_missed_all_the_same(
    method: str, forkserver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has the worker's socket, which therefore does not end with it."""
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.05)
    dataset = faults.LeavesChild(str(tmp_path / "pid"))
    with pytest.raises(RuntimeError, match="exited unexpectedly with exit code 3"):
        list(DataLoader(dataset, num_workers=1, multiprocessing_context=method))
    child = int((tmp_path / "pid").read_text())
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)
