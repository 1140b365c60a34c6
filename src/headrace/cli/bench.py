"""`headrace bench`: how fast a loader is, what it costs, and whether the step waits for it."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments import json_option
from headrace.cli.measure_options import (
    check_place,
    interruptible,
    parse_sweeps,
    take_target,
    target_options,
)

if TYPE_CHECKING:
    from headrace.measure.reporting.report import Report


@click.command()
@target_options
@click.option(
    "--sweep",
    "sweeps",
    metavar="NAME=V1,V2,...",
    multiple=True,
    help="Measure with each of these values of a setting; several sweeps are combined. `ranks` is the number of "
    "processes that run at once, `dataset_size` the share of the dataset to use, such as 10%,100%, `servers` how many "
    "of the given servers to use, and `prefetch` how many batches to ask them for ahead.",
)
@click.option(
    "--runs",
    metavar="N",
    type=int,
    default=3,
    show_default=True,
    help="How often to measure each combination of settings.",
)
@click.option(
    "--seconds",
    metavar="S",
    type=float,
    default=3.0,
    show_default=True,
    help="How long to measure in each run, after the warm-up.",
)
@click.option("--batches", metavar="N", type=int, help="Measure this many batches instead.")
@click.option(
    "--warmup",
    metavar="N",
    type=int,
    default=3,
    show_default=True,
    help="The first batches of a run, which do not count. Of remote data, batches count once the units that they are "
    "drawn from have arrived, or after 30 seconds.",
)
@click.option(
    "--pad-id", metavar="ID", type=int, help="The token that is padding, for batches without a mask."
)
@click.option(
    "--files",
    metavar="PATH",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Files that a function's loader reads, to be dropped from the page cache for a cold start. May be repeated.",
)
@click.option(
    "--cold/--no-cold",
    default=True,
    show_default=True,
    help="Also time a first batch with a cold page cache.",
)
@click.option("--live", is_flag=True, help="Show what the loop does while it runs.")
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write a timeline for Perfetto or chrome://tracing.",
)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write a report with charts as a web page.",
)
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Write all figures as JSON.")
@json_option
def command(
    sweeps: tuple[str, ...],
    runs: int,
    seconds: float,
    batches: int | None,
    warmup: int,
    pad_id: int | None,
    files: tuple[Path, ...],
    cold: bool,
    live: bool,
    trace: Path | None,
    page: Path | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how fast a loader is, and whether training waits for it.

    TARGET is the directory or address of a dataset, or MODULE:FUNCTION, a function that returns a loader of any kind,
    or the addresses of servers (headrace serve), separated by commas, which are measured with a headrace.RemoteLoader.
    Each run is a process of its own that makes the loader and then, like a training script, waits for a batch and runs
    the step, over and over. Give --compute-ms or --step to see whether the step would wait for data; without them, the
    loader alone is measured.

    Ctrl-C prints what was measured so far. The exit code is 1 if any run failed, and 130 after Ctrl-C.

    \b
    Examples:
      headrace bench data --seq-len 2048 --batch-size 32 --compute-ms 20
      headrace bench train:make_loader --sweep num_workers=0,1,2,4 --step train:step --html report.html
      headrace bench data --sweep ranks=1,2 --sweep dataset_size=10%,100%
      headrace bench s3://bucket/data --seq-len 2048 --batch-size 32 --cache off
      headrace bench grpc://cpu-1:9000,grpc://cpu-2:9000 --sweep servers=1,2 --sweep prefetch=4,16 --compute-ms 20
    """
    from headrace.cli.measure_view import watching
    from headrace.measure.running.bench import BenchSettings, bench
    from headrace.measure.running.run import Plan

    for path in (page, out, trace):
        check_place(path)
    timeout = options.pop("timeout")
    target, step = take_target(options)
    plan = Plan(seconds=seconds, batches=batches, warmup=warmup, pad_id=pad_id)
    settings = BenchSettings(
        runs=runs,
        sweeps=parse_sweeps(sweeps),
        timeout_seconds=timeout,
        files=listed(files),
        cold=cold,
        trace=None if trace is None else str(trace),
    )
    begun = time.time()
    with watching(settings, live) as tell, interruptible():
        report = bench(target, step, plan, settings, tell)
    show(report, as_json)
    write(report, page, out)
    for path in (page, out, trace):
        # A trace is written by the process that is measured, if it gets that far.
        if path is not None and path.exists() and path.stat().st_mtime >= begun - 1:
            click.echo(f"written: {path}", err=as_json)
    click.get_current_context().exit(exit_code(report))


def exit_code(report: "Report") -> int:
    if any(point.errors for point in report.points):
        return 1
    return 130 if report.interrupted else 0


def write(report: "Report", page: Path | None, out: Path | None) -> None:
    if page is not None:
        from headrace.measure.reporting.html import html

        page.write_text(html(report))
    if out is not None:
        report.write(out)


def show(report: "Report", as_json: bool) -> None:
    from headrace.cli.terminal import safe_text, width
    from headrace.measure.reporting.table import table

    if as_json:
        click.echo(json.dumps(report.to_json()))
        return
    for line in table(report, width()):
        click.echo(safe_text(line))


def listed(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Files, with directories replaced by all the files in them."""
    from headrace.errors import SettingsError

    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise SettingsError(f"--files {path}: no such file or directory")
        inside = [path] if path.is_file() else sorted(path.rglob("*"))
        found += [each for each in inside if each.is_file()]
    return tuple(found)
