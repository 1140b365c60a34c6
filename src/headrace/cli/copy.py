"""`headrace copy`: a dataset to another place."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import click

from headrace.cli.arguments import json_option, refuse_memory
from headrace.cli.progress import amount_of_copy, show_progress
from headrace.cli.terminal import byte_size, counted, safe_text

if TYPE_CHECKING:
    from headrace.dataset.copy import CopyReport


@click.command()
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("destination", metavar="DST", type=click.Path())
@click.option(
    "--replace",
    is_flag=True,
    help="Replace the dataset at DST, if it is another one. Its files are kept for its readers until the next build or "
    "copy that changes something.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read all files that are at DST already, and copy those again whose checksums are wrong. By default, files of "
    "an object store or of a complete copy only need to have the right size.",
)
@json_option
def command(source: str, destination: str, replace: bool, verify: bool, as_json: bool) -> None:
    """Copy the dataset SRC to DST: to an object store, from one, or between directories.

    The copy is the same dataset, file by file. The checksum of every file is checked on the way. Run the same command
    again to continue a copy that was interrupted; until it is complete, DST is not a dataset.

    \b
    Examples:
      headrace copy data s3://bucket/data
      headrace copy s3://bucket/data /mnt/disk/data
      headrace copy data s3://bucket/data --replace
    """
    refuse_memory(destination)
    from headrace.dataset.copy import copy

    try:
        with show_progress(quiet=as_json and not sys.stderr.isatty()) as show:
            report = copy(
                source,
                destination,
                replace=replace,
                verify=verify,
                progress=lambda progress: show(amount_of_copy(progress)),
            )
    except KeyboardInterrupt:
        click.echo(
            "headrace: stopped; what was copied is kept, and the same command continues the copy", err=True
        )
        sys.exit(130)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
    else:
        click.echo(safe_text("\n".join(describe(report, verify))))


def describe(report: "CopyReport", verify: bool) -> list[str]:
    amount = f"{counted(report.files, 'file')}, {byte_size(report.bytes)}"
    if not report.is_changed:
        checked = "verified" if verify else "sizes compared; --verify reads them"
        return [f"{report.destination} is up to date: {amount} ({checked})"]
    lines = [f"{report.destination}: {counted(report.records, 'record')} in {amount}"]
    if report.copied_files:
        copied = f"{counted(report.copied_files, 'file')}, {byte_size(report.copied_bytes)}"
        speed = report.copied_bytes / max(report.seconds, 1e-9) / 1e6
        lines.append(f"copied and checked {copied}, in {report.seconds:.1f} s, {speed:.1f} MB/s")
    if report.copied_files < report.files:
        lines.append(f"{report.files - report.copied_files:,} of {report.files:,} files were there already")
    if report.previous_bytes:
        lines.append(f"{byte_size(report.previous_bytes)} of the dataset before are kept for its readers")
    lines.append(f"next: headrace inspect {report.destination}")
    return lines
