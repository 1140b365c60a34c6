"""JAX: batches as arrays, on one device or over a mesh of many processes."""

from headrace.errors import MissingExtraError, how_to_install

try:
    # Not `jax` alone: any directory of that name on the path would do for that.
    import jax.numpy as _numpy  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jax.numpy"):
        raise
    raise MissingExtraError(f"headrace.jax needs JAX: {how_to_install('jax')}") from error

from headrace.jax.loader import Loader

__all__ = ["Loader"]
