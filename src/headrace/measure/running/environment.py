"""The machine and the versions that figures belong to, without anything that names the machine or its users."""

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

from headrace.observe.host import allowed_cores

_PACKAGES = ("headrace", "numpy", "torch", "jax", "pyarrow", "datasets", "torchdata", "psutil")


def describe_environment() -> dict[str, Any]:
    return {
        "cores": allowed_cores(),
        "cpu": _cpu_name(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "accelerators": accelerators(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load_average_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def accelerators() -> list[str]:
    """The devices that torch uses in this process; nothing is imported or initialised to find out."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
