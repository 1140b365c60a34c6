"""Measuring in a process of its own: what a target leaves behind, or breaks, ends with it.

The parent sends one JSON document to standard input and reads JSON lines from a pipe:

    {"told": "run", "run": {...}}           what was measured so far, now and then
    {"told": "done", "run": {...}}          the end
    {"told": "failed", "run": {...}, "error": "...", "traceback": "..."}

SIGINT ends a run early, with what there is. SIGUSR1 writes all stacks to standard error.
"""

import dataclasses
import faulthandler
import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.errors import PenstockError
from penstock.measure.knobs import knobs_of
from penstock.measure.run import Plan, Run, measure
from penstock.measure.steps import Step
from penstock.measure.targets import Target, import_function

if TYPE_CHECKING:
    from penstock.measure.trace import Recording


def main(descriptor: int) -> NoReturn:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.set_inheritable(descriptor, False)
    spec = json.load(sys.stdin)
    # What the target prints must not get between the command's own lines.
    os.dup2(2, 1)
    telling = _Telling(descriptor)
    try:
        target, step, plan = _parse(spec)
        # From here on it is the target that takes the time.
        telling.tell("run", telling.latest)
        run = measure(lambda: _make(target, spec, telling), step, plan, telling.so_far)
        _write_trace(telling)
        telling.tell("done", run)
    except KeyboardInterrupt:
        _write_trace(telling)
        telling.tell("done", telling.latest)
    except PenstockError as error:
        _write_trace(telling)
        telling.tell("failed", telling.latest, error=str(error), traceback=_trace(error))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        _write_trace(telling)
        telling.tell("failed", telling.latest, error=said, traceback=_trace(error))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's clean-up: threads or children of the target may never end.
    os._exit(0)


def _write_trace(telling: "_Telling") -> None:
    try:
        if telling.recording is not None:
            telling.recording.finish()
    except OSError:
        traceback.print_exc()


def _parse(spec: dict[str, Any]) -> tuple[Target, Step, Plan]:
    target = Target(**spec["target"])
    if not target.is_dataset:
        # Importing is no part of making a loader.
        import_function(target.name)
    return target, Step(**spec["step"]), Plan(**spec["plan"])


def _make(target: Target, spec: dict[str, Any], telling: "_Telling") -> Any:
    loader = target.make(**spec["settings"])
    telling.knobs = dataclasses.asdict(knobs_of(target, loader))
    if spec.get("trace"):
        from penstock.measure.trace import Recording

        telling.recording = Recording(loader, spec["trace"])
        return telling.recording.loader
    return loader


class _Telling:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.latest = Run()
        self.knobs: dict[str, Any] | None = None
        self.recording: Recording | None = None

    def so_far(self, run: Run) -> None:
        self.latest = run
        self.tell("run", run)

    def tell(self, what: str, run: Run, **more: str) -> None:
        told = {"told": what, "run": {**dataclasses.asdict(run), "knobs": self.knobs}, **more}
        line = json.dumps(told, default=str) + "\n"
        view = memoryview(line.encode())
        while view:
            view = view[os.write(self._descriptor, view) :]


def _trace(error: BaseException) -> str:
    cause = error.__cause__ or error
    return "".join(traceback.format_exception(cause))


if __name__ == "__main__":
    main(int(sys.argv[1]))
