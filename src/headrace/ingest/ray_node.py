"""A job of a build on a node of a Ray cluster.

Jobs, settings and outcomes are bytes here (msgpack), as between the processes of a local build, so nothing depends on
pickle. Outcomes that are long, like those of tasks with thousands of small files, go to the output store: Ray keeps
what tasks return in the memory of the machine that has started the build.
"""

import contextlib
import os
import time
from functools import lru_cache
from typing import Any

import msgspec

import headrace
from headrace.errors import BuildError, MissingExtraError, StorageError
from headrace.format.checksum import checksum
from headrace.ingest.jobs import Advanced, Job, JobMessage, Outcome, run_job
from headrace.ingest.task import TaskSettings, Workbench
from headrace.store.store import Store, write_file

MOST_OUTCOME_BYTES = 64 * 2**10
_SECONDS_BETWEEN_REPORTS = 1.0


class NodeSettings(JobMessage, frozen=True):
    """What all jobs of a run have in common."""

    settings: TaskSettings
    probe: str
    """A file of the output, which a node that sees the same output finds there."""


class Elsewhere(JobMessage, frozen=True):
    """An outcome that was written to a file of the output."""

    file: str


encode = msgspec.msgpack.Encoder().encode
_outcomes: msgspec.msgpack.Decoder[Outcome | Elsewhere] = msgspec.msgpack.Decoder(Outcome | Elsewhere)
_decode_job = msgspec.msgpack.Decoder(Job).decode
_decode_settings = msgspec.msgpack.Decoder(NodeSettings).decode


def versions() -> dict[str, str]:
    """What must be the same everywhere."""
    from headrace.ingest.build import INGEST_VERSION

    return {"headrace": headrace.__version__, "ingest": str(INGEST_VERSION)}


def run_job_here(
    expected: dict[str, str], directory: str, settings: bytes, job: bytes, number: int, board: Any
) -> bytes:
    if versions() != expected:
        raise BuildError(
            f"headrace {headrace.__version__} is installed, but the build was started with {expected['headrace']}; "
            "install the same version everywhere"
        )
    # Inputs and outputs may be named by relative paths. If the directory is not there, they are not found either.
    with contextlib.suppress(OSError):
        os.chdir(directory)
    bench = _workbench(settings)
    outcome = run_job(_decode_job(job), bench, _Reports(number, board))
    encoded = encode(outcome)
    if len(encoded) <= MOST_OUTCOME_BYTES:
        return encoded
    name = f"outcome-{checksum(encoded)}"
    write_file(bench.store, name, [encoded])
    return encode(Elsewhere(name))


@lru_cache(maxsize=2)
def _workbench(encoded: bytes) -> Workbench:
    """Tables of tokenizers take a second to load, so a process keeps them for its next job."""
    given = _decode_settings(encoded)
    try:
        bench = Workbench.prepare(given.settings)
    except MissingExtraError as error:
        raise BuildError(
            f"its tokenizer cannot be loaded: {error}. All nodes need the same packages as the machine that starts the "
            "build"
        ) from None
    if given.probe and not bench.store.has(given.probe):
        raise StorageError(
            f"{bench.store.name}: is not the same place here as on the machine that has started the build; use a disk "
            "that all nodes share, or an object store"
        )
    return bench


def take_outcome(encoded: bytes, store: Store) -> Outcome:
    """An outcome that a node has returned, or that it has left in the output."""
    found = _outcomes.decode(encoded)
    if not isinstance(found, Elsewhere):
        return found
    outcome = _outcomes.decode(store.read(found.file))
    store.remove(found.file)
    if isinstance(outcome, Elsewhere):
        raise BuildError(f"{store.locate(found.file)}: is no outcome of a job; start the build again")
    return outcome


class _Reports:
    """Sends the progress of a job, as its total so far: a report that is lost, or of a job that is run again, does no
    harm."""

    def __init__(self, number: int, board: Any) -> None:
        self._number, self._board = number, board
        self._total = Advanced()
        self._sent_at = time.monotonic()

    def __call__(self, told: Advanced) -> None:
        total = self._total
        self._total = Advanced(
            total.input_bytes + told.input_bytes, total.records + told.records, total.elements + told.elements
        )
        if time.monotonic() - self._sent_at < _SECONDS_BETWEEN_REPORTS:
            return
        self._sent_at = time.monotonic()
        # Without waiting for it, and whatever becomes of it.
        with contextlib.suppress(Exception):
            self._board.note.remote(self._number, msgspec.structs.astuple(self._total))
