"""`headrace clean`: what crashed builds and copies have left behind."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments import json_option
from headrace.cli.terminal import byte_size, counted, safe_text

if TYPE_CHECKING:
    from headrace.dataset.clean import CleanReport


@click.command()
@click.argument("place", metavar="PLACE", type=click.Path())
@click.option("--yes", is_flag=True, help="Remove what is found. Without it, nothing is changed.")
@json_option
def command(place: str, yes: bool, as_json: bool) -> None:
    """List what belongs to no dataset in PLACE, a directory or an address; with --yes, remove it.

    These are the files of builds, writers and copies that were interrupted, which could be continued until then, and
    uploads to an object store that were never finished. Files that a dataset needs are never touched, nor those that
    its readers may have open, nor files of others. While a writer is at work in PLACE, nothing is done.

    \b
    Examples:
      headrace clean s3://bucket/data
      headrace clean s3://bucket/data --yes
    """
    from headrace.dataset.clean import clean

    report = clean(place, remove=yes)
    if as_json:
        click.echo(json.dumps(to_json(report)))
        return
    for line in describe(report):
        click.echo(safe_text(line))


def to_json(report: "CleanReport") -> dict[str, Any]:
    return {**dataclasses.asdict(report), "files": report.files, "bytes": report.bytes}


def describe(report: "CleanReport") -> list[str]:
    found = "removed" if report.is_removed else "left behind"
    lines = [f"{found}: {each.what}: {_amount(each.files, each.bytes)}" for each in report.leftovers]
    lines += [f"kept: {each.what}: {counted(each.files, 'file')}; {each.why}" for each in report.kept]
    amount = _amount(report.files, report.bytes)
    if not report.leftovers:
        verdict = "there is nothing to remove"
    elif report.is_removed:
        verdict = f"removed {amount}"
    else:
        verdict = f"{amount} can be removed, with --yes"
    return [*lines, f"{report.place}: {verdict}"]


def _amount(files: int, size: int) -> str:
    return f"{counted(files, 'file')}, {byte_size(size)}"
