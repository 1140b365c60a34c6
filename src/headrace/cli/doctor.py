"""`headrace doctor`: what is known to slow a loader down, and what to do about it."""

import json
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments import json_option
from headrace.cli.measure_options import take_target, target_options
from headrace.cli.terminal import safe_text, width

if TYPE_CHECKING:
    from headrace.measure.doctor.doctor import Examination
    from headrace.observe.findings import Finding

_COLOURS = {"alarm": "red", "warning": "yellow", "note": "cyan"}
_LABEL = 9


@click.command()
@target_options
@click.option(
    "--seconds", metavar="S", type=float, default=3.0, show_default=True, help="How long the loop is run."
)
@click.option("--no-run", is_flag=True, help="Look at the loader only: no loop, and no storage is measured.")
@json_option
def command(seconds: float, no_run: bool, as_json: bool, **options: Any) -> None:
    """Look for what is known to slow training down, in the loader that TARGET makes.

    TARGET is a dataset's directory, or module:function that returns a loader: a headrace.Loader, a PyTorch DataLoader,
    or anything to iterate over. The loader is made, looked at, and run for some seconds in a process of its own;
    then random reads of its files are timed. Every finding comes with a remedy; docs/doctor.md says more of each.

    The exit code is 0 without an alarm, and 1 with one, or if the target fails, hangs or gives no batch. Findings that
    HEADRACE_SILENCE names are left out.

    \b
    Examples:
      headrace doctor data --batch-size 32 --compute-ms 80
      headrace doctor train:make_loader --step train:step
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
    click.get_current_context().exit(1 if found.alarms else 0)


def describe(found: "Examination") -> list[str]:
    """The findings, the worst first; then, in a line each, what was fine and what was not looked at."""
    lines = [line for finding in found.findings for line in _finding_lines(finding)]
    if not lines:
        lines = [click.style("Nothing found.", fg="green")]
    run = found.run
    if run is not None and run.batches:
        waits = "" if run.wait_share is None else f"; the loop waited {run.wait_share:.0%} of its time"
        lines.append(_labelled("run", f"{run.batches:,} batches in {run.seconds:.1f} s{waits}", bold=True))
    if found.fine:
        lines.append(_labelled("fine", ", ".join(found.fine), fg="green"))
    for reason in dict.fromkeys(found.not_looked.values()):
        names = [name for name, each in found.not_looked.items() if each == reason]
        lines.append(_labelled("not seen", f"{', '.join(names)}: {safe_text(reason)}", dim=True))
    if found.silenced:
        lines.append(_labelled("silenced", ", ".join(found.silenced), dim=True))
    return lines


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
