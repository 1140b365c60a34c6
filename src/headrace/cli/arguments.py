"""Arguments that several commands share: which dataset, and how to read a file of raw tokens."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def dataset_arguments(command: Command) -> Command:
    """`DATASET`, `--dtype` and `--eos-id`, which go to `headrace.open` as `path`, `dtype` and `eos_id`."""
    for decorate in (
        click.option(
            "--eos-id", type=int, help="For a .bin file of raw tokens: the token that ends each document."
        ),
        click.option("--dtype", help="For a .bin file of raw tokens: their data type (default: uint16)."),
        click.argument("path", metavar="DATASET", type=click.Path()),
    ):
        command = decorate(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
