"""JAX: batches as arrays, on one device or over a mesh of many processes."""

from penstock.errors import MissingExtraError

try:
    # Not `jax` alone: any directory of that name on the path would do for that.
    import jax.numpy as _numpy  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jax.numpy"):
        raise
    raise MissingExtraError("penstock.jax needs JAX: pip install penstock[jax]") from error

from penstock.jax.loader import Loader

__all__ = ["Loader"]
