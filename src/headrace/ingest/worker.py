"""A process that does jobs for a build on this machine.

It is an ordinary subprocess: it neither forks the caller nor imports the caller's script again, so `headrace.build` can
be called from anywhere. It ends when the build ends, or when the process of the build does.
"""

import contextlib
import importlib
import os
import sys
import traceback

from headrace.errors import BuildError
from headrace.ingest.conversation import WORKER_SIDE, Failed, Import, Prepare
from headrace.ingest.jobs import run_job
from headrace.ingest.task import Workbench
from headrace.readers.bad_records import encodable
from headrace.workers.worker import attach


def main() -> None:
    link = attach(sys.argv[1:], WORKER_SIDE)
    # What a library prints is meant for people and is not part of the command's output.
    os.dup2(2, 1)
    bench: Workbench | None = None
    while True:
        message = link.messages.get().head
        try:
            match message:
                case Import(modules):
                    _import(modules)
                case Prepare(settings):
                    bench = Workbench.prepare(settings)
                case job if bench is not None:
                    link.send(run_job(job, bench, link.send))
                case _:
                    raise BuildError("a job was sent before its settings")
        except BaseException as error:
            link.send(Failed(type(error).__name__, encodable(str(error)), encodable(traceback.format_exc())))


def _import(modules: list[str]) -> None:
    for module in modules:
        # A missing module is reported when it is needed.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


if __name__ == "__main__":
    main()
