"""What a user sees on a terminal: a picture below the script's own output, and nothing of it afterwards."""

import os
import re
import signal

import pytest

from headrace.measure.watching.live import Picture, one_line, picture_of, render
from headrace.measure.watching.server_lines import server_rows
from headrace.observe.stats import LoaderStats, ServerStats, StageStats
from tests.terminals import Terminal

PROGRAM = """
import logging, os, sys, time
import numpy as np
import headrace
from headrace.measure.watching import monitor as module
from headrace.measure.watching.monitor import monitor

# Many pictures in a short time, each with all that can be in it.
module._LEAST_SECONDS = module._CPU_SECONDS = 0.0
logging.basicConfig(format="%(message)s", level="INFO", stream=sys.stderr)
data = headrace.from_arrays({"x": np.arange(100000.0).reshape(10000, 10)})
loader = headrace.Loader(data, batch_size=10, epochs=None)
"""
TALKS = """
with monitor(loader, every_seconds=0.02) as watched:
    for number, batch in enumerate(watched):
        time.sleep(0.002)
        if number % 10 == 0:
            print(f"step {number}")
            print(f"two lines {number}", f"at once {number}", sep=chr(10))
            logging.info(f"logged {number}")
            logging.info(f"logged again {number}")
            os.write(2, f"a worker's line {number}{chr(10)}".encode())
        if number % 10 < 5:
            sys.stderr.write(chr(13) + f"bar {number % 10}")
        if number % 10 == 5:
            sys.stderr.write(chr(10))
        if number == 69:
            sys.stdin.readline()
            break
"""


def test_the_view_hangs_below_what_the_script_prints_and_leaves_nothing_behind() -> None:
    with Terminal(PROGRAM + TALKS, columns=120) as terminal:
        pieces = ["batches/s", "rows/s", " cores, ", "wait ", "step ", "gather "]
        pieces += ["queue ready", "waits lately", "█"]
        terminal.until(lambda shown: all(piece in shown for piece in pieces))
        terminal.press_enter()
        final = terminal.end()
    assert terminal.process.returncode == 0
    said = []
    for number in range(0, 70, 10):
        said += [f"step {number}", f"two lines {number}", f"at once {number}"]
        said += [f"logged {number}", f"logged again {number}", f"a worker's line {number}", "bar 4"]
    assert final[:-1] == said
    assert re.fullmatch(
        r"headrace: 70 batches in [\d.]+ s, [\d.,]+/s: the loop waits \d+% of its time.*", final[-1]
    )


def test_without_unicode_all_is_ascii_and_a_small_terminal_is_enough() -> None:
    with Terminal(PROGRAM + TALKS, rows=6, columns=40, PYTHONIOENCODING="ascii") as terminal:
        terminal.until(lambda shown: "batches/s" in shown and "a worker's line 60" in shown)
        terminal.press_enter()
        final = terminal.end()
    assert terminal.process.returncode == 0
    assert terminal.raw.isascii()
    assert "step 0" in final
    assert not [line for line in final if "batches/s" in line]


def test_ctrl_c_leaves_the_terminal_clean() -> None:
    loop = """
was = sys.stdout, sys.stderr
try:
    with monitor(loader, every_seconds=0.02) as watched:
        for batch in watched:
            time.sleep(0.005)
except KeyboardInterrupt:
    print("interrupted", was == (sys.stdout, sys.stderr))
"""
    with Terminal(PROGRAM + loop, columns=120) as terminal:
        terminal.until(lambda shown: "batches/s" in shown)
        os.kill(terminal.process.pid, signal.SIGINT)
        final = terminal.end()
    assert len(final) == 2
    assert final[0].startswith("headrace: ")
    assert final[1] == "interrupted True"


def drawn(picture: Picture, width: int, fancy: bool) -> list[str]:
    from rich.console import Console

    console = Console(width=200, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(render(picture, width=width, fancy=fancy))
    return captured.get().splitlines()


@pytest.mark.parametrize("fancy", [True, False])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_picture_fits_and_hides_nothing_that_acts(width: int, fancy: bool) -> None:
    picture = Picture(
        title="train:make\x1b[2J" + "x" * width,
        batches_per_second=12.34,
        rows_per_second=12345.0,
        wait_share=0.5,
        stages={"wait": (0.5, 1.0), "step": (0.5, 1.0), "read": (7.5, 15.0), "pin": (0.0, 0.0)},
        queues={"ready": (3, 10_000), "odd": (7, 0)},
        cpu_total_cores=3.25,
        history=[0.0, 0.5, 1.0, 7.0, -1.0] * 30,
        verdict="the loop waits",
    )
    lines = drawn(picture, width, fancy)
    assert len(lines) == 10
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert fancy or "".join(lines).isascii()
    assert [line.split()[0] for line in lines[2:6]] == ["wait", "step", "read", "pin"]
    if width >= 80:
        assert "12.3 batches/s   12,345 rows/s   CPU 3.2 cores" in lines[1]
        assert lines[4].endswith("15.00 ms per batch")
    assert "750%" in lines[4]
    assert one_line(picture).count("\n") == 0


def test_an_empty_picture_is_one_too() -> None:
    assert "0 batches/s" in drawn(Picture(title="x", batches_per_second=0.0), 80, True)[1]


SERVERS = {
    "grpc://10.0.0.7:9000": ServerStats("up", answers=100, bytes=20_000_000, seconds=3.8, late=1),
    "grpc://10.0.0.123:9000": ServerStats("up", answers=250, bytes=50_000_000, seconds=25.0),
    "unix:///run/\x1b[2Ja.sock": ServerStats("silent", late=1, faults=1),
}
WHOLE = {
    "grpc://10.0.0.7:9000": ServerStats("up", answers=900, seconds=36.0, late=3, faults=2),
    "unix:///run/\x1b[2Ja.sock": ServerStats("silent", answers=10, seconds=0.4, late=12, faults=1),
}


def test_each_server_has_a_line_those_that_need_a_look_first() -> None:
    stages = {"step": StageStats(350, 5.0), "server transform": StageStats(350, 2.5)}
    recent = LoaderStats(batches=350, stages=stages, servers=SERVERS)
    picture = picture_of("RemoteLoader", recent, 5.0, total=LoaderStats(servers=WHOLE))
    lines = drawn(picture, 80, True)
    assert lines[3].startswith("  server transform   50% ")
    assert [line.split() for line in lines[4:7]] == [
        "unix:///run/?[2Ja.sock silent 0.0/s 40.0 ms 12 late 1 fault 0.0 MB/s".split(),
        "grpc://10.0.0.123:9000 up 50.0/s 100.0 ms 0 late 0 faults 10.0 MB/s".split(),
        "grpc://10.0.0.7:9000 up 20.0/s 38.0 ms 3 late 2 faults 4.0 MB/s".split(),
    ]
    assert "server grpc://10.0.0.7:9000 up 20.0/s 38.0 ms 3 late 2 faults 4.0 MB/s" in one_line(picture)
    narrow = drawn(picture, 50, True)
    assert max(map(len, narrow)) <= 50
    assert [line.split()[0] for line in narrow[4:7]] == ["..?[2Ja.sock", "..0.123:9000", "..0.0.7:9000"]


def test_of_many_servers_the_slowest_are_shown() -> None:
    many = {f"grpc://10.0.0.{n}:9000": ServerStats("up", answers=10, seconds=n / 10) for n in range(30)}
    picture = Picture(title="x", batches_per_second=1.0, servers=server_rows(many, 1.0, many))
    lines = drawn(picture, 80, True)
    assert lines[2].startswith("  grpc://10.0.0.29:9000")
    assert lines[-1] == "  and 22 more servers, which answer faster"
