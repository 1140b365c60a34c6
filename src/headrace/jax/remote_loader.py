"""The RemoteLoader, with JAX arrays in its batches, on one device or over a mesh."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from jax.sharding import NamedSharding

from headrace.errors import SettingsError
from headrace.jax.loader import ToMesh, check_sharding, default_fields, is_truncated, rank_of
from headrace.load.settings import LoaderSettings
from headrace.public import public
from headrace.serve.description import Description
from headrace.serve.remote_loader import RemoteArguments
from headrace.serve.remote_loader import RemoteLoader as HostRemoteLoader


class RemoteLoader(HostRemoteLoader):
    """A `headrace.RemoteLoader` with JAX arrays; see `headrace.jax.Loader` for how they are sharded.

    The Loader of the servers has to make batches that JAX can hold: serve a `headrace.jax.Loader`, or one with
    dtype="int32". As with a `headrace.jax.Loader`, `cu_seqlens` and `max_seqlen` of token rows are left out unless the
    servers' Loader names them in its `fields`, or has `max_documents`.

    Args:
        addresses: Where the servers are, as for a `headrace.RemoteLoader`.
        sharding: How global arrays are divided over devices, as for a `headrace.jax.Loader`.
        **arguments: All other arguments of `headrace.RemoteLoader`; see `help(headrace.RemoteLoader)`.
    """

    @public
    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        sharding: NamedSharding | None = None,
        **arguments: Unpack[RemoteArguments],
    ) -> None:
        options: Any = dict(arguments)
        self.sharding = sharding
        self._rows, explicit = rank_of(sharding, options)
        super().__init__(addresses, **explicit, **options)
        self.delivery = ToMesh(self._rows, self.settings.batch_size)

    def _chosen(self, settings: LoaderSettings, description: Description) -> LoaderSettings:
        ranks = self._rows.world.size if self._rows else 1
        if settings.seq_len is not None and settings.fields is None and not description.functions:
            settings = replace(
                settings, fields=tuple(default_fields(settings.max_documents is not None, ranks))
            )
        if settings.seq_len is not None and is_truncated(settings):
            raise SettingsError(
                f"the Loader of the servers makes tokens of {settings.dtype}, which JAX would truncate to int32; let "
                'them serve a headrace.jax.Loader, or one with dtype="int32"'
            )
        check_sharding(settings, self._rows)
        return settings
