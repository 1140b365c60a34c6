"""The `headrace` command. Each command's module is imported only when it is asked for."""

import importlib
import sys
from typing import Any

import click

import headrace
from headrace.cli.option_names import with_option_names
from headrace.cli.terminal import safe_text
from headrace.errors import HeadraceError

COMMANDS = {
    "bench": "Measure how fast a loader is, and whether training waits for it.",
    "build": "Turn raw data into a dataset.",
    "cache": "Show, check or clear the disk cache of remote data.",
    "clean": "List or remove what crashed builds and copies have left behind.",
    "copy": "Copy a dataset to or from an object store, and check every file on the way.",
    "doctor": "Find out what slows a loader down, and what to do about it.",
    "export": "Write a dataset in another system's format.",
    "inspect": "Show the counts, sizes and lengths of a dataset.",
    "serve": "Make batches for training jobs on other machines.",
    "show": "Print one record or one packed row, decoded if the tokenizer is known.",
    "tune": "Find the best number of workers, prefetch depth and batch size for this machine.",
    "verify": "Check every checksum of a dataset.",
    "verify-resume": "Prove that a stopped and resumed job gets every row exactly once.",
}


class LazyGroup(click.Group):
    """Lists commands from the table above, so that `--help` need not import them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"headrace.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            import difflib  # only now: nobody should wait for it who makes no mistake

            if near := difflib.get_close_matches(args[0], COMMANDS, 1):
                ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            click.echo(safe_text(f"headrace: {with_option_names(str(error), command)}"), err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("headrace: interrupted", err=True)
            ctx.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headrace.__version__, prog_name="headrace")
def cli() -> None:
    """Headrace turns raw data into memory-mapped datasets and loads them for training.

    Start with: headrace build notes/*.txt --out data

    Run `headrace COMMAND --help` for the options and examples of a command.
    """


def main(arguments: list[str] | None = None) -> Any:
    try:
        return cli.main(args=arguments, prog_name="headrace")
    except (HeadraceError, OSError) as error:
        click.echo(safe_text(f"headrace: {error}"), err=True)
        sys.exit(1)
