"""What a user sees on a terminal: a picture below the script's own output, and nothing of it afterwards."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.measure.watching.live import Picture, one_line, render

DEADLINE_SECONDS = 60.0


class Screen:
    """A small terminal: characters, carriage returns, line feeds, and the few codes that a view needs."""

    CODE = re.compile(r"\x1b(?:\[([0-9;?]*)([A-Za-z])|([D78]))")

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self.gone: list[str] = []
        self.lines = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.saved = (0, 0)

    def feed(self, text: str) -> None:
        place = 0
        while place < len(text):
            if match := self.CODE.match(text, place):
                self._obey(match)
                place = match.end()
                continue
            character, place = text[place], place + 1
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self._down()
            else:
                assert character.isprintable(), repr(character)
                if self.column == self.columns:
                    self.column = 0
                    self._down()
                self.lines[self.row][self.column] = character
                self.column += 1

    def _obey(self, match: re.Match[str]) -> None:
        match match[2] or match[3]:
            case "D":
                self._down()
            case "7":
                self.saved = (self.row, self.column)
            case "8":
                self.row, self.column = self.saved
            case "A":
                self.row = max(0, self.row - int(match[1] or 1))
            case "J":
                self.lines[self.row][self.column :] = [" "] * (self.columns - self.column)
                for row in range(self.row + 1, self.rows):
                    self.lines[row] = [" "] * self.columns
            case "m":
                pass
            case other:
                pytest.fail(f"the code {other!r}")

    def _down(self) -> None:
        self.row += 1
        if self.row == self.rows:
            self.gone.append("".join(self.lines.pop(0)).rstrip())
            self.lines.append([" "] * self.columns)
            self.row -= 1

    @property
    def text(self) -> list[str]:
        shown = self.gone + ["".join(line).rstrip() for line in self.lines]
        while shown and not shown[-1]:
            shown.pop()
        return shown


class Terminal:
    """A script with a terminal of its own, that shows what it writes and not what is typed."""

    def __init__(self, program: str, rows: int = 24, columns: int = 80, **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment},
        )
        os.close(slave)
        self.screen, self.raw = Screen(rows, columns), b""
        self._decoder, self._rest = codecs.getincrementaldecoder("utf-8")(), ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def until(self, found: Callable[[str], Any]) -> str:
        """Read until the screen shows something; the screen."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not found(shown := "\n".join(self.screen.text)):
            assert time.monotonic() < deadline, shown
            assert self._read(), shown
        return shown

    def press_enter(self) -> None:
        os.write(self._master, b"\n")

    def end(self) -> list[str]:
        while self._read():
            pass
        self.process.wait(DEADLINE_SECONDS)
        return self.screen.text

    def _read(self) -> bool:
        if not select.select([self._master], [], [], DEADLINE_SECONDS)[0]:
            return False
        try:
            chunk = os.read(self._master, 2**16)
        except OSError:
            return False
        self.raw += chunk
        # A read may end inside a code.
        text = self._rest + self._decoder.decode(chunk)
        cut = len(text) - len(re.search(r"(\x1b(\[[0-9;?]*)?)?$", text)[0])  # type: ignore[index]
        self.screen.feed(text[:cut])
        self._rest = text[cut:]
        return bool(chunk)


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
