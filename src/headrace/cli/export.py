"""`headrace export`: a dataset in another system's format."""

import json
from typing import Any

import click

import headrace
from headrace.cli.arguments import dataset_arguments, json_option
from headrace.cli.terminal import byte_size, counted, progress_bar, safe_text


@click.command()
@dataset_arguments
@click.option(
    "--megatron",
    "prefix",
    metavar="PREFIX",
    required=True,
    help="Write the Megatron pair PREFIX.bin and PREFIX.idx.",
)
@click.option("--overwrite", is_flag=True, help="Replace files that already exist.")
@json_option
def command(path: str, prefix: str, overwrite: bool, as_json: bool, **settings: Any) -> None:
    """Write the tokens of DATASET in another system's format.

    Each record becomes one document; fields other than the tokens are left out. Tokens of type uint32 become int32.

    \b
    Example: headrace export data --megatron out/tokens
    """
    from headrace.dataset.export import export_megatron

    dataset = headrace.open(path, **settings)
    with progress_bar("exporting", dataset.num_tokens, "tokens") as advance:
        done = export_megatron(dataset, prefix, overwrite=overwrite, progress=advance)
    if as_json:
        files = {"bin": str(done.bin_path), "idx": str(done.idx_path)}
        counts = {"documents": done.documents, "tokens": done.tokens, "dtype": done.dtype}
        click.echo(json.dumps({**files, **counts, "left_out": list(done.left_out)}))
        return
    size = byte_size(done.bin_path.stat().st_size + done.idx_path.stat().st_size)
    documents, tokens = counted(done.documents, "document"), counted(done.tokens, f"{done.dtype} token")
    amount = f"{documents}, {tokens}, {size}"
    click.echo(safe_text(f"{done.bin_path} and {done.idx_path.name}: {amount}"))
    if done.left_out:
        left_out = safe_text(", ".join(done.left_out))
        click.echo(f"left out, as a Megatron pair holds only tokens: {left_out}")
