"""Arguments that several commands share: which dataset, how to read a file of raw tokens, and which cache to use."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def parse_bytes(_: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """A number of bytes, also with a unit: 200GB."""
    from headrace.checks import parse_size
    from headrace.errors import SettingsError

    try:
        return None if text is None else parse_size(text)
    except SettingsError as error:
        raise SettingsError(f"{param.opts[0]}: {error}") from None


cache_option = click.option(
    "--cache",
    metavar="DIR",
    help="For remote data: the directory that keeps what was fetched, or 'off' (default: HEADRACE_CACHE, or headrace "
    "in the user's cache directory).",
)
cache_bytes_option = click.option(
    "--cache-bytes",
    metavar="SIZE",
    callback=parse_bytes,
    help="How large the cache may become, such as 200GB (default: HEADRACE_CACHE_BYTES, or a share of the disk).",
)


def dataset_arguments(command: Command) -> Command:
    """`DATASET`, and options that go to `headrace.open` under their own names; the dataset goes there as `path`."""
    for decorate in (
        cache_bytes_option,
        cache_option,
        click.option(
            "--eos-id", type=int, help="For a .bin file of raw tokens: the token that ends each document."
        ),
        click.option("--dtype", help="For a .bin file of raw tokens: their data type (default: uint16)."),
        click.argument("path", metavar="DATASET", type=click.Path()),
    ):
        command = decorate(command)
    return command


def refuse_memory(place: str) -> None:
    """Raise an error for an output in the memory of this process."""
    from headrace.errors import SettingsError

    if place.lower().startswith("memory://"):
        raise SettingsError(
            f"{place}: such a dataset would be gone when this command ends; give a directory or an address"
        )


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
