"""What the commands need from a terminal: its width, what it can show, and a progress bar."""

import contextlib
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control codes, marks that reverse the direction of text, and what is no character; not tab and newline."""
PIPED_WIDTH = 80


def width() -> int:
    """The terminal's width; a fixed one when piped, so that output does not depend on the terminal."""
    return max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else PIPED_WIDTH


def unicode_works(stream: Any = None) -> bool:
    """Whether a stream, which is standard output if none is given, shows more than ASCII."""
    shown = sys.stdout if stream is None else stream
    try:
        _EIGHTHS.encode(getattr(shown, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(fraction: float, columns: int, fancy: bool = True) -> str:
    """A bar of at most `columns` characters, in steps of an eighth; anything above zero shows."""
    if not fancy:
        return "#" * max(round(fraction * columns), int(fraction > 0))
    eighths = max(round(fraction * columns * 8), int(fraction > 0))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def byte_size(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    if count < 1024:
        return f"{count} bytes"
    size, units = count / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def counted(count: int, thing: str, things: str | None = None) -> str:
    """(1, 'shard') -> '1 shard'; (1200, 'shard') -> '1,200 shards'; (2, 'batch', 'batches') -> '2 batches'."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {things or thing + 's'}"


def safe_text(text: str) -> str:
    """Text that may be foreign, as it is safe to print: the names, keys and values of data, and so every message that
    quotes them, may contain escape codes that would act on the terminal. They are shown instead."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class SafeFormatter(logging.Formatter):
    """For messages that are logged to a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_text(super().format(record))


@contextlib.contextmanager
def progress_bar(title: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; yields the function that advances it."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    amount = MofNCompleteColumn() if unit else DownloadColumn(binary_units=True)
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TextColumn(unit), TimeRemainingColumn())
    # Rich would send what is echoed meanwhile to stderr, above the bar, which is wrong if stdout is a file or a pipe.
    shared = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=shared) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.advance(task, amount)
