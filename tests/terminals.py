"""A terminal for tests: what a user sees of a program that draws."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pytest

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
