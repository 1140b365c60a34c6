"""`headrace doctor`: what slows a loader down, and what to do about it."""

import json
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments import json_option
from headrace.cli.measure_options import take_target, target_options
from headrace.cli.remote_view import cost_lines
from headrace.cli.terminal import counted, safe_text, width

if TYPE_CHECKING:
    from headrace.measure.doctor.doctor import Examination
    from headrace.measure.running.run import Run
    from headrace.observe.findings import Finding

_COLOURS = {"alarm": "red", "warning": "yellow", "note": "cyan"}
_LABEL = 9


@click.command()
@target_options
@click.option(
    "--seconds", metavar="S", type=float, default=3.0, show_default=True, help="How long to run the loop."
)
@click.option(
    "--no-run",
    is_flag=True,
    help="Only examine the loader, without running the loop or measuring the storage.",
)
@json_option
def command(seconds: float, no_run: bool, as_json: bool, **options: Any) -> None:
    """Find out what slows a loader down, and what to do about it.

    TARGET is the directory or address of a dataset, or MODULE:FUNCTION, a function that returns a loader: a
    headrace.Loader, a PyTorch DataLoader, or anything that can be iterated over; or the addresses of servers (headrace
    serve), separated by commas. A process of its own makes the loader,
    examines it, and runs it for a few seconds; then random reads of its files are timed. For a Loader on remote data,
    it also says how well batches are mixed, and what an epoch costs. Every finding comes with a remedy; docs/doctor.md
    explains each of them.

    If the loop fails, hangs or gives no batch, what is known without a run is shown all the same. The exit code is then
    1, as it is if there is an alarm or if no loader can be made, 130 after Ctrl-C, and otherwise 0. Findings named in
    the environment variable HEADRACE_SILENCE are left out.

    \b
    Examples:
      headrace doctor data --batch-size 32 --compute-ms 80
      headrace doctor s3://bucket/data --batch-size 32 --compute-ms 80
      headrace doctor train:make_loader --step train:step
      headrace doctor grpc://cpu-1:9000,grpc://cpu-2:9000 --compute-ms 80
      LOCAL_WORLD_SIZE=8 headrace doctor train:make_loader --set num_workers=16 --no-run
    """
    from headrace.measure.doctor.doctor import examine_target

    timeout = options.pop("timeout")
    target, step = take_target(options)
    found = examine_target(target, step, seconds=seconds, timeout_seconds=timeout, run=not no_run)
    if as_json:
        click.echo(json.dumps({"target": target.name, **found.to_json()}))
    else:
        for line in describe(found):
            click.echo(line)
    code = 1 if found.alarms or found.error else 0
    click.get_current_context().exit(130 if found.interrupted else code)


def describe(found: "Examination") -> list[str]:
    """The findings, the worst first; then a line each for the run, what was fine, and what was not checked."""
    lines = [line for finding in found.findings for line in _finding_lines(finding)]
    if not lines and found.error is None and not found.interrupted:
        lines = [click.style("Nothing found.", fg="green")]
    lines += [_labelled(label, text, bold=True) for label, text in cost_lines(found.costs)]
    if found.run is not None and found.run.batches:
        lines.append(_labelled("run", _run_text(found.run), bold=True))
    if found.fine:
        lines.append(_labelled("fine", ", ".join(found.fine), fg="green"))
    for reason, names in _names_by_reason(found.not_looked).items():
        lines.append(_labelled("unchecked", f"{', '.join(names)}: {safe_text(reason)}", dim=True))
    if found.silenced:
        lines.append(_labelled("silenced", ", ".join(found.silenced), dim=True))
    if found.interrupted:
        lines.append(_labelled("stopped", "the run was interrupted", fg="red"))
    elif found.error is not None:
        lines += _error_lines(found.error)
    return lines


def _error_lines(error: str) -> list[str]:
    """Why the run failed. What follows the first line, such as where the process was, keeps its lines."""
    first, *rest = error.splitlines()
    indent = " " * (_LABEL + 1)
    return [
        _labelled("failed", f"the run: {first}", fg="red"),
        *((indent + safe_text(line)).rstrip() for line in rest),
    ]


def _run_text(run: "Run") -> str:
    text = f"{counted(run.batches, 'batch', 'batches')} in {run.seconds:.1f} s"
    if run.wait_share is not None:
        text += f"; the loop waited {run.wait_share:.0%} of its time"
    return text


def _names_by_reason(not_looked: dict[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in not_looked.items():
        names.setdefault(reason, []).append(name)
    return names


def _finding_lines(finding: "Finding") -> list[str]:
    colour = _COLOURS[finding.level]
    return [
        f"{_label(finding.level, fg=colour)} {click.style(finding.name, bold=True)}",
        _wrapped(finding.found + "."),
        _wrapped("→ " + finding.remedy + "."),
    ]


def _labelled(label: str, text: str, **style: Any) -> str:
    return f"{_label(label, **style)} {_wrapped(text).lstrip()}"


def _label(label: str, **style: Any) -> str:
    return click.style(label.ljust(_LABEL), **{"bold": True, **style})


def _wrapped(text: str) -> str:
    indent = " " * (_LABEL + 1)
    return click.wrap_text(safe_text(text), width(), indent, indent)
