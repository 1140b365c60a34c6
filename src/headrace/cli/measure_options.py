"""What `bench`, `tune` and `doctor` share: the target, its settings, and the step."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli.arguments import cache_bytes_option, cache_option

if TYPE_CHECKING:
    from headrace.measure.running.steps import Step
    from headrace.measure.running.targets import Target

Command = TypeVar("Command", bound=Callable[..., Any])

_SHORTCUTS = ("batch_size", "seq_len", "num_workers", "device", "cache", "cache_bytes")


def target_options(command: Command) -> Command:
    """TARGET, how its loader is made, and what the loop does with a batch."""
    options = (
        click.argument("target_name", metavar="TARGET"),
        click.option("--batch-size", metavar="B", type=int, help="Samples (or rows) in a batch."),
        click.option(
            "--seq-len",
            metavar="T",
            type=int,
            help="Tokens in a row, for a dataset of tokens (default: 2048).",
        ),
        click.option(
            "--num-workers",
            metavar="N",
            type=int,
            help="Worker threads or processes (default: the target's own; for a dataset, chosen by the Loader).",
        ),
        click.option(
            "--device",
            metavar="D",
            help="For a dataset or servers: deliver batches as tensors on this device, such as 'cuda'.",
        ),
        cache_option,
        cache_bytes_option,
        click.option(
            "--set",
            "assignments",
            metavar="NAME=VALUE",
            multiple=True,
            help="Any other setting of the loader or parameter of the function. May be repeated.",
        ),
        click.option("--compute-ms", metavar="MS", type=float, help="Simulate a step of this length."),
        click.option(
            "--step",
            "step_name",
            metavar="MODULE:FUNCTION",
            help="A real training step: a function that is called with each batch.",
        ),
        click.option(
            "--timeout",
            metavar="S",
            type=float,
            default=60.0,
            show_default=True,
            help="Give up if a batch takes longer than this many seconds.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_target(options: dict[str, Any]) -> "tuple[Target, Step]":
    """Take the target and the step out of a command's options."""
    from headrace.measure.running.servers import names_servers, wait_for_servers
    from headrace.measure.running.steps import Step
    from headrace.measure.running.targets import find_target

    settings = {name: value for name in _SHORTCUTS if (value := options.pop(name)) is not None}
    settings |= parse_settings(options.pop("assignments"))
    target = find_target(options.pop("target_name"), settings)
    if names_servers(target.name):
        # Here it says that it waits; the process that is measured is not heard until it ends.
        wait_for_servers(target.name, target.settings)
    return target, Step(compute_ms=options.pop("compute_ms"), name=options.pop("step_name"))


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """`name=value` -> {name: value}. Numbers, true, false and None become values; anything else stays text."""
    return {name: parse_value(value) for name, value in (_split(each, "--set") for each in assignments)}


def parse_sweeps(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """`name=1,2,4` -> {name: [1, 2, 4]}."""
    from headrace.errors import SettingsError

    sweeps: dict[str, list[Any]] = {}
    for name, values in (_split(each, "--sweep") for each in assignments):
        if name in sweeps:
            raise SettingsError(
                f"--sweep {name!r} was given twice; write all values in one, such as '{name}=1,2,4'"
            )
        sweeps[name] = [parse_value(each) for each in values.split(",") if each.strip()]
    return sweeps


def check_place(path: Path | None) -> None:
    """Fail before hours of measuring, rather than after."""
    from headrace.errors import SettingsError
    from headrace.store.address import local_path

    if path is None:
        return
    local_path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SettingsError(f"{path} cannot be written; give the path of a file in a directory that exists")


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGTERM and a closed terminal act like Ctrl-C: what was measured is shown, and nothing is left running."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {sign: signal.signal(sign, interrupt) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _split(assignment: str, option: str) -> tuple[str, str]:
    from headrace.errors import SettingsError

    given, equals, value = assignment.partition("=")
    # Also as an option would be written: --num-workers.
    name = given.strip().removeprefix("--").replace("-", "_")
    if not equals or not name.isidentifier():
        # In quotes, so that the name is not taken for that of an option.
        example = "num_workers=1,2,4" if option == "--sweep" else "num_workers=4"
        raise SettingsError(f"{option} {assignment!r}: write NAME=VALUE, such as {option} '{example}'")
    return name, value.strip()


def parse_value(text: str) -> Any:
    text = text.strip()
    # Not 'none', which is a value of shuffle.
    words = {"true": True, "false": False, "True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    if text.endswith("%"):
        try:
            return float(text[:-1]) / 100
        except ValueError:
            pass
    return text
