"""The processor time and memory that a process and its descendants use. What an OS does not report is None."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

_MB = 1e6


@dataclass(frozen=True)
class CpuSeconds:
    total: float
    """Of the process and all its descendants, including those that have ended."""
    main: float


def cpu_seconds(pid: int | None = None) -> CpuSeconds:
    total = main = 0.0
    for number, process in enumerate(_tree(pid)):
        with contextlib.suppress(psutil.Error, OSError):
            times = process.cpu_times()
            own = times.user + times.system
            # Of children that have ended and were waited for; psutil has these on POSIX only.
            ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            total += own + ended
            if number == 0:
                main = own
    return CpuSeconds(total, main)


@dataclass(frozen=True)
class MemoryMb:
    """Peaks over a process and its descendants. `pss` divides each shared page among the processes that share it; `uss`
    counts what would be freed if they ended."""

    pss: float | None = None
    uss: float | None = None
    rss: float | None = None

    def higher(self, other: "MemoryMb") -> "MemoryMb":
        return MemoryMb(
            _higher(self.pss, other.pss), _higher(self.uss, other.uss), _higher(self.rss, other.rss)
        )


def _higher(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return max(a, b)


def memory(pid: int | None = None) -> MemoryMb:
    sums: dict[str, float | None] = {}
    for process in _tree(pid):
        # A process that ends meanwhile, or belongs to someone else, is left out.
        with contextlib.suppress(psutil.Error, OSError):
            info = process.memory_full_info()
            for name in ("pss", "uss", "rss"):
                value = getattr(info, name, None)
                if value is not None:
                    sums[name] = (sums.get(name) or 0.0) + value / _MB
    return MemoryMb(**{name: None if value is None else round(value, 1) for name, value in sums.items()})


def _tree(pid: int | None) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


class PeakMemory:
    """Looks repeatedly while it is entered. Best used from another process: reading a large process takes a while."""

    def __init__(self, pid: int | None = None, seconds_between: float = 0.2) -> None:
        self._pid, self._pause = pid, seconds_between
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headrace-memory", daemon=True)
        self.peak = MemoryMb()

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            # The first look comes at once: the process may end before the first pause does.
            self.peak = self.peak.higher(memory(self._pid))
            over = self._stop.wait(self._pause)
