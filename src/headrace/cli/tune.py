"""`headrace tune`: the workers, prefetch depth and batch size that suit this machine and this step."""

import json
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.arguments import json_option
from headrace.cli.measure_options import interruptible, take_target, target_options
from headrace.cli.terminal import counted

if TYPE_CHECKING:
    from headrace.measure.tuning.search import Trial, Tuning


@click.command()
@target_options
@click.option(
    "--budget", metavar="S", type=float, default=60.0, show_default=True, help="How many seconds to spend."
)
@click.option(
    "--keep",
    metavar="NAME",
    multiple=True,
    help="Do not change this setting, such as batch_size. May be repeated.",
)
@json_option
def command(budget: float, keep: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Find the best number of workers, prefetch depth and batch size for TARGET on this machine.

    TARGET is the directory or address of a dataset, or MODULE:FUNCTION, a function that returns a loader: it either has
    parameters such as num_workers and batch_size, or returns a PyTorch DataLoader. Give the step (--step or
    --compute-ms): the best settings are then the cheapest ones with which the step does not wait. Without a step, they
    are the ones with the highest throughput.

    TARGET may also be the addresses of servers (headrace serve), separated by commas. Then the number of batches in
    flight and of servers is looked for, and it is said how many servers the step needs: an estimate, if more are needed
    than were given.

    Settings are tried one by one, as long as they help. Before they are recommended, they are measured again, in turns
    with the given ones; nothing is recommended that was not measured. The exit code is 130 after Ctrl-C.

    \b
    Examples:
      headrace tune train:make_loader --step train:step
      headrace tune data --seq-len 2048 --batch-size 32 --compute-ms 20 --keep batch_size
      headrace tune s3://bucket/data --seq-len 2048 --batch-size 32 --compute-ms 20
      headrace tune grpc://cpu-1:9000,grpc://cpu-2:9000 --compute-ms 20
    """
    from headrace.measure.tuning.tune import tune_target

    timeout = options.pop("timeout")
    target, step = take_target(options)
    with interruptible():
        tuning = tune_target(
            target,
            step=step,
            budget_seconds=budget,
            keep=keep,
            timeout_seconds=timeout,
            progress=None if as_json else show_trial,
        )
    if as_json:
        click.echo(json.dumps(tuning.to_json(), default=str))
    else:
        for line in describe(tuning):
            click.echo(line)
    click.get_current_context().exit(130 if tuning.interrupted else 0)


def show_trial(trial: "Trial") -> None:
    from headrace.cli.terminal import safe_text

    name = safe_text(trial.name)
    if trial.rate is None:
        said = (trial.error or "").strip().splitlines() or ["no reason was given"]
        click.echo(f"  {name:<46} failed: {safe_text(said[0])}")
        return
    waits = "" if trial.wait_share is None else f"  waits {trial.wait_share:4.0%}"
    busy = "" if trial.cpu_cores is None else f"  {trial.cpu_cores:4.1f} cores"
    fetched = f"  {trial.network['network_mb_per_second']:,.0f} MB/s fetched" if trial.network else ""
    click.echo(f"  {name:<46} {trial.rate:12,.1f} samples/s{waits}{busy}{fetched}")


def describe(tuning: "Tuning") -> list[str]:
    """The settings to choose, what they gain, and why."""
    lines = [""]
    if tuning.recommended:
        settings = ", ".join(f"{name}={value!r}" for name, value in tuning.recommended.items())
        lines.append(click.style(f"set {settings}", bold=True, fg="green"))
        if tuning.gain:
            gain = tuning.gain
            spread = (
                f" ({gain['lowest']:.2f} to {gain['highest']:.2f})"
                if gain["lowest"] < gain["highest"]
                else ""
            )
            lines.append(
                f"{gain['median']:.2f} times as fast{spread}, measured in turns with the given settings"
            )
    elif tuning.interrupted:
        said = "Interrupted before anything was confirmed: nothing is recommended."
        lines.append(click.style(said, bold=True))
    else:
        lines.append(click.style("keep the given settings", bold=True))
    lines += [f"  because {why}" for why in tuning.why]
    if tuning.servers is not None:
        lines.append(f"  servers: {tuning.servers.said}")
    if tuning.ended and not tuning.interrupted:
        lines.append(f"  the search ended because {tuning.ended}")
    cold = sum(not trial.is_warm for trial in tuning.trials)
    if cold:
        lines.append(
            f"  note: in {counted(cold, 'measurement')}, remote data was still arriving when batches began to be "
            "counted; give a larger --budget, or a --cache that holds the data"
        )
    lines.append(f"{counted(len(tuning.trials), 'measurement')} in {tuning.seconds:.0f} s")
    return lines
