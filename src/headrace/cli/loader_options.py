"""Options that several commands share: how a Loader makes rows, and in which order."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.pack.packing import Packing

if TYPE_CHECKING:
    from headrace.load.settings import LoaderSettings

Command = TypeVar("Command", bound=Callable[..., Any])

# As text, so that `--help` need not load NumPy.
SHUFFLES = ("global", "block", "units", "none", "auto")
OVERLONG = ("split", "truncate", "drop")
PACK_WITHIN = ("auto", "units", "dataset")

_SIZES = {"block": "block", "window": "block", "lanes": "units"}
"""Options that are parts of one kind of shuffle."""
_NAMES = (
    "seq_len",
    "packing",
    "shuffle",
    "block",
    "window",
    "lanes",
    "seed",
    "overlong",
    "group_shards",
    "pack_within",
    "align_documents",
    "token_field",
)


def loader_options(*, shuffle: str) -> Callable[[Command], Command]:
    """The options that decide the rows of an epoch and their order; `shuffle` is the command's default."""
    options = (
        click.option("--seq-len", metavar="T", type=int, help="Tokens in a row."),
        click.option(
            "--packing",
            type=click.Choice([each.value for each in Packing]),
            default="best-fit",
            show_default=True,
            help="How documents are put into rows.",
        ),
        click.option(
            "--shuffle",
            type=click.Choice(SHUFFLES),
            default=shuffle,
            show_default=True,
            help="The order of an epoch's rows; auto is global for local data and units for remote data.",
        ),
        click.option(
            "--block",
            metavar="ROWS",
            type=int,
            help="For --shuffle block: how many rows are read together (default: 1024).",
        ),
        click.option(
            "--window",
            metavar="BLOCKS",
            type=int,
            help="For --shuffle block: how many blocks are mixed (default: 64).",
        ),
        click.option(
            "--lanes",
            metavar="N",
            type=int,
            help="For --shuffle units: of how many units the rows are mixed (default: 128).",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="The seed of the shuffle."),
        click.option(
            "--overlong",
            type=click.Choice(OVERLONG),
            default="split",
            show_default=True,
            help="What to do with documents that are longer than a row.",
        ),
        click.option("--group-shards", metavar="N", type=int, help="Pack only within groups of N shards."),
        click.option(
            "--pack-within",
            type=click.Choice(PACK_WITHIN),
            default="auto",
            show_default=True,
            help="Whether a row has documents of a single unit, which is fetched at once from a store, or of the whole "
            "dataset; auto is units for remote data and --shuffle units.",
        ),
        click.option(
            "--align-documents",
            is_flag=True,
            help="For --packing windows: begin each window at the beginning of a document.",
        ),
        click.option("--token-field", metavar="F", help="The field that holds the tokens."),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes to `headrace.open`, and what goes to a Loader."""
    opening = {name: value for name, value in options.items() if name not in _NAMES}
    return opening, {name: options[name] for name in _NAMES}


def make_settings(options: Mapping[str, Any], **more: Any) -> "LoaderSettings":
    from headrace.errors import SettingsError
    from headrace.load.settings import parse_settings
    from headrace.order.shuffle import Shuffle, ShuffleKind

    chosen = {name: value for name, value in {**options, **more}.items() if name not in _SIZES}
    sizes = {name: options[name] for name in _SIZES if options.get(name) is not None}
    for name, value in sizes.items():
        if chosen["shuffle"] != _SIZES[name]:
            raise SettingsError(
                f"--{name}={value} only applies to --shuffle {_SIZES[name]}; give that as well"
            )
    if sizes:
        chosen["shuffle"] = Shuffle(kind=ShuffleKind(chosen["shuffle"]), **sizes)
    return parse_settings(chosen)
