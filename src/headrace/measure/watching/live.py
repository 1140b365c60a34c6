"""A loader at a glance, drawn below what a script prints.

    headrace  DataLoader  1,234 batches in 0:01:02
      52.3 batches/s   1,674 rows/s   CPU 3.2 cores, 0.9 in the main process
      wait         12% ██▎                        2.30 ms per batch
      step         88% ████████████████▊         16.80 ms per batch
      read        140% ██████████████████████    26.70 ms per batch
      queue ready      ████░░░░ 4 of 8 waiting
      grpc://10.0.0.7:9000  up  52.3/s  38.0 ms  3 late  0 faults  6.4 MB/s
      waits lately     ▁▁▂▁▃▁▁▁▂▁▁
      the loop waits 12% of its time; most of the making is 'read'

`Picture` says what is drawn, `render` how, `LiveView` where. The cursor stays where the script's own output goes on,
and the picture hangs below it: so the output of worker processes and progress bars, which cannot be redirected, appears
above it.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from headrace.measure.watching.server_lines import ServerRow, server_lines, server_rows, server_words
from headrace.observe.stats import LOOP, LoaderStats, is_waiting

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS, _PLAIN_HEIGHTS = "▁▂▃▄▅▆▇█", "_.-=*#"
_SPARKS = 40
_NAME, _LONG_NAME, _FIGURE = 12, 20, 20
"""Columns of a stage's name, the most that it may take, and columns of its milliseconds."""
_FALLBACK = os.terminal_size((80, 24))

_ERASE = "\x1b[J"
"""From the cursor to the end of the screen."""
_DOWN, _SAVE, _BACK = "\x1bD", "\x1b7", "\x1b8"


@dataclass(frozen=True, kw_only=True)
class Picture:
    title: str
    batches_per_second: float
    rows_per_second: float | None = None
    """None if the number of rows in a batch is unknown."""
    wait_share: float = 0.0
    stages: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The share of the loop's time, above 1 if several workers ran at once; and milliseconds per batch."""
    queues: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """How many batches are waiting, and how many the queue can hold."""
    servers: Sequence[ServerRow] = ()
    """Those that make the batches."""
    cpu_total_cores: float | None = None
    """Summed over all processes."""
    cpu_main_cores: float | None = None
    history: Sequence[float] = ()
    """Recent wait shares, the latest last."""
    verdict: str = ""
    batches: int | None = None
    elapsed_seconds: float | None = None


def picture_of(
    title: str, recent: LoaderStats, seconds: float, *, total: LoaderStats | None = None, **more: Any
) -> Picture:
    """A picture with the rates and shares of the last `seconds`; `more` are fields that are not in the stats."""
    loop = sum(recent.seconds(name) for name in LOOP)
    stages = {
        name: (
            stage.seconds / loop if loop else 0.0,
            1e3 * stage.seconds / recent.batches if recent.batches else 0.0,
        )
        for name, stage in recent.stages.items()
    }
    known: dict[str, Any] = {
        "batches_per_second": recent.batches / seconds if seconds > 0 else 0.0,
        "rows_per_second": recent.rows / seconds if seconds > 0 and recent.rows else None,
        "wait_share": recent.wait_share,
        "stages": stages,
        "queues": {name: (queue.latest, queue.capacity) for name, queue in recent.queues.items()},
        "servers": server_rows(recent.servers, seconds, (total or recent).servers),
        "verdict": recent.verdict,
        "batches": (total or recent).batches,
    }
    return Picture(title=title, **(known | more))


def _listed(stages: Mapping[str, tuple[float, float]]) -> list[tuple[str, float, float]]:
    """The loop's own stages, then the stages that make batches, the busiest first."""
    making = sorted((name for name in stages if name not in LOOP), key=lambda name: -stages[name][0])
    return [(name, *stages[name]) for name in (*LOOP, *making) if name in stages]


def render(picture: Picture, *, width: int = 80, fancy: bool = True) -> Any:
    """A rich renderable; no line is longer than `width`. Without `fancy`, everything is ASCII."""
    from rich.console import Group
    from rich.text import Text

    room = min(_LONG_NAME, max([_NAME, *(len(name) + 1 for name in picture.stages)]))
    columns = max(4, width - room - _FIGURE - 11)
    verdict_style = "bold red" if _is_waiting(picture) else "bold green"
    lines = [
        Text.assemble(("headrace", "bold cyan"), *(f"  {each}" for each in _heading(picture))),
        Text(f"  {'   '.join(_speeds(picture))}"),
        *_stage_lines(picture, room, columns, fancy),
        *(Text(line) for line in _queue_lines(picture, room, columns // 2, fancy)),
        *server_lines(picture.servers, width),
    ]
    if picture.history:
        shares = picture.history[-min(_SPARKS, columns) :]
        lines.append(Text(f"  {'waits lately':<{room}}      {sparkline(shares, fancy)}"))
    if picture.verdict:
        lines.append(Text(f"  {_plain(picture.verdict)}", verdict_style))
    for line in lines:
        line.truncate(width, overflow="crop")
        line.no_wrap = True
    return Group(*lines)


def _is_waiting(picture: Picture) -> bool:
    return is_waiting(picture.wait_share)


def _stage_lines(picture: Picture, room: int, columns: int, fancy: bool) -> Iterator[Any]:
    """A bar of at most `columns` characters for each stage, all on the same scale."""
    from rich.text import Text

    listed = _listed(picture.stages)
    scale = max([1.0, *(share for _, share, _ in listed)])
    for name, share, milliseconds in listed:
        bar = _bar(share / scale, columns, fancy)
        line = Text(f"  {name[: room - 1]:<{room}}{share:>5.0%} ")
        line.append(f"{bar:<{columns}}", _stage_style(name, _is_waiting(picture)))
        line.append(f" {milliseconds:>{_FIGURE - 12},.2f} ms per batch")
        yield line


def _stage_style(name: str, waiting: bool) -> str:
    if name == "wait" and waiting:
        return "red"
    return "green" if name in LOOP else "blue"


def _queue_lines(picture: Picture, room: int, columns: int, fancy: bool) -> Iterator[str]:
    for name, (waits, capacity) in picture.queues.items():
        slots = _slots(waits, capacity, columns, fancy)
        yield f"  {'queue ' + name:<{room}}      {slots} {waits} of {capacity} waiting"


def _heading(picture: Picture) -> list[str]:
    said = [_plain(picture.title)]
    if picture.batches is not None:
        said.append(count_of_batches(picture.batches))
    if picture.elapsed_seconds is not None:
        said[-1] += f" in {duration(picture.elapsed_seconds)}"
    return said


def _speeds(picture: Picture) -> list[str]:
    said = [f"{rate(picture.batches_per_second)} batches/s"]
    if picture.rows_per_second is not None:
        said.append(f"{rate(picture.rows_per_second)} rows/s")
    if picture.cpu_total_cores is not None:
        said.append(f"CPU {picture.cpu_total_cores:.1f} cores")
        if picture.cpu_main_cores is not None:
            said[-1] += f", {picture.cpu_main_cores:.1f} in the main process"
    return said


def count_of_batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """3723 -> '1:02:03', and 3.7 -> '3.7 s'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _plain(text: str) -> str:
    """Unprintable characters, such as escape codes, must not act on the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _bar(fraction: float, columns: int, fancy: bool) -> str:
    """Anything above zero is visible."""
    if not fancy:
        return "#" * max(round(fraction * columns), int(fraction > 0))
    eighths = max(round(fraction * columns * 8), int(fraction > 0))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _slots(waits: int, capacity: int, columns: int, fancy: bool) -> str:
    full, empty = "█░" if fancy else "#."
    room = min(capacity, columns)
    filled = min(round(waits * room / max(capacity, 1)), room)
    return full * filled + empty * (room - filled)


def sparkline(shares: Sequence[float], fancy: bool) -> str:
    heights = _HEIGHTS if fancy else _PLAIN_HEIGHTS
    return "".join(heights[min(int(max(share, 0.0) * len(heights)), len(heights) - 1)] for share in shares)


def one_line(picture: Picture) -> str:
    """The picture as a single line for a log."""
    said = [*_heading(picture), *_speeds(picture)]
    said += [f"{name} {share:.0%} ({ms:,.2f} ms)" for name, share, ms in _listed(picture.stages)]
    said += [f"queue {name} {waits} of {capacity}" for name, (waits, capacity) in picture.queues.items()]
    said += [f"server {server.name} {server_words(server)}" for server in picture.servers]
    return f"headrace: {', '.join(said)}: {_plain(picture.verdict)}"


def can_draw(stream: Any) -> bool:
    """Whether the stream is a terminal that can move its cursor."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return bool(stream.isatty()) and stream.fileno() >= 0 and os.environ.get("TERM", "dumb") != "dumb"
    return False


def shows_unicode(stream: Any) -> bool:
    # What others put in place of a standard stream, for example while they draw, may not know its encoding.
    encoding = getattr(stream, "encoding", None) or getattr(sys.__stderr__, "encoding", None)
    try:
        (_EIGHTHS + _HEIGHTS).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class LiveView:
    """A place for pictures on a terminal, for as long as the context is open.

    It writes to the terminal itself, past Python's streams: a process that forks while another thread draws
    does not inherit a locked stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._terminal, self._fancy = stream.fileno(), shows_unicode(stream)
        self._above: list[tuple[str, _Above]] = []

    def __enter__(self) -> "LiveView":
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if can_draw(stream):
                above = _Above(stream)
                setattr(sys, name, above)
                self._above.append((name, above))
                _hand_over(stream, above)
        _views.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _views.remove(self)
        for name, above in self._above:
            above.over = True
            # Unless someone else has replaced it, and will restore it.
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
            _hand_over(above, above.stream)
        if self._in_front():
            self._write(_ERASE)

    def show(self, picture: Picture) -> None:
        self.draw(lambda width, fancy: render(picture, width=width, fancy=fancy))

    def draw(self, rendered: Callable[[int, bool], Any]) -> None:
        """Draw what a function makes of a width, and of whether there is more than ASCII."""
        # A view opened inside this one, for example for validation, has priority.
        if (_views and _views[-1] is not self) or not self._in_front():
            return
        columns, rows = self._size()
        lines = self._drawn(rendered(columns - 1, self._fancy), columns)[: rows - 2]
        # Make room first, scrolling if necessary; then move back up and draw from there.
        room = _DOWN * len(lines) + f"\x1b[{len(lines)}A" if lines else ""
        self._write(room + _SAVE + _ERASE + "".join(f"\r\n{line}" for line in lines) + _BACK)

    def _in_front(self) -> bool:
        """False for a background job, while the shell owns the terminal."""
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:
            return True

    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._terminal)
        except OSError:
            return _FALLBACK
        return size if size.columns > 0 and size.lines > 0 else _FALLBACK

    def _drawn(self, rendered: Any, columns: int) -> list[str]:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, force_terminal=True, width=columns, highlight=False).print(rendered)
        return text.getvalue().splitlines()

    def _write(self, text: str) -> None:
        view = memoryview(text.encode(errors="replace"))
        while view:
            view = view[os.write(self._terminal, view) :]


_views: list[LiveView] = []


def _hand_over(old: Any, new: Any) -> None:
    """Log handlers hold on to the stream that existed when they were set up."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {each for logger in loggers for each in getattr(logger, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


class _Above:
    """A stream whose lines push the picture down: everything right of the cursor and below it is erased first."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.over = stream, False

    def write(self, text: str) -> int:
        self.stream.write(text if self.over else text.replace("\n", f"{_ERASE}\n", 1))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
