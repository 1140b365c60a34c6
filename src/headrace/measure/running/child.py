"""Measuring in a process of its own: what a target leaves behind, or breaks, ends with it.

The parent sends one message that says what to run, and receives messages (`workers/wire.py`) whose heads are JSON:

    {"told": "run", "run": {...}}           what was measured so far, now and then
    {"told": "done", "run": {...}}          the end
    {"told": "failed", "run": {...}, "error": "...", "where": "at train.py:12 in make_loader", "imported": true}

SIGINT ends a run early, with what was measured until then.
"""

import dataclasses
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.errors import HeadraceError
from headrace.load.target import import_function
from headrace.measure.running.environment import accelerators
from headrace.measure.running.knobs import knobs_of
from headrace.measure.running.run import Plan, Run, measure
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import Target
from headrace.workers.wire import JSON
from headrace.workers.worker import Link, attach

if TYPE_CHECKING:
    from headrace.measure.watching.trace import Recording

_HOME = str(Path(__file__).resolve().parents[2])


def main() -> NoReturn:
    link = attach(sys.argv[1:], JSON, ignore_ctrl_c=False, leave=_end_with_parent)
    # A process that the target forks would keep the connection open after this process has died.
    os.register_at_fork(after_in_child=link.close)
    spec = link.messages.get().head
    # What the target prints must not mix with the command's own output.
    os.dup2(2, 1)
    sys.argv = [spec["target"]["name"]]
    telling = _Telling(link)
    failure: BaseException | None = None
    try:
        try:
            target, step, plan = _parse(spec)
            telling.imported = True
            # From here on, the time is the target's.
            telling.tell("run", telling.latest)
            telling.latest = measure(lambda: _make(target, spec, telling), step, plan, telling.so_far)
        except BaseException as error:
            failure = error
        _ignore_signals()
    except BaseException as error:
        # A second exception, before signals were ignored.
        failure = failure or error
        _ignore_signals()
    _write_trace(telling)
    sys.stdout.flush()
    if failure is None or isinstance(failure, KeyboardInterrupt):
        telling.tell("done", telling.latest)
    else:
        telling.tell(
            "failed",
            telling.latest,
            error=_described(failure),
            where=_where(failure),
            imported=telling.imported,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's clean-up: threads or children of the target may never end.
    os._exit(0)


def _ignore_signals() -> None:
    """Stop signals from raising exceptions in this thread: PyTorch turns a worker's death into one, wherever the thread
    is, and Ctrl-C does the same."""
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _end_with_parent() -> None:
    os.killpg(0, signal.SIGKILL)


def _parse(spec: dict[str, Any]) -> tuple[Target, Step, Plan]:
    target = Target(**spec["target"])
    # Import now: it is not part of making a loader.
    step = Step(**spec["step"])
    if step.name:
        import_function(step.name)
    is_made_here = target.is_dataset or target.is_served
    if not is_made_here:
        import_function(target.name)
    elif "device" in {**target.settings, **spec["settings"]}:
        import headrace.torch
    elif target.is_served:
        import headrace.serve.remote_loader
    else:
        import headrace.load.loader  # noqa: F401
    return target, step, Plan(**spec["plan"])


def _make(target: Target, spec: dict[str, Any], telling: "_Telling") -> Any:
    loader = target.make(**spec["settings"])
    telling.knobs = dataclasses.asdict(knobs_of(target, loader))
    if spec.get("trace"):
        from headrace.measure.watching.trace import Recording

        telling.recording = Recording(loader, spec["trace"])
        return telling.recording.loader
    return loader


def _write_trace(telling: "_Telling") -> None:
    try:
        if telling.recording is not None:
            telling.recording.finish()
    except OSError:
        traceback.print_exc()


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"


def _where(error: BaseException) -> str:
    """The place in the user's code that an error comes from."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_HOME, "<frozen"))]
    if not own:
        return ""
    innermost = own[-1]
    return f"at {innermost.filename}:{innermost.lineno} in {innermost.name}"


class _Telling:
    def __init__(self, link: Link) -> None:
        self._link = link
        self.latest = Run()
        self.knobs: dict[str, Any] | None = None
        self.recording: Recording | None = None
        self.imported = False
        """Whether the target and its step could be imported."""

    def so_far(self, run: Run) -> None:
        self.latest = run
        self.tell("run", run)

    def tell(self, what: str, run: Run, **more: str | bool) -> None:
        shown = {**dataclasses.asdict(run), "knobs": self.knobs, "accelerators": accelerators()}
        self._link.send({"told": what, "run": shown, **more})


if __name__ == "__main__":
    main()
