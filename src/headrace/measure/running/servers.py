"""Servers as a target: their addresses, separated by commas, stand for a RemoteLoader.

    grpc://cpu-1:9000,grpc://cpu-2:9000        headrace.RemoteLoader([...], **settings)
    file:///shared/servers                     the servers that the file lists
    ray:headrace                               the servers of that name on a Ray cluster

`servers=N` is a setting of such a target: the first N of its addresses.
"""

import os
import random
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from headrace.checks import whole_number
from headrace.errors import SettingsError
from headrace.load.loader import Loader
from headrace.serve.addresses import listed_in, parse_addresses

SERVERS = "servers"
_OF_DATASETS = ("dataset_size", "cache", "cache_bytes")
"""Settings of a dataset that is opened here."""
_TIMEOUT_SECONDS = 30.0
"""Whoever measures servers does not want to wait ten minutes for one that is not there."""
_FARTHEST_POSITION = 2**48
_BEGINNING = r"(?:(?:grpc|grpc\+tls|unix|file):/|ray:[^/])"
_ADDRESS = re.compile(_BEGINNING)
_BETWEEN = re.compile(rf",\s*(?={_BEGINNING})")
"""Other commas are part of a path."""


def names_servers(name: str) -> bool:
    """Whether a target is the address of a server, or those of several; a file of that name is a dataset."""
    return _ADDRESS.match(name) is not None and not os.path.exists(name)


def parse_servers(name: str) -> list[str]:
    """The addresses of a target. SettingsError if one of them is none."""
    return parse_addresses([each.strip() for each in _BETWEEN.split(name)])


def count_servers(name: str) -> int:
    """How many servers a target has, as far as its addresses say."""
    return len(_each(parse_servers(name)))


def _each(addresses: list[str]) -> list[str]:
    """The addresses, with those that files list now in place of the files."""
    found: list[str] = []
    for address in addresses:
        found += _listed(address) if address.startswith("file:") else [address]
    return found


def _listed(address: str) -> list[str]:
    try:
        return listed_in(urlsplit(address).path)
    except OSError as error:
        raise SettingsError(
            f"{address}: cannot be read: {error.strerror}; give a file that lists servers"
        ) from None


def wait_for_servers(name: str, settings: Mapping[str, Any]) -> None:
    """Wait until one of the servers answers and the settings agree with it. What it waits for is in the log."""
    here = {setting: value for setting, value in settings.items() if setting != "device"}
    make_served_loader(name, here).close()


def make_served_loader(name: str, settings: Mapping[str, Any]) -> Any:
    """A RemoteLoader on the servers; with tensors if a device is given."""
    import headrace

    chosen = dict(settings)
    addresses = parse_servers(name)
    for setting in _OF_DATASETS:
        if setting in chosen:
            raise SettingsError(
                f"{setting}={chosen[setting]!r}: the servers open the data; leave it out, or give it to them"
            )
    if SERVERS in chosen:
        addresses = _first(_each(addresses), chosen.pop(SERVERS))
    chosen.setdefault("timeout_seconds", _TIMEOUT_SECONDS)
    device = chosen.pop("device", None)
    if device is None:
        return _started_anywhere(headrace.RemoteLoader(addresses, **chosen))
    import headrace.torch

    return _started_anywhere(headrace.torch.RemoteLoader(addresses, device=device, **chosen))


def _started_anywhere(loader: Loader) -> Loader:
    """Let a loader begin with a pass of its own: servers keep batches, and would not have to make again what another
    measurement has asked for."""
    rows = (loader.settings.epochs or 1) * loader.rows_per_epoch
    passes = random.SystemRandom().randint(1, max(1, _FARTHEST_POSITION // rows))
    loader.load_state_dict({**loader.state_dict(), "position": passes * rows, "pass": passes})
    return loader


def _first(addresses: list[str], given: Any) -> list[str]:
    count = whole_number(SERVERS, given, 1)
    if count > len(addresses):
        raise SettingsError(
            f"{SERVERS}={count}: the target has {len(addresses)}; give the addresses of more, separated by commas"
        )
    return addresses[:count]
