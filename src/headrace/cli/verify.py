"""`headrace verify`: checks every checksum of a dataset, and says in one sentence what to do."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import headrace
from headrace.cli.arguments import json_option
from headrace.cli.terminal import byte_size, counted, progress_bar, safe_text
from headrace.errors import FormatError, SettingsError

if TYPE_CHECKING:
    from headrace.format.verify import Verified


@click.command()
@click.argument("path", metavar="DATASET", type=click.Path())
@json_option
@click.pass_context
def command(ctx: click.Context, path: str, as_json: bool) -> None:
    """Read all files of DATASET, a directory or an address, and check every checksum.

    The exit code is 0 if the dataset is intact and 1 if it is damaged.

    \b
    Examples:
      headrace verify data
      headrace verify s3://bucket/data
    """
    results = []
    for result in _checked(path):
        results.append(result)
        if not as_json:
            show(result)
    if as_json:
        click.echo(json.dumps(to_json(path, results)))
    else:
        click.echo(safe_text(verdict(path, results)))
    ctx.exit(1 if damaged_files(results) else 0)


def show(result: "Verified") -> None:
    if result.problem:
        click.echo(safe_text(f"damaged  {result.file}: {result.problem}"))
    elif not (sys.stdout.isatty() and sys.stderr.isatty()):
        # On a terminal the bar shows what goes well, and only problems deserve a line.
        click.echo(safe_text(f"ok       {result.file}"))


def to_json(path: str, results: "list[Verified]") -> dict[str, Any]:
    files = [
        {"file": result.file, "bytes": result.bytes, "problem": result.problem or None} for result in results
    ]
    return {"dataset": path, "whole": not damaged_files(results), "files": files}


def damaged_files(results: "list[Verified]") -> list[str]:
    return sorted({result.file for result in results if result.problem})


def verdict(path: str, results: "list[Verified]") -> str:
    sizes = {result.file: result.bytes for result in results}
    damaged = damaged_files(results)
    files = counted(len(sizes), "file")
    if not damaged:
        return f"{path} is intact: {files}, {byte_size(sum(sizes.values()))}. There is nothing to do."
    return (
        f"{path} is damaged: {len(damaged)} of {files}. Restore {', '.join(damaged)} from a copy, for example with "
        f"`headrace copy GOOD {path} --verify`, or remove the dataset and run `headrace build` again."
    )


def _checked(path: str) -> "Iterator[Verified]":
    """The result for every file, the manifest first; if that is damaged, it is the only one, as nothing can be checked
    without it."""
    from headrace.dataset.open import find_neighbour
    from headrace.format.manifest import MANIFEST_NAME, read_manifest
    from headrace.format.verify import Verified
    from headrace.store.address import open_store

    if find_neighbour(path) is not None:
        raise SettingsError(
            f"{path}: the files have no checksums; only a dataset that Headrace wrote can be verified"
        )
    store = open_store(path)
    try:
        manifest = read_manifest(store)
    except FormatError as error:
        yield Verified(MANIFEST_NAME, store.status(MANIFEST_NAME).bytes, str(error))
        return
    yield Verified(MANIFEST_NAME, store.status(MANIFEST_NAME).bytes)
    sizes = {stored.file: stored.bytes for stored in manifest.files}
    with progress_bar("verifying", sum(sizes.values())) as advance:
        for result in headrace.verify(path):
            advance(result.bytes)
            yield result
