"""JAX: batches as arrays, on one device or over a mesh of many processes."""

from typing import TYPE_CHECKING, Any

from headrace.errors import MissingExtraError, how_to_install

try:
    # Not `jax` alone: any directory of that name on the path would do for that.
    import jax.numpy as _numpy  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jax.numpy"):
        raise
    raise MissingExtraError(f"headrace.jax needs JAX: {how_to_install('jax')}") from error

from headrace.jax.loader import Loader

if TYPE_CHECKING:
    from headrace.jax.remote_loader import RemoteLoader

__all__ = ["Loader", "RemoteLoader"]


def __getattr__(name: str) -> Any:
    if name != "RemoteLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now: few need it, and it imports what talks to servers.
    from headrace.jax.remote_loader import RemoteLoader

    globals()[name] = RemoteLoader
    return RemoteLoader
