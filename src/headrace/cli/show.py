"""`headrace show`: one record or one packed row, as text where it has any."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import headrace
from headrace.cli.arguments import dataset_arguments, json_option
from headrace.cli.loader_options import loader_options, make_settings, split_options
from headrace.cli.terminal import byte_size, counted, safe_text, unicode_works, width
from headrace.errors import FieldError, MissingExtraError, SettingsError

if TYPE_CHECKING:
    from headrace.dataset.dataset import Dataset
    from headrace.rows.row_view import RowStretch, RowView

DEFAULT_LIMIT = 256
_HEX_BYTES = 32
_LEAST_TEXT = 20
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue")

_OF_ROWS = ("epoch", "png")
"""Options of `show` that only rows have, besides those of a Loader."""

Decode = Callable[[Sequence[int]], str]


class AllowsNegativeNumbers(click.Command):
    """Lets `show data -1` mean the last record, although click would look for an option '-1'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Only with a negative number, so that a mistyped option is still reported.
        ctx.ignore_unknown_options = any(re.fullmatch(r"-\d+", word) for word in args)
        return super().parse_args(ctx, args)


@click.command(cls=AllowsNegativeNumbers)
@dataset_arguments
@click.argument("number", metavar="[I]", type=int, required=False)
@click.option("--field", metavar="F", help="Show only this field of the record.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=0),
    help=f"Show the first N elements of each field (default: {DEFAULT_LIMIT}, or all with --json), or the first N "
    "tokens of each document in a row (default: what fits on a line).",
)
@click.option("--row", metavar="K", type=int, help="Show row K of an epoch instead of a record.")
@click.option(
    "--epoch", metavar="E", type=int, default=0, show_default=True, help="The epoch that the row is from."
)
@loader_options(shuffle="none")
@click.option(
    "--png", metavar="FILE", type=click.Path(), help="Draw the row and its attention mask to this file."
)
@json_option
def command(path: str, number: int | None, row: int | None, **options: Any) -> None:
    """Print record number I of DATASET, or with --row the packed row number K; -1 is the last one.

    Tokens are decoded if the tokenizer is known, and bytes are shown as text if they are UTF-8. A row is shown as a
    Loader with the same settings packs it, with one line for each document in it. With the default --shuffle none, K is
    the number of the row in the plan.

    \b
    Examples:
      headrace show data 0
      headrace show s3://bucket/data 0
      headrace show data -1 --field tokens --limit 20
      headrace show data --row 7 --seq-len 2048
      headrace show data --row 0 --seq-len 2048 --shuffle global --epoch 3 --png row.png
    """
    if (number is None) == (row is None):
        raise click.UsageError("Give either the number I of a record, or --row K.")
    if row is None:
        for name in ("seq_len", "png"):
            if options[name] is not None:
                raise click.UsageError(
                    f"--{name.replace('_', '-')} only applies to rows: give --row K instead of I."
                )
        show_record(path, number or 0, **options)
        return
    if options["seq_len"] is None:
        raise click.UsageError("--row needs --seq-len T, the number of tokens in a row.")
    if options.pop("field") is not None:
        raise click.UsageError(
            "--field only applies to records; give --token-field to choose the field that rows are made of."
        )
    show_row(path, row, **options)


def show_record(
    path: str, number: int, *, field: str | None, limit: int | None, as_json: bool, **options: Any
) -> None:
    opening, _ = split_options({name: options[name] for name in options if name not in _OF_ROWS})
    dataset = headrace.open(path, **opening)
    number, record = read_record(dataset, number, field)
    decode, obstacle = find_decoder(dataset, path, record)
    shown = limit if limit is not None else (None if as_json else DEFAULT_LIMIT)
    fields = {name: describe(dataset, name, value, shown, decode) for name, value in record.items()}
    if as_json:
        click.echo(json.dumps({"record": number, "of": len(dataset), "fields": fields}))
        return
    click.echo(click.style(f"record {number:,} of {len(dataset):,}", bold=True))
    for name, described in fields.items():
        for line in field_lines(name, described):
            click.echo(line)
    _tell_obstacle(obstacle)


def show_row(
    path: str,
    row: int,
    *,
    epoch: int,
    limit: int | None,
    png: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    from headrace.rows.row_view import view_row
    from headrace.store.address import local_path

    picture = None if png is None else local_path(png)
    opening, chosen = split_options(options)
    settings = make_settings(chosen, batch_size=1)
    dataset = headrace.open(path, **opening)
    view = view_row(dataset, settings, row, epoch=epoch)
    decode, obstacle = find_decoder(dataset, path, {settings.token_field or dataset.token_field: None})
    if picture is not None:
        from headrace.cli.row_picture import draw_row, save_picture

        save_picture(draw_row(view, _short_name(path)), picture)
    if as_json:
        click.echo(json.dumps(row_json(view, limit, decode, png)))
        return
    for line in row_lines(view, limit, decode, width(), unicode_works()):
        click.echo(line)
    if png is not None:
        click.echo(f"drawn in {png}")
    _tell_obstacle(obstacle)


def _short_name(path: str) -> str:
    from headrace.store.address import is_address

    return path.rstrip("/").rpartition("/")[2] if is_address(path) else Path(path).resolve().name


def _tell_obstacle(obstacle: str) -> None:
    if obstacle:
        click.echo(safe_text(f"headrace: tokens are not decoded: {obstacle}"), err=True)


def read_record(dataset: "Dataset", number: int, field: str | None) -> tuple[int, dict[str, Any]]:
    count = len(dataset)
    if not -count <= number < count:
        if not count:
            raise SettingsError(f"record {number}: the dataset has no records")
        there = "0" if count == 1 else f"0 to {count - 1}"
        raise SettingsError(
            f"record {number}: the dataset has {counted(count, 'record')}; give {there}, or -1 for the last"
        )
    record = dataset[number]
    if field is not None and field not in record:
        raise FieldError(f"no field {field!r}; there are {', '.join(map(repr, record))}")
    return number % count, {field: record[field]} if field is not None else record


def find_decoder(dataset: "Dataset", path: str, record: dict[str, Any]) -> tuple[Decode | None, str]:
    """The function that decodes the tokens, or None and the reason why there is none."""
    tokenizer = dataset.manifest.tokenizer if dataset.manifest else None
    if not tokenizer or dataset.token_field not in record:
        return None, ""
    from headrace.store.address import open_store
    from headrace.tokenizers.decoding import decoder_for

    try:
        decode: Decode = decoder_for(open_store(path), tokenizer)
    except MissingExtraError as error:
        # The numbers are still worth showing.
        return None, str(error)
    return decode, ""


def describe(
    dataset: "Dataset", name: str, value: Any, limit: int | None, decode: Decode | None
) -> dict[str, Any]:
    """The value of one field, in a form that JSON can hold."""
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
    """Turns numbers that JSON cannot hold (nan, infinity, complex) into strings."""
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
        size = f"{notation}, {counted(described['length'], 'element')}"
    else:
        size = notation
    lines = [f"{click.style(safe_text(name), bold=True)} ({size})"]
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
    total = described["length"] if "length" in described else math.prod(described["shape"])
    if not total:
        return "empty"
    more = f" … {total - len(values):,} more" if total > len(values) else ""
    return " ".join(str(value) for value in values) + more


# Rows


def row_json(view: "RowView", limit: int | None, decode: Decode | None, png: str | None) -> dict[str, Any]:
    documents = []
    for stretch in view.stretches:
        shown = stretch.tokens[:limit].tolist()
        document: dict[str, Any] = {"segment": stretch.segment, "place": stretch.place}
        document |= {"record": stretch.record, "record_length": stretch.record_length}
        document |= {"start": stretch.start, "length": stretch.length, "tokens": shown}
        documents.append(document | ({"text": decode(shown)} if decode is not None else {}))
    described: dict[str, Any] = {"row": view.position, "of": view.rows_per_epoch, "epoch": view.epoch}
    described |= {"plan_row": view.row, "seq_len": view.seq_len, "tokens": view.tokens}
    described |= {"padding": view.padding, "documents": documents}
    return described | ({"png": png} if png is not None else {})


def row_lines(
    view: "RowView", limit: int | None, decode: Decode | None, columns: int, fancy: bool
) -> list[str]:
    """A heading for the row, a line for each document, and one for the padding."""
    headings = ("", "place", "record", "tokens", "")
    cells = [_stretch_cells(stretch, fancy) for stretch in view.stretches]
    sizes = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    room = max(_LEAST_TEXT, columns - sum(sizes) - 2 * len(sizes) - 2)
    lines = [*_row_heading(view), f"  {_aligned(headings, sizes)}"]
    for own, stretch in zip(cells, view.stretches, strict=True):
        colour = _COLOURS[(stretch.segment - 1) % len(_COLOURS)]
        mark = click.style("┃" if fancy else "|", fg=colour)
        lines.append(f"{mark} {_aligned(own, sizes)}  {_excerpt(stretch, limit, decode, room)}")
    if view.padding:
        places = _span(view.tokens, view.padding, fancy)
        lines.append(f"{'░' if fancy else '.'} {''.rjust(sizes[0])}  {places.rjust(sizes[1])}  padding")
    return [line.rstrip() for line in lines]


def _row_heading(view: "RowView") -> list[str]:
    title = f"row {view.position:,} of {view.rows_per_epoch:,}"
    if view.epoch or view.row != view.position:
        title += f", epoch {view.epoch:,} (number {view.row:,} in the plan)"
    documents = counted(len(view.stretches), "document")
    used = f"{view.tokens:,} of {view.seq_len:,} tokens used ({view.efficiency:.2%}), {view.padding:,} padded"
    return [click.style(title, bold=True), f"  {used}; {documents}"]


def _aligned(cells: Sequence[str], sizes: Sequence[int]) -> str:
    """Cells in columns: the last to the left, the others to the right."""
    aligned = [cell.rjust(size) for cell, size in zip(cells[:-1], sizes[:-1], strict=True)]
    aligned.append(cells[-1].ljust(sizes[-1]))
    return "  ".join(aligned)


def _stretch_cells(stretch: "RowStretch", fancy: bool) -> tuple[str, str, str, str, str]:
    record = "?" if stretch.record is None else f"{stretch.record:,}"
    of = "" if stretch.record_length is None else f"of {stretch.record_length:,}"
    places = _span(stretch.place, stretch.length, fancy)
    return str(stretch.segment), places, record, _span(stretch.start, stretch.length, fancy), of


def _span(start: int, length: int, fancy: bool) -> str:
    """The first and the last place, counted from 0."""
    return f"{start:,}{'–' if fancy else '-'}{start + length - 1:,}"


def _excerpt(stretch: "RowStretch", limit: int | None, decode: Decode | None, room: int) -> str:
    """The first tokens of a document in this row, on one line, however many lines the text has."""
    # A character takes at most four tokens, so these fill the line.
    shown = stretch.tokens[: 4 * room if limit is None else limit].tolist()
    if decode is None:
        text = " ".join(map(str, shown))
    else:
        text = safe_text(decode(shown).replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t"))
    before = "… " if stretch.start else ""
    goes_on = len(shown) < stretch.length or stretch.start + stretch.length < (stretch.record_length or 0)
    text = before + text
    if limit is None and len(text) + 2 * goes_on > room:
        return text[: room - 2] + " …"
    return text + " …" * goes_on
