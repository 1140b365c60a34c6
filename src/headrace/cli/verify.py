"""`headrace verify`: every checksum of a dataset, and one sentence on what to do."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

import headrace
from headrace.cli.arguments import json_option
from headrace.cli.terminal import byte_size, progress_bar
from headrace.errors import FormatError, SettingsError

if TYPE_CHECKING:
    from headrace.format.verify import Verified


@click.command()
@click.argument("path", metavar="DIR", type=click.Path())
@json_option
@click.pass_context
def command(ctx: click.Context, path: str, as_json: bool) -> None:
    """Read all files of the dataset in DIR and check every checksum.

    The exit code is 0 if the dataset is whole and 1 if it is damaged.

    \b
    Example: headrace verify data
    """
    results = []
    for result in _checked(path):
        results.append(result)
        # On a terminal the bar shows what goes well, and only problems deserve a line.
        if not as_json and (result.problem or not (sys.stdout.isatty() and sys.stderr.isatty())):
            click.echo(
                f"damaged  {result.file}: {result.problem}" if result.problem else f"ok       {result.file}"
            )
    damaged = {result.file for result in results if result.problem}
    if as_json:
        files = [{"file": r.file, "bytes": r.bytes, "problem": r.problem or None} for r in results]
        click.echo(json.dumps({"dataset": path, "whole": not damaged, "files": files}))
    else:
        click.echo(verdict(path, results))
    ctx.exit(1 if damaged else 0)


def verdict(path: str, results: "list[Verified]") -> str:
    sizes = {result.file: result.bytes for result in results}
    damaged = sorted({result.file for result in results if result.problem})
    if not damaged:
        return f"{path} is whole: {len(sizes):,} files, {byte_size(sum(sizes.values()))}; nothing to do."
    return (
        f"{path} is damaged: {len(damaged)} of {len(sizes)} files. Restore {', '.join(damaged)} from a copy, "
        "or remove the directory and run `headrace build` again."
    )


def _checked(path: str) -> "Iterator[Verified]":
    """All verdicts; a damaged manifest is one of them, since without it nothing else can be checked."""
    from headrace.dataset.open import find_neighbour
    from headrace.format.manifest import MANIFEST_NAME, read_manifest
    from headrace.format.verify import Verified
    from headrace.store.address import open_store

    if find_neighbour(path) is not None:
        raise SettingsError(f"{path}: holds no checksums; only a dataset that Headrace wrote can be verified")
    store = open_store(path)
    try:
        manifest = read_manifest(store)
    except FormatError as error:
        yield Verified(MANIFEST_NAME, store.status(MANIFEST_NAME).bytes, str(error))
        return
    total = sum({stored.file: stored.bytes for stored in manifest.files}.values())
    with progress_bar("verifying", total) as advance:
        for result in headrace.verify(path):
            advance(result.bytes)
            yield result
