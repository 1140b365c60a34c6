"""`penstock show`: one record, in words where it has any."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock.cli.arguments import dataset_arguments, json_option
from penstock.cli.terminal import byte_size, safe_text
from penstock.errors import FieldError, MissingExtraError, SettingsError

if TYPE_CHECKING:
    from penstock.dataset.dataset import Dataset

DEFAULT_LIMIT = 256
_HEX_BYTES = 32

Decode = Callable[[Sequence[int]], str]


class AllowsNegativeNumbers(click.Command):
    """Lets `show data -1` mean the last record, where click would look for an option '-1'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Only then, so that a mistyped option is still called one.
        ctx.ignore_unknown_options = any(re.fullmatch(r"-\d+", word) for word in args)
        return super().parse_args(ctx, args)


@click.command(cls=AllowsNegativeNumbers)
@dataset_arguments
@click.argument("number", metavar="I", type=int)
@click.option("--field", metavar="F", help="Show this field alone.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=0),
    help=f"Show the first N elements of each field ({DEFAULT_LIMIT} if not given; all with --json).",
)
@json_option
def command(
    path: str, number: int, field: str | None, limit: int | None, as_json: bool, **settings: Any
) -> None:
    """Print record I of DATASET; -1 is the last.

    Tokens are decoded where the tokenizer is known, and bytes are shown as text where they are UTF-8.

    \b
    Examples:
      penstock show data 0
      penstock show data -1 --field tokens --limit 20
    """
    dataset = penstock.open(path, **settings)
    number, record = read_record(dataset, number, field)
    decode, obstacle = find_decoder(dataset, Path(path), record)
    shown = limit if limit is not None else (None if as_json else DEFAULT_LIMIT)
    fields = {name: describe(dataset, name, value, shown, decode) for name, value in record.items()}
    if as_json:
        click.echo(json.dumps({"record": number, "of": len(dataset), "fields": fields}))
        return
    click.echo(click.style(f"record {number:,} of {len(dataset):,}", bold=True))
    for name, described in fields.items():
        for line in field_lines(name, described):
            click.echo(line)
    if obstacle:
        click.echo(f"penstock: tokens are not decoded: {obstacle}", err=True)


def read_record(dataset: "Dataset", number: int, field: str | None) -> tuple[int, dict[str, Any]]:
    count = len(dataset)
    if not -count <= number < count:
        there = f"0 to {count - 1}, or -1 for the last" if count else "none"
        raise SettingsError(f"record {number}: the dataset has {count:,} records; give {there}")
    record = dataset[number]
    if field is not None and field not in record:
        raise FieldError(f"no field {field!r}; there are {', '.join(map(repr, record))}")
    return number % count, {field: record[field]} if field is not None else record


def find_decoder(dataset: "Dataset", directory: Path, record: dict[str, Any]) -> tuple[Decode | None, str]:
    """How to decode the tokens, or why that cannot be done."""
    tokenizer = dataset.manifest.tokenizer if dataset.manifest else None
    if not tokenizer or dataset.token_field not in record:
        return None, ""
    from penstock.ingest.tokenizers.decoding import decoder_for

    try:
        decode: Decode = decoder_for(directory, tokenizer)
    except MissingExtraError as error:
        # The numbers are still worth showing.
        return None, str(error)
    return decode, ""


def describe(
    dataset: "Dataset", name: str, value: Any, limit: int | None, decode: Decode | None
) -> dict[str, Any]:
    """One field's value as JSON can hold it."""
    field = dataset.fields[name]
    described: dict[str, Any] = {"field": field.notation}
    if isinstance(value, bytes):
        return described | {"bytes": len(value)} | _bytes_content(value, limit)
    if field.variable:
        described["length"] = len(value)
        head = value if limit is None else value[:limit]
    else:
        described["shape"] = list(field.shape)
        head = value.reshape(-1) if limit is None else value.reshape(-1)[:limit]
    numbers = _plain(head.tolist())
    if decode is not None and name == dataset.token_field:
        described["text"] = decode(head.tolist())
    return described | {"values": numbers if field.variable or field.shape else numbers[0]}


def _bytes_content(value: bytes, limit: int | None) -> dict[str, Any]:
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        return {"hex": value[:_HEX_BYTES].hex()}
    return {"text": text if limit is None else text[:limit]}


def _plain(value: Any) -> Any:
    """Numbers that JSON has no way to write (nan, infinity, complex) as strings."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, complex) or (isinstance(value, float) and value - value != 0):
        return str(value)
    return value


def field_lines(name: str, described: dict[str, Any]) -> list[str]:
    notation = described["field"]
    if "bytes" in described:
        size = f"{notation}, {byte_size(described['bytes'])}"
    elif "length" in described:
        size = f"{notation}, {described['length']:,} elements"
    else:
        size = notation
    lines = [f"{click.style(name, bold=True)} ({size})"]
    if "values" in described:
        lines.append(f"  {_numbers(described)}")
    if "hex" in described:
        pairs = re.sub("(..)", r"\1 ", described["hex"]).strip()
        lines.append(f"  {pairs}{' …' if described['bytes'] > _HEX_BYTES else ''}")
    if "text" in described:
        lines += [f"  {line}" for line in safe_text(described["text"]).split("\n")]
    return lines


def _numbers(described: dict[str, Any]) -> str:
    values = described["values"]
    if not isinstance(values, list):
        return str(values)
    total = described.get("length")
    if total is None:
        total = 1
        for size in described["shape"]:
            total *= size
    more = f" … {total - len(values):,} more" if total > len(values) else ""
    return " ".join(str(value) for value in values) + more if values or more else "empty"
