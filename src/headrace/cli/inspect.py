"""`headrace inspect`: what a dataset holds, and how long its records are."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

import headrace
from headrace.cli.arguments import dataset_arguments, json_option
from headrace.cli.terminal import bar, byte_size, counted, safe_text, unicode_works, width
from headrace.store.address import is_address

if TYPE_CHECKING:
    from headrace.dataset.summary import LengthSummary, PackingSummary, Summary

_TOKENIZER_KEYS = ("kind", "name", "vocab_size", "eos_id", "fingerprint")


@click.command()
@dataset_arguments
@json_option
def command(path: str, as_json: bool, **settings: Any) -> None:
    """Show the counts, sizes and settings of DATASET, and the lengths of its records.

    DATASET is the directory or address of a dataset, a Megatron pair (its prefix, .bin or .idx), or a .bin file of raw
    tokens. No record is read, so this is quick at any size. Of remote data it also says how well a Loader mixes it by
    default, and what an epoch costs.

    \b
    Examples:
      headrace inspect data
      headrace inspect s3://bucket/data
      headrace inspect train.bin --eos-id 50256
    """
    from headrace.cli.remote_view import cost_lines
    from headrace.dataset.summary import summarize
    from headrace.measure.doctor.remote_cost import costs_by_default, packing_by_default

    dataset = headrace.open(path, **settings)
    summary, costs = summarize(dataset), costs_by_default(dataset)
    within, packings = packing_by_default(dataset, summary.packing)
    if as_json:
        described = to_json(summary)
        described["packing"] = [dataclasses.asdict(packing) for packing in packings]
        described["pack_within"] = within if packings else None
        described["costs"] = [cost.to_json() for cost in costs.values()]
        click.echo(json.dumps(described))
        return
    for line in describe(summary):
        click.echo(line)
    if costs:
        click.echo()
        click.echo(click.style("what a Loader does with it by default", bold=True))
    for label, text in cost_lines(costs):
        click.echo(click.wrap_text(f"{label:<8} {text}", width(), "  ", " " * 11))
    for name, lengths in summary.lengths.items():
        click.echo()
        for line in draw_lengths(name, lengths, width(), unicode_works()):
            click.echo(line)
    if packings:
        click.echo()
        for line in describe_packing(packings, within):
            click.echo(line)


def to_json(summary: "Summary") -> dict[str, Any]:
    return {
        "dataset": summary.name,
        "records": summary.records,
        "tokens": summary.tokens,
        "fields": dict(summary.fields),
        "elements": dict(summary.elements),
        "shards": summary.parts,
        "bytes": summary.bytes,
        "files": [{"file": file.file, "bytes": file.bytes} for file in summary.files],
        "tokenizer": summary.tokenizer,
        "settings": summary.settings,
        "written_by": summary.written_by or None,
        "fingerprint": summary.fingerprint,
        "lengths": {name: _lengths_json(lengths) for name, lengths in summary.lengths.items()},
    }


def _lengths_json(lengths: "LengthSummary | None") -> dict[str, Any] | None:
    if lengths is None:
        return None
    percentiles = {f"p{percent}": length for percent, length in lengths.percentiles.items()}
    buckets = [
        {"low": bucket.low, "high": bucket.high, "records": bucket.records} for bucket in lengths.buckets
    ]
    return {"min": lengths.min, "mean": lengths.mean, **percentiles, "max": lengths.max, "histogram": buckets}


def describe(summary: "Summary") -> list[str]:
    """The facts in two columns, one on each line; those that are empty are left out."""
    fields = ", ".join(f"{name}: {notation}" for name, notation in summary.fields.items())
    files = counted(len(summary.files), "file")
    rows = {
        "dataset": summary.name,
        "records": f"{summary.records:,}",
        "tokens": "" if summary.tokens is None else f"{summary.tokens:,}",
        "fields": fields,
        "stored" if is_address(summary.name) else "on disk": f"{byte_size(summary.bytes)} in {files}",
        "shards": f"{summary.parts:,}",
        "tokenizer": _tokenizer_text(summary.tokenizer or {}),
        "settings": _settings_text(summary.settings or {}),
        "written by": summary.written_by,
        "fingerprint": summary.fingerprint,
    }
    return [
        f"{click.style(label.ljust(12), bold=True)} {safe_text(value)}"
        for label, value in rows.items()
        if value
    ]


def _tokenizer_text(tokenizer: Mapping[str, Any]) -> str:
    known = {key: tokenizer[key] for key in _TOKENIZER_KEYS if tokenizer.get(key) is not None}
    return _pairs(known)


def _settings_text(settings: Mapping[str, Any]) -> str:
    shown_elsewhere = ("fields", "tokenizer")
    unset = (None, "")
    chosen = {
        name: value for name, value in settings.items() if name not in shown_elsewhere and value not in unset
    }
    return _pairs(chosen)


def describe_packing(packings: "Sequence[PackingSummary]", within: str) -> list[str]:
    """How full the rows of an epoch would be, for some lengths of a row."""
    how = "within units, as a Loader packs remote data" if within == "units" else "over the whole dataset"
    lines = [click.style(f"how full rows of tokens are, packed {how}", bold=True)]
    for packing in packings:
        full = (
            f"{packing.best_fit:7.2%} packed by best fit, {packing.padded:7.2%} with one document in each row"
        )
        lines.append(f"  {packing.seq_len:>6,}  {full}  ({counted(packing.rows, 'row')})")
    return lines


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def draw_lengths(name: str, lengths: "LengthSummary | None", columns: int, fancy: bool) -> list[str]:
    """The statistics of one field, and a bar for each range of lengths."""
    title = click.style(f"length of {name!r}", bold=True)
    if lengths is None:
        return [f"{title}: no records"]
    percentiles = "  ".join(f"p{percent} {length:,}" for percent, length in lengths.percentiles.items())
    lines = [title, f"  min {lengths.min:,}  mean {lengths.mean:,.1f}  {percentiles}  max {lengths.max:,}"]
    labels = [_range(bucket.low, bucket.high, fancy) for bucket in lengths.buckets]
    counts = [f"{bucket.records:,}" for bucket in lengths.buckets]
    most = max(bucket.records for bucket in lengths.buckets)
    left, right = max(map(len, labels)), max(map(len, counts))
    room = max(4, columns - left - right - 5)
    for label, count, bucket in zip(labels, counts, lengths.buckets, strict=True):
        drawn = click.style(bar(bucket.records / most, room, fancy), fg="cyan")
        lines.append(f"  {label.rjust(left)}  {count.rjust(right)} {drawn}".rstrip())
    return lines


def _range(low: int, high: int, fancy: bool) -> str:
    if low == high:
        return f"{low:,}"
    return f"{low:,}{'–' if fancy else '-'}{high:,}"
