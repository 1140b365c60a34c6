"""What this process may use of the machine: cores, memory, an accelerator, and its share of them among ranks.

Most interfaces show a container the whole machine; what it may use is in its control group.
"""

import os
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 2**60
"""A control group without a limit reports a number near 2^63."""


def allowed_cores() -> int:
    """The cores that the scheduler may run this process on; PyTorch counts the same way."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache(maxsize=1)
def useful_cores() -> float:
    """The allowed cores, as far as the control group's quota covers them."""
    quota = _cpu_quota()
    return float(allowed_cores()) if quota is None else min(float(allowed_cores()), quota)


def local_ranks() -> int:
    """The number of this job's processes on this machine, as set by the launcher."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        number = os.environ.get(name, "")
        if number.isdigit() and int(number) > 0:
            return int(number)
    return 1


def is_first_rank() -> bool:
    """Whether this is the process that speaks for all of the job's processes on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def accelerator_available() -> bool:
    """Whether PyTorch finds one, if the program uses PyTorch. Tests replace this function."""
    torch = sys.modules.get("torch")
    accelerator = getattr(torch, "accelerator", None)
    if torch is None or accelerator is None:
        return False
    device = accelerator.current_accelerator()
    if device is None:
        return False
    if device.type == "cuda":
        # Not `is_available`: it initialises CUDA, after which no fork of this process could use CUDA.
        return bool(torch.cuda.device_count())
    return bool(accelerator.is_available())


def torch_threads() -> int | None:
    """The number of threads with which PyTorch computes on the processor; None if the program does not use it."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def memory_bytes() -> int:
    """All memory that this process could ever use."""
    limit = _memory_limit()
    whole = _memory("MemTotal", "total")
    return whole if limit is None else min(whole, limit)


def available_bytes() -> int:
    """The memory that is available now, including what the page cache would give up."""
    return min(_memory("MemAvailable", "available"), memory_bytes())


def _memory(name: str, elsewhere: str) -> int:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        label, _, value = line.partition(":")
        if label == name:
            return int(value.split()[0]) * 1024
    import psutil

    return int(getattr(psutil.virtual_memory(), elsewhere))


def read_time() -> float:
    """Seconds on a monotonic clock; tests replace it."""
    return time.monotonic()


class CpuClock(NamedTuple):
    at: float
    busy_seconds: float
    """Of all cores that this process may use, whichever process used them."""
    cores: float

    def share_since(self, earlier: "CpuClock") -> float:
        passed = (self.at - earlier.at) * self.cores
        return (self.busy_seconds - earlier.busy_seconds) / passed if passed > 0 else 0.0


def read_cpu_clock() -> CpuClock:
    cores, used = useful_cores(), _group_cpu_seconds()
    if used is not None and cores < allowed_cores():
        return CpuClock(read_time(), used, cores)
    import psutil

    each = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        each = [times for number, times in enumerate(each) if number in os.sched_getaffinity(0)]
    idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in each)
    # A guest's time is part of its host's user time too, and so would count twice.
    guests = sum(getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0) for times in each)
    whole = sum(sum(times) for times in each) - guests
    return CpuClock(read_time(), whole - idle, float(len(each) or 1))


def _cpu_quota() -> float | None:
    for folder in _folders("cpu"):
        # Control groups of version 2, then of version 1.
        words = (_read(folder / "cpu.max") or "").split()
        if not words:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            words = [quota, period] if quota and period else []
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            return max(0.1, int(words[0]) / int(words[1]))
    return None


def _group_cpu_seconds() -> float | None:
    for folder in _folders("cpu"):
        for line in (_read(folder / "cpu.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name == "usage_usec" and value.isdigit():
                return int(value) / 1e6
    return None


def _memory_limit() -> int | None:
    for folder in _folders("memory"):
        said = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes") or ""
        if said.isdigit() and 0 < int(said) < _UNLIMITED_BYTES:
            return int(said)
    return None


def _folders(controller: str) -> Iterator[Path]:
    """The folders where this process's control group may be: its own path, or the root as a container sees it."""
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inside = path.strip("/")
        if not controllers:
            yield from dict.fromkeys((_GROUPS / inside, _GROUPS))
        elif controller in controllers.split(","):
            yield from dict.fromkeys((_GROUPS / controller / inside, _GROUPS / controller))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
