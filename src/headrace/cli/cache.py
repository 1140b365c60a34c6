"""`headrace cache`: what the disk cache holds, removing it, checking it."""

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments import json_option
from headrace.cli.terminal import byte_size, counted, progress_bar, safe_text
from headrace.errors import SettingsError

if TYPE_CHECKING:
    from headrace.store.cache.directory import CacheDirectory
    from headrace.store.cache.upkeep import CachedDataset, CheckedFile, Cleared, Contents

_OWNERLESS = "(no dataset)"
_COLUMNS = ("dataset", "bytes", "files", "last use", "address")

directory_option = click.option(
    "--cache",
    metavar="DIR",
    help="The directory of the cache (default: HEADRACE_CACHE, or headrace in the user's cache directory).",
)


@click.group(name="cache")
def command() -> None:
    """Look after the cache of data that was fetched from object stores.

    \b
    Examples:
      headrace cache ls
      headrace cache ls --json
      headrace cache clear --yes
      headrace cache verify --cache /mnt/disk/headrace
    """


@command.command()
@directory_option
@json_option
def ls(cache: str | None, as_json: bool) -> None:
    """Show which datasets are in the cache, and how much of it they take."""
    from headrace.store.cache.upkeep import contents

    directory = _find(cache)
    limit = _limit(directory.path)
    held = contents(directory)
    if as_json:
        click.echo(json.dumps(to_json(directory, held, limit)))
        return
    for line in describe(directory, held, limit):
        click.echo(safe_text(line))


def to_json(directory: "CacheDirectory", held: "Contents", limit: int) -> dict[str, Any]:
    datasets = [dataclasses.asdict(each) for each in held.datasets]
    totals = {"bytes": held.bytes, "files": held.files, "limit_bytes": limit}
    return {"cache": str(directory.path), **totals, "datasets": datasets}


def describe(directory: "CacheDirectory", held: "Contents", limit: int) -> list[str]:
    """A table of the datasets, and a line with the totals."""
    if not directory.is_cache():
        return [f"{directory.path}: there is no cache yet; it may take {byte_size(limit)}"]
    rows = [_COLUMNS, *map(_row, held.datasets)] if held.datasets else []
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]).rstrip() for row in rows]
    total = f"{byte_size(held.bytes)} of {byte_size(limit)} in {counted(held.files, 'file')}"
    return [*lines, f"{directory.path}: {total}"]


def _row(dataset: "CachedDataset") -> tuple[str, ...]:
    if dataset.in_use:
        last_use = "in use"
    elif dataset.last_used_unix_seconds is None:
        last_use = "unknown"
    else:
        last_use = time.strftime("%Y-%m-%d %H:%M", time.localtime(dataset.last_used_unix_seconds))
    size = byte_size(dataset.bytes)
    return dataset.dataset_id or _OWNERLESS, size, str(dataset.files), last_use, dataset.address


@command.command()
@click.argument("dataset", metavar="[DATASET]", required=False)
@click.option("--yes", is_flag=True, help="Do not ask first; needed with --json.")
@directory_option
@json_option
@click.pass_context
def clear(ctx: click.Context, dataset: str | None, yes: bool, cache: str | None, as_json: bool) -> None:
    """Remove what no process uses from the cache, or one dataset only.

    DATASET is the first column of `headrace cache ls`, or as much of its beginning as no other one has, or the address
    of a dataset. The data is fetched again when it is needed. The exit code is 1 if DATASET is in use and so was kept.
    """
    from headrace.store.cache.upkeep import contents

    if as_json and not yes:
        raise SettingsError("--json: nothing can be asked then; give --yes too")
    directory = _find(cache)
    held = contents(directory)
    ids = None if dataset is None else ids_of(dataset, held, directory)
    chosen = ", ".join(ids) if ids else f"everything that is not in use ({byte_size(held.bytes)} in all)"
    if not yes:
        click.confirm(safe_text(f"Remove {chosen} from {directory.path}?"), abort=True, err=True)
    cleared = _clear(directory, ids, held)
    if as_json:
        click.echo(json.dumps({"cache": str(directory.path), **dataclasses.asdict(cleared)}))
    else:
        click.echo(safe_text(describe_cleared(directory, cleared)))
    ctx.exit(1 if set(ids or ()).intersection(cleared.kept) else 0)


def ids_of(text: str, held: "Contents", directory: "CacheDirectory") -> list[str]:
    """The datasets that a user means: one, by its id or the beginning of it, or all versions at an address."""
    datasets = [each for each in held.datasets if each.dataset_id]
    at_address = [each.dataset_id for each in datasets if each.address == text.rstrip("/")]
    found = at_address or [each.dataset_id for each in datasets if each.dataset_id.startswith(text)]
    if not found:
        raise SettingsError(f"{text}: is not in the cache {directory.path}; see `headrace cache ls`")
    if len(found) > 1 and not at_address:
        raise SettingsError(f"{text}: is the beginning of {', '.join(found)}; give more of it")
    return found


def _clear(directory: "CacheDirectory", ids: list[str] | None, held: "Contents") -> "Cleared":
    """Remove these datasets, or everything."""
    from headrace.store.cache.upkeep import Cleared, clear

    freed, kept = 0, []
    if directory.is_cache():
        with progress_bar("removing", held.bytes) as advance:
            for dataset_id in [None] if ids is None else ids:
                cleared = clear(directory, dataset_id, advance)
                freed += cleared.freed_bytes
                kept += cleared.kept
    return Cleared(freed, kept)


def describe_cleared(directory: "CacheDirectory", cleared: "Cleared") -> str:
    text = f"{directory.path}: {byte_size(cleared.freed_bytes)} freed"
    if not cleared.kept:
        return text
    kept = f"{counted(len(cleared.kept), 'dataset')} in use: {', '.join(cleared.kept)}"
    return f"{text}; kept {kept}"


@command.command()
@directory_option
@json_option
@click.pass_context
def verify(ctx: click.Context, cache: str | None, as_json: bool) -> None:
    """Read every file of the cache, check its checksum, and remove those that are damaged.

    The exit code is 1 if there were damaged files. They are fetched again when they are needed.
    """
    from headrace.store.cache.upkeep import check, contents

    directory = _find(cache)
    count, size, damaged = 0, 0, []
    with progress_bar("verifying", contents(directory).bytes) as advance:
        for checked in check(directory):
            advance(checked.bytes)
            count, size = count + 1, size + checked.bytes
            if checked.problem:
                damaged.append(checked)
    if as_json:
        click.echo(json.dumps(_verified_json(directory, count, size, damaged)))
    else:
        for line in describe_verified(directory, count, size, damaged):
            click.echo(safe_text(line))
    ctx.exit(1 if damaged else 0)


def _verified_json(
    directory: "CacheDirectory", count: int, size: int, damaged: "list[CheckedFile]"
) -> dict[str, Any]:
    removed = [dataclasses.asdict(each) for each in damaged]
    return {"cache": str(directory.path), "files": count, "bytes": size, "removed": removed}


def describe_verified(
    directory: "CacheDirectory", count: int, size: int, damaged: "list[CheckedFile]"
) -> list[str]:
    lines = [f"damaged, removed  {each.group}/{each.key}: {each.problem}" for each in damaged]
    files = f"{counted(count, 'file')}, {byte_size(size)}"
    if damaged:
        verdict = f"{len(damaged)} of {files} were damaged and are gone. There is nothing to do."
    else:
        verdict = f"intact, {files}. There is nothing to do."
    return [*lines, f"{directory.path}: {verdict}"]


def _find(cache: str | None) -> "CacheDirectory":
    """The cache that is asked for. It is not created if it does not exist."""
    from headrace.store.cache.defaults import DIRECTORY_VARIABLE, find_directory
    from headrace.store.cache.directory import CacheDirectory

    path = find_directory(cache)
    if path is None:
        raise SettingsError(
            f"the cache is off ({DIRECTORY_VARIABLE}); name the one to look at with --cache DIR"
        )
    directory = CacheDirectory(path)
    if directory.path.exists() and not directory.is_cache() and not directory.is_empty():
        raise SettingsError(f"{path}: is not a cache of Headrace; name one with --cache DIR")
    return directory


def _limit(path: Path) -> int:
    from headrace.store.cache.defaults import default_limit, find_limit

    given = find_limit()
    return default_limit(path)[0] if given is None else given
