"""`headrace build`: raw data -> dataset."""

import dataclasses
import json
import logging
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from headrace.checks import parse_size
from headrace.cli.arguments import refuse_memory
from headrace.cli.option_names import with_option_names
from headrace.cli.progress import amount_of_build, show_progress
from headrace.cli.terminal import SafeFormatter, byte_size, counted, safe_text
from headrace.errors import SettingsError
from headrace.readers.formats import InputFormat

if TYPE_CHECKING:
    from headrace.ingest.report import BuildReport

_ESCAPE = re.compile(r"\\(x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.?)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_COLUMNS_SHOWN = 20
_INPUTS_SHOWN = 5


def _optional_size(text: str | None) -> int | None:
    return None if text is None else parse_size(text)


def parse_separator(text: str) -> str:
    """A backslash and an n, as people type them on a command line, become a newline, and so on."""

    def character(match: re.Match[str]) -> str:
        if match[1] in _ESCAPES:
            return _ESCAPES[match[1]]
        digits = match[2] or match[3] or match[4]
        code = int(digits, 16) if digits else -1
        if not 0 <= code <= sys.maxunicode or 0xD800 <= code < 0xE000:
            raise SettingsError(
                f"separator='{text}': '{match[0]}' stands for no character; write \\n, \\t, \\r, \\\\ (a backslash), "
                "\\xHH, \\uHHHH or \\UHHHHHHHH"
            )
        return chr(code)

    return _ESCAPE.sub(character, text)


def _parse_columns(text: str | None) -> dict[str, str | None] | None:
    """'a,b=float32[3,4],c' -> {'a': None, 'b': 'float32[3,4]', 'c': None}."""
    if text is None:
        return None
    # A comma inside brackets belongs to a shape.
    columns: dict[str, str | None] = {}
    for piece in re.split(r",(?![^\[]*\])", text):
        name, _, notation = piece.partition("=")
        if piece:
            columns[name] = notation or None
    return columns


@click.command(name="build")
@click.argument("inputs", nargs=-1, required=True)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    help="The directory to write the dataset to, or an address like s3://bucket/prefix.",
)
@click.option(
    "--tokenizer",
    metavar="T",
    help="'bytes', the path of a Hugging Face tokenizer.json or of a .tiktoken file, or the name of a tiktoken "
    "encoding on this machine (default for text: bytes). Without a tokenizer, tables become records.",
)
@click.option("--text-field", metavar="F", help="The column or JSON key that holds the text (default: text).")
@click.option(
    "--columns",
    metavar="A,B=float32,...",
    help="For records: the columns to keep, with or without a type (default: all columns, with the file's types).",
)
@click.option(
    "--workers",
    type=int,
    metavar="N",
    help="The number of processes (default: one per core). It never changes the result.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="What runs the build: the processors of this machine (the default), or a Ray cluster, whose machines must all "
    "see the inputs and the output.",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="The Ray cluster to use with --engine ray (default: RAY_ADDRESS, or Ray is started on this machine).",
)
@click.option(
    "--part",
    metavar="I/N",
    help="Build only part I of N, counted from 0, for batch schedulers; 'auto' takes it from a Slurm array, 'auto/N' "
    "from the numbers of a Kubernetes Job or a Slurm array. Complete the dataset with --finish.",
)
@click.option("--finish", is_flag=True, help="Complete the dataset when all parts are built.")
@click.option(
    "--format",
    "input_format",
    type=click.Choice([each.value for each in InputFormat]),
    help="The format of the inputs (default: by the name of each file).",
)
@click.option(
    "--include",
    multiple=True,
    metavar="GLOB",
    help="In directories, and under prefixes of buckets, read only the files that match; those of unknown format are "
    "read as text. May be repeated.",
)
@click.option(
    "--split",
    type=click.Choice(["file", "line", "separator"]),
    default="file",
    help="What makes a document in a text file: the whole file (the default), a line, or the text up to --separator.",
)
@click.option(
    "--separator",
    metavar="TEXT",
    default="",
    help="The text that ends a document in a text file (implies --split separator). \\n stands for a newline, \\t for "
    "a tab, \\uHHHH for any character.",
)
@click.option(
    "--eos",
    metavar="TOKEN",
    help="The token to put at the end of each document (default: the tokenizer's own).",
)
@click.option("--no-eos", is_flag=True, help="Do not put a token at the end of documents.")
@click.option(
    "--bos",
    metavar="TOKEN",
    help="The token to put at the beginning of each document ('auto': the tokenizer's own; default: none).",
)
@click.option(
    "--allow-special",
    is_flag=True,
    help="Encode special tokens that are written out in a text as those tokens.",
)
@click.option("--shuffle", is_flag=True, help="Store the documents in a random order.")
@click.option("--seed", type=int, help="The seed of --shuffle (default: 0).")
@click.option(
    "--shard-size",
    metavar="SIZE",
    help="How much input goes into one shard, such as 64MB (default: by the total size).",
)
@click.option(
    "--max-bad-records",
    type=int,
    default=0,
    metavar="N",
    help="Leave out up to N bad records instead of failing at the first (default: 0).",
)
@click.option(
    "--max-record-bytes",
    default="128MB",
    metavar="SIZE",
    help="Treat a longer record as bad, so that a damaged or hostile file cannot fill the memory (default: 128MB).",
)
@click.option("--rebuild", is_flag=True, help="Build everything anew, for example with another tokenizer.")
@click.option(
    "--drop-previous",
    is_flag=True,
    help="Delete the files of the version before at once, instead of keeping them for its readers until the next build "
    "that changes something.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
def command(inputs: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Turn raw data into a dataset.

    INPUTS are files, globs, directories, or - for standard input; or objects, globs and prefixes in object stores, like
    's3://bucket/texts/*.jsonl'. They may be text, JSON Lines, CSV, Parquet, Arrow or .npy, also compressed as .gz or
    .zst. Run the same command again to continue an interrupted build, or to add new data: only what has changed is
    built.

    \b
    Examples:
      headrace build 'notes/*.txt' --out data
      headrace build web.parquet --out data --tokenizer tokenizer.json --text-field content
      zcat dump.jsonl.gz | headrace build - --format jsonl --tokenizer tokenizer.json --out data
      headrace build sensors.csv --out data
      headrace build 'notes/*.txt' --out s3://bucket/notes
      headrace build s3://bucket/texts --include '*.jsonl' --out data
      headrace build s3://bucket/texts --out s3://bucket/data --engine ray --address auto
      headrace build /shared/texts --out /shared/data --part 3/16
      headrace build /shared/texts --out /shared/data --finish
    """
    _log_to_stderr()
    refuse_memory(options["out"])
    if options["eos"] and options["no_eos"]:
        raise SettingsError("--eos and --no-eos exclude each other; give only one of them")
    if options["seed"] is not None and not options["shuffle"]:
        raise SettingsError(
            f"--seed {options['seed']}: has no effect without --shuffle; add --shuffle, or leave --seed out"
        )
    try:
        report = _build(inputs, as_json, options)
    except KeyboardInterrupt:
        click.echo(
            "headrace: stopped; finished work is kept, and the same command continues the build", err=True
        )
        sys.exit(130)
    if as_json:
        described = {**dataclasses.asdict(report), "path": str(report.path), "tokens": report.tokens}
        click.echo(json.dumps(described))
        return
    for record in report.bad[:20]:
        click.echo(safe_text(f"left out: {with_option_names(str(record), command)}"), err=True)
    if report.bad_count > 20:
        click.echo(f"left out: {report.bad_count - 20} more, listed in the dataset's provenance", err=True)
    click.echo(safe_text(_summary(report)))


class _MessageFormatter(SafeFormatter):
    """For warnings of Python functions, in the words of this command."""

    def format(self, record: logging.LogRecord) -> str:
        return with_option_names(super().format(record), command)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_MessageFormatter("headrace: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _build(inputs: tuple[str, ...], as_json: bool, options: dict[str, Any]) -> "BuildReport":
    from headrace.ingest.build import build

    with show_progress(quiet=as_json and not sys.stderr.isatty()) as show:
        return build(
            list(inputs),
            options["out"],
            tokenizer=options["tokenizer"],
            text_field=options["text_field"],
            columns=_parse_columns(options["columns"]),
            format=options["input_format"],
            include=options["include"],
            split=options["split"],
            separator=parse_separator(options["separator"]),
            eos=False if options["no_eos"] else options["eos"],
            bos=True if options["bos"] == "auto" else options["bos"],
            allow_special=options["allow_special"],
            shuffle=options["shuffle"],
            seed=options["seed"] or 0,
            shard_bytes=_optional_size(options["shard_size"]),
            workers=options["workers"],
            engine=options["engine"],
            address=options["address"],
            part=options["part"],
            finish=options["finish"],
            max_bad_records=options["max_bad_records"],
            max_record_bytes=_optional_size(options["max_record_bytes"]) or 0,
            rebuild=options["rebuild"],
            drop_previous=options["drop_previous"],
            progress=lambda progress: show(amount_of_build(progress)),
        )


def _summary(report: "BuildReport") -> str:
    if report.part is not None:
        return _summary_of_part(report)
    if report.tokens is None:
        amount = counted(report.records, "record")
    else:
        amount = f"{counted(report.records, 'document')}, {counted(report.tokens, 'token')}"
    amount += f" in {counted(report.shards, 'shard')}"
    if not (report.built or report.added or report.changed or report.removed):
        lines = [f"{report.path} is up to date: {amount}"]
        return "\n".join([*lines, *_left_out(report.left_out)])
    lines = [f"{report.path}: {amount}, {byte_size(report.bytes)}"]
    if report.removed:
        lines.append(_removed(report))
    if report.built:
        read = f"read {counted(report.inputs, 'input')}, {byte_size(report.input_bytes)}, in {report.seconds:.1f} s"
        lines.append(read + (f", encoder: {report.encoder}" if report.encoder else ""))
    if report.built and report.reused:
        kept = f"{report.reused} of {report.reused + report.built} tasks were already done"
        lines.append(
            f"{kept}: {counted(report.added, 'input')} added, {report.changed} changed, {report.removed} removed"
        )
    lines += _left_out(report.left_out)
    if report.bad_count:
        lines.append(f"{counted(report.bad_count, 'bad record')} left out")
    if report.previous_bytes:
        kept = f"{byte_size(report.previous_bytes)} of the version before are kept for its readers"
        lines.append(f"{kept}; --drop-previous deletes them")
    lines.append(f"next: headrace inspect {report.path}")
    return "\n".join(lines)


def _summary_of_part(report: "BuildReport") -> str:
    number, _, count = str(report.part).partition("/")
    tasks = report.built + report.reused
    amount = f"{counted(report.records, 'record')} in {counted(report.shards, 'shard')}"
    lines = [
        f"{report.path}: part {number} of {count} is done in {report.seconds:.1f} s: {counted(tasks, 'task')}, {amount}"
    ]
    if report.reused:
        lines.append(f"{report.reused} of them had been built before")
    if report.bad_count:
        lines.append(f"{counted(report.bad_count, 'bad record')} left out")
    lines.append("next: the same command with --finish instead of --part, when all parts are done")
    return "\n".join(lines)


def _removed(report: "BuildReport") -> str:
    """A line about inputs that were there before: they may be missing by mistake, like a folder that is not mounted."""
    records = "records" if report.tokens is None else "documents"
    if report.removed == 1:
        gone = f"1 input of the version before was not found this time, so its {records} are gone"
    else:
        gone = f"{report.removed:,} inputs of the version before were not found this time, so their {records} are gone"
    return f"note: {gone}: {_first_of(report.removed_inputs, _INPUTS_SHOWN)}"


def _left_out(columns: Sequence[str]) -> list[str]:
    """A line about the columns that were left out, if there are any."""
    if not columns:
        return []
    them = "it" if len(columns) == 1 else "them"
    left_out = f"{counted(len(columns), 'column')} left out, as --columns does not name {them}"
    return [f"{left_out}: {_first_of(columns, _COLUMNS_SHOWN)}"]


def _first_of(names: Sequence[str], most: int) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown
