"""`headrace serve`: a server that makes batches for training jobs on other machines."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from headrace.cli.arguments import cache_bytes_option, cache_option, json_option, parse_bytes
from headrace.cli.measure_options import parse_settings
from headrace.cli.serve_ray import ray_options, take_ray_settings

_LOADER_OPTIONS = ("batch_size", "seq_len", "seed", "epochs", "cache", "cache_bytes")


@click.command()
@click.argument("target", metavar="TARGET")
@click.option(
    "--port", metavar="P", type=click.IntRange(0, 65535), help="Listen on this port; 0 takes a free one."
)
@click.option(
    "--host",
    metavar="H",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on (with --engine ray: that of each node). Beyond this machine it needs --tls-cert, "
    "--tls-key and a token, or --insecure.",
)
@click.option(
    "--socket",
    "socket_path",
    metavar="PATH",
    help="Listen on a Unix socket too: batches for jobs on this machine go through shared memory.",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1),
    help="Worker processes (default: one for each core; with --engine ray: 1 in each server). Each uses one core.",
)
@click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Threads in each worker process, for functions that wait more than they compute.",
)
@click.option(
    "--memory",
    "memory_bytes",
    metavar="SIZE",
    default="1GB",
    show_default=True,
    callback=parse_bytes,
    help="How much memory to use for finished batches, which are kept for other jobs that ask for them.",
)
@click.option(
    "--tls-cert",
    "certificate",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Certificate, in PEM form.",
)
@click.option(
    "--tls-key", "key", metavar="FILE", type=click.Path(path_type=Path), help="The key of the certificate."
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file with the token that clients must give (default: the environment variable HEADRACE_TOKEN).",
)
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS or without a token.")
@click.option(
    "--metrics-port",
    metavar="P",
    type=click.IntRange(0, 65535),
    help="Serve /healthz, /readyz and /metrics here.",
)
@click.option(
    "--metrics-host", metavar="H", default="127.0.0.1", show_default=True, help="The address for these."
)
@click.option(
    "--drain-seconds",
    metavar="S",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="How long to go on answering after SIGTERM.",
)
@click.option(
    "--max-clients",
    metavar="N",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Connections at once.",
)
@click.option(
    "--max-requests",
    metavar="N",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Unanswered requests of one connection.",
)
@click.option("--batch-size", metavar="B", type=int, help="For a dataset: rows in a batch (default: 32).")
@click.option(
    "--seq-len", metavar="T", type=int, help="For a dataset of tokens: tokens in a row (default: 2048)."
)
@click.option("--seed", metavar="N", type=int, help="The seed of the shuffle.")
@click.option("--epochs", metavar="N", type=int, help="Epochs of one iteration (default: 1).")
@cache_option
@cache_bytes_option
@ray_options
@click.option(
    "--set",
    "assignments",
    metavar="NAME=VALUE",
    multiple=True,
    help="Any other setting of the Loader or parameter of the function. May be repeated.",
)
@json_option
@click.option("--live/--no-live", default=None, help="Show what the server does (default: in a terminal).")
def command(target: str, **options: Any) -> None:
    """Make batches for training jobs on other machines.

    TARGET is the directory or address of a dataset, or MODULE:FUNCTION, a function that returns a headrace.Loader, with
    the functions that were given to its `map`. Training jobs get its batches with headrace.RemoteLoader, the same ones
    as with the Loader itself; any number of servers may make them, and may come and go.

    SIGTERM or Ctrl-C ends the server after it has answered what it was asked; a second one ends it at once.

    \b
    Examples:
      headrace serve train:make_loader --port 9000
      headrace serve train:make_loader --socket /tmp/headrace.sock --workers 8
      headrace serve s3://bucket/data --seq-len 2048 --batch-size 32 --port 9000 --host 0.0.0.0 \\
          --tls-cert server.pem --tls-key server.key --token-file token
      headrace serve train:make_loader --engine ray --address auto --autoscale 1:8 --workers 4 --insecure
    """
    from headrace.cli.serve_view import ServeView
    from headrace.observe.host import useful_cores
    from headrace.serve.server import Listening, run_server
    from headrace.serve.service import ServiceSettings
    from headrace.serve.worker import Served

    on_ray = take_ray_settings(options)
    cores = max(1, int(useful_cores())) if on_ray is None else 1
    settings = {name: value for name in _LOADER_OPTIONS if (value := options.pop(name)) is not None}
    settings |= parse_settings(options.pop("assignments"))
    service = ServiceSettings(
        workers=options.pop("workers") or cores,
        threads=options.pop("threads"),
        memory_bytes=options.pop("memory_bytes"),
        token=_token(options.pop("token_file")),
        most_clients=options.pop("max_clients"),
        most_requests=options.pop("max_requests"),
    )
    live, as_json = options.pop("live"), options.pop("as_json")
    listening = Listening(**options)
    if on_ray is not None:
        from headrace.serve.ray.run import run_on_ray

        run_on_ray(Served(target, settings), service, listening, on_ray, click.echo)
        return
    with ServeView(target, live, as_json) as view:
        run_server(Served(target, settings), service, listening, view.started, view.leaving)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Arrow Flight would wait for clients that are still connected.
    os._exit(0)


def _token(path: Path | None) -> str | None:
    from headrace.errors import SettingsError
    from headrace.serve.remote_loader import TOKEN_VARIABLE

    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"--token-file {path}: cannot be read: {error.strerror}") from None
    if not token:
        raise SettingsError(f"--token-file {path}: is empty")
    return token
