"""`headrace verify-resume`: stops and resumes on the user's own data, and checks that every row comes exactly once."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

import headrace
from headrace.cli.arguments import dataset_arguments, json_option
from headrace.cli.loader_options import loader_options, make_settings, split_options
from headrace.cli.terminal import counted, progress_bar, safe_text

if TYPE_CHECKING:
    from headrace.load.settings import LoaderSettings
    from headrace.measure.proving.proof import Proof

_TRIALS = 5
_PROBLEMS_SHOWN = 5


@click.command()
@dataset_arguments
@click.option("--batch-size", metavar="B", type=int, required=True, help="Rows in a batch of each rank.")
@loader_options(shuffle="auto")
@click.option("--epochs", metavar="E", type=int, default=1, show_default=True, help="Epochs in one pass.")
@click.option(
    "--trials", metavar="N", type=int, default=_TRIALS, show_default=True, help="How many jobs to simulate."
)
@click.option(
    "--rows",
    metavar="N",
    type=int,
    help="How many rows of a large epoch to check (default: 20,000, or fewer if rows are long).",
)
@click.option(
    "--trial-seed",
    metavar="S",
    type=int,
    default=0,
    show_default=True,
    help="The seed of the random stops.",
)
@json_option
def command(
    path: str,
    batch_size: int,
    epochs: int,
    trials: int,
    rows: int | None,
    trial_seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Prove on DATASET that a job can stop and resume anywhere without losing or repeating a row.

    Each trial is a job that is stopped at random steps and resumed from its state, each time on a different number of
    ranks (1 to 8), with a different batch size and number of workers. Every row that a rank gets is compared with a run
    that never stops. Without --seq-len, the rows are the records of the dataset.

    The exit code is 0 if every row came exactly once and in its place, and otherwise 1.

    \b
    Examples:
      headrace verify-resume data --seq-len 2048 --batch-size 32
      headrace verify-resume images --batch-size 64 --shuffle block
      headrace verify-resume data --seq-len 8192 --batch-size 4 --rows 100000 --trials 20
    """
    from headrace.measure.proving.proof import prove_resume

    opening, chosen = split_options(options)
    settings = make_settings(chosen, batch_size=batch_size, epochs=epochs)
    dataset = headrace.open(path, **opening)
    # One more than there are trials: the run that never stops comes first.
    with progress_bar("stopping and resuming", trials + 1, "runs") as advance:
        proof = prove_resume(
            dataset, settings, trials=trials, rows=rows, seed=trial_seed, progress=lambda: advance(1)
        )
    if as_json:
        click.echo(json.dumps(to_json(path, proof)))
    else:
        for line in describe(path, proof, settings):
            click.echo(line)
    click.get_current_context().exit(0 if proof.exact else 1)


def to_json(path: str, proof: "Proof") -> dict[str, Any]:
    return {"dataset": path, "exact": proof.exact, **dataclasses.asdict(proof)}


def describe(path: str, proof: "Proof", settings: "LoaderSettings") -> list[str]:
    """What was done, with its numbers, and the verdict."""
    kind = f"rows of {settings.seq_len:,} tokens" if settings.seq_len else "records"
    facts = [
        ("dataset", f"{path}: {proof.rows_per_epoch:,} {kind} an epoch"),
        ("checked", _extent(proof, settings.epochs or 1)),
        ("trials", f"{proof.trials:,}, with {proof.stops:,} stops and resumes, in {proof.seconds:.1f} s"),
        (
            "on",
            f"{_range(proof.world_sizes)} ranks, batches of {_range(proof.batch_sizes)} on each, "
            f"{_range(proof.workers)} workers",
        ),
    ]
    if settings.batch_size not in proof.batch_sizes:
        few = "the rows that are checked are too few for several steps with it, so batches were smaller"
        facts.append(("note", f"--batch-size {settings.batch_size:,} itself was not tried: {few}"))
    lines = [f"{click.style(label.ljust(8), bold=True)} {safe_text(value)}" for label, value in facts]
    lines += [_problem_line(problem.trial, problem.what) for problem in proof.problems[:_PROBLEMS_SHOWN]]
    if len(proof.problems) > _PROBLEMS_SHOWN:
        lines.append(f"... and {counted(len(proof.problems) - _PROBLEMS_SHOWN, 'more problem')}")
    return [*lines, verdict(path, proof)]


def _problem_line(trial: int, what: str) -> str:
    where = f"trial {trial}" if trial else "the run that never stops"
    return f"{click.style('problem ', bold=True, fg='red')} {where}, {safe_text(what)}"


def _extent(proof: "Proof", epochs: int) -> str:
    passed = "the epoch" if epochs == 1 else f"{epochs} epochs"
    if proof.whole:
        return f"all rows of {passed} and the beginning of the next: {proof.rows:,} in each trial"
    return (
        f"{proof.rows:,} rows in each trial, in {len(proof.stretches)} stretches of {passed}: the beginning, the end "
        "with the step into the next epoch, and random ones (--rows N checks more)"
    )


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def verdict(path: str, proof: "Proof") -> str:
    if proof.exact:
        return click.style(
            "Resuming is exact: every row came exactly once, in its place, and every rank took equal steps.",
            fg="green",
        )
    failed = len({problem.trial for problem in proof.problems if problem.trial})
    first = min(problem.position for problem in proof.problems)
    return click.style(
        f"Resuming is not exact: {failed} of {proof.trials} trials went wrong; the first wrong row is at position "
        f"{first:,}. Run `headrace verify {path}`; if the dataset is intact, this is a bug: please report these lines.",
        fg="red",
    )
