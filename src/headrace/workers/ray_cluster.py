"""A connection to a Ray cluster: one that exists, or one that is started on this machine for the purpose."""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from headrace.errors import HeadraceError, MissingExtraError, how_to_install
from headrace.observe.host import useful_cores

_CONNECT_SECONDS = 10.0


def import_ray(needed_by: str) -> Any:
    """Ray, or an error that says who needs it and how to install it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise MissingExtraError(f"{needed_by} needs Ray: {how_to_install('ray')}") from None
    return ray


def connect(ray: Any, address: str | None, processors: int | None, error_class: type[HeadraceError]) -> None:
    """Connect to the cluster at an address, or that of RAY_ADDRESS, or to one that is started here.

    A cluster that is started here has so many processors, by default those of this machine.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    quietly: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        _check_that_somebody_listens(address, error_class)
    try:
        with _signals_as_they_are():
            if address is not None:
                ray.init(address=address, **quietly)
            else:
                count = processors or max(1, int(useful_cores()))
                ray.init(address="local", num_cpus=count, include_dashboard=False, **quietly)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the Ray cluster at {address}" if address else "Ray on this machine"
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise error_class(
            f"address={address!r}: cannot connect to {where}: {reason[0]}; check the address, that its version of "
            f"Ray is {ray.__version__}, and, if it asks for a token, set RAY_AUTH_MODE=token"
        ) from None


def disconnect(ray: Any) -> None:
    with _signals_as_they_are():
        ray.shutdown()


def send_by_content(ray: Any, *defined: Callable[..., Any]) -> None:
    """Send the modules of these functions and classes to nodes by their content, so that they run where Headrace is
    missing, and can say so."""
    for each in defined:
        ray.cloudpickle.register_pickle_by_value(sys.modules[each.__module__])


def _check_that_somebody_listens(address: str, error_class: type[HeadraceError]) -> None:
    """Ray would try for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # like "auto", which Ray finds out itself
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            pass
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise error_class(
            f"address={address!r}: nothing answers there ({reason}); check the address, and that the cluster is running"
        ) from None


@contextlib.contextmanager
def _signals_as_they_are() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, which is not ours to replace."""
    try:
        before = signal.getsignal(signal.SIGTERM)
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread, where nobody can replace it either
            signal.signal(signal.SIGTERM, before)
