"""What is already in the output directory: a finished dataset, an unfinished build, both, or nothing.

To a new build, a finished dataset and the results of an unfinished build are the same: results of tasks that may still
hold. They count only if they were made with the same settings. Each result of an unfinished build is a separate file,
which is either complete or absent, so that any store can hold them (`format/workplace.py` has the rest of `.build`):

    .build/state.json                   the settings, and whether everything is being built again
    .build/results/<key>.json           the result of a task
    .build/gathered/<start>-<stop>.json a shuffled shard
    .build/stage/                       the records of a shuffled build in input order
    .build/stdin                        the content of standard input

If the directory is in an object store, the last two are in a temporary directory of this machine.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import CorruptError, SettingsChangedError, SettingsError, UnfinishedBuildError
from headrace.format.manifest import MANIFEST_NAME, Manifest, ShardEntry, read_manifest
from headrace.format.workplace import BUILD_STATE_NAME, COPY_STATE_NAME, Workplace
from headrace.ingest.differences import differences
from headrace.ingest.gather import stage_of
from headrace.ingest.results import TaskResult
from headrace.ingest.writer_notes import WriterNotes
from headrace.store.store import Store, write_file

_STANDARD_INPUT_NAME = "stdin"


class Site:
    """Owns the folder `.build` while the caller holds the lock of the store."""

    def __init__(self, out: Store, *, rebuild: bool) -> None:
        self.out, self.work = out, Workplace(out)
        self._folder = self.work.folder
        self._results, self._gathered = self._folder.folder("results"), self._folder.folder("gathered")
        self._writer = WriterNotes(out, self._folder)
        self._rebuild = rebuild
        self._refuse_other_work()
        self._state = self._read_state()
        self._finished = self._read_finished()
        self._provenance = self._read_provenance()

    def _refuse_other_work(self) -> None:
        """Refuse to discard what is not a build's own."""
        if self._rebuild:
            return
        if self._folder.has(COPY_STATE_NAME):
            raise UnfinishedBuildError(
                f"{self.out.name}: a copy was interrupted here; complete it by starting the same copy again, choose "
                "another directory, or use rebuild=True to discard it"
            )
        if self._writer.shards():
            raise UnfinishedBuildError(
                f"{self.out.name}: a headrace.Writer was interrupted here, and its records would be lost; complete it "
                "with headrace.Writer(..., resume=True), choose another directory, or use rebuild=True to discard them"
            )

    def _read_state(self) -> dict[str, Any] | None:
        """How an unfinished build was started; None if there is none, or if it has not finished any task."""
        try:
            state = json.loads(self._folder.read(BUILD_STATE_NAME))
        except (OSError, ValueError, RecursionError):
            return None
        is_state = isinstance(state, dict) and isinstance(state.get("settings"), dict)
        return state if is_state and self._results.files() else None

    def _read_finished(self) -> Manifest | None:
        if not self.out.has(MANIFEST_NAME):
            return None
        try:
            manifest = read_manifest(self.out)
        except CorruptError:
            if self._rebuild:
                return None
            raise
        if manifest.settings is None and not self._rebuild:
            raise SettingsError(
                f"{self.out.name}: holds a dataset that was not made by a build; choose another directory, "
                "or use rebuild=True"
            )
        return manifest

    def _read_provenance(self) -> "_Provenance":
        """What the dataset that is to be extended was made from."""
        if not self.finished:
            return _Provenance()
        try:
            return self._provenance_of(self.finished)
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptError(
                f"{self.out.name}: the provenance is damaged ({error}); use rebuild=True to build all of it again"
            ) from None

    def _provenance_of(self, manifest: Manifest) -> "_Provenance":
        if manifest.provenance is None:
            return _Provenance()
        return msgspec.json.decode(self.out.read(manifest.provenance.file), type=_Provenance)

    @property
    def stage(self) -> Store:
        return stage_of(self.out, self.local_stage)

    @property
    def local_stage(self) -> str:
        """A directory of this machine, if the dataset is not on it; otherwise empty. Every shuffled shard has records
        of all parts of the stage: from an object store, all of it would be fetched for each of them."""
        return str(self._folder.scratch() / "stage") if self.out.is_remote else ""

    @property
    def standard_input(self) -> Path:
        """The local file in which standard input is kept during the build."""
        return self._folder.scratch() / _STANDARD_INPUT_NAME

    @property
    def shard_bytes(self) -> int | None:
        """The size that was chosen here before, so that an input that grows is still cut in the same places."""
        if self._rebuild:
            return None
        finished = self._finished.settings if self._finished else None
        settings = (self._state or {}).get("settings") or finished or {}
        value = settings.get("shard_bytes")
        return value if type(value) is int else None

    @property
    def finished(self) -> Manifest | None:
        """The dataset to extend; None if it is to be replaced."""
        replaced = self._rebuild or bool(self._state and self._state.get("rebuild"))
        return None if replaced else self._finished

    def claim(self) -> None:
        self.work.claim()

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Refuse to mix settings; otherwise record that a build with these settings is under way."""
        if self._state and self._rebuild and differences(self._state["settings"], settings):
            self._state = None
        if self._state:
            what = "an unfinished build is here"
            _refuse_other_settings(self.out, what, self._state["settings"], settings)
        if self.finished:
            _refuse_other_settings(self.out, "the dataset was built", self.finished.settings or {}, settings)
        if not self._state:
            # Without a state file, nothing says which settings these results were made with.
            self._discard()
        self.work.new.remove_all()  # what a killed build has left there belongs to no result
        self.claim()
        for folder in (self._results, self._gathered):
            folder.create()
        if not self._state:
            self._state = {"settings": dict(settings), "rebuild": self._rebuild}
            write_file(self._folder, BUILD_STATE_NAME, [json.dumps(self._state).encode()])

    def _discard(self) -> None:
        """Forget the unfinished build, but not the standard input that this run has just kept there."""
        if not self._folder.exists():
            return
        self.claim()
        self.work.discard()
        # Results first: without the settings beside them, nothing would say what they were made with.
        for folder in (self._results, self._gathered, self.stage):
            folder.remove_all()
        self._writer.remove()
        for name in (COPY_STATE_NAME, BUILD_STATE_NAME):
            self._folder.remove(name)

    # Results of tasks

    def keep(self, result: TaskResult) -> None:
        write_file(self._results, f"{result.key}.json", [msgspec.json.encode(result)])

    def known_results(self) -> dict[str, TaskResult]:
        """Results by the key of their task; those of the unfinished build replace those of the dataset."""
        known = {result.key: result for result in self.finished_results()}
        for file in self._results.files():
            try:
                result = msgspec.json.decode(self._results.read(file), type=TaskResult)
            except (OSError, ValueError):
                continue  # the task is run again
            known[result.key] = result
        return known

    def finished_results(self) -> Sequence[TaskResult]:
        return self._provenance.tasks

    def known_ranges(self) -> dict[tuple[str, str], list[tuple[int, int]]]:
        """The ranges into which the inputs of the finished dataset were cut, by their names and fingerprints."""
        known: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for result in self.finished_results():
            for piece, fingerprint in zip(result.slices, result.fingerprints, strict=True):
                known.setdefault((piece.path, fingerprint), []).append((piece.start, piece.stop))
        return known

    def finished_inputs(self) -> dict[str, str]:
        """Path -> fingerprint, for the inputs that the finished dataset was made from."""
        return {entry.path: entry.fingerprint for entry in self._provenance.inputs}

    def inputs_before(self) -> list[str]:
        """The inputs of the dataset that is here, also if it is to be replaced; none if that cannot be found out."""
        if self.finished or not self._finished:
            return [entry.path for entry in self._provenance.inputs]
        try:
            return [entry.path for entry in self._provenance_of(self._finished).inputs]
        except (OSError, ValueError, RecursionError):
            return []

    # Shards of a shuffled build

    def keep_gathered(self, stage: str, bounds: tuple[int, int], entry: ShardEntry) -> None:
        """Keep a shuffled shard that was made from the stage with this checksum."""
        content = msgspec.json.encode({"stage": stage, "entry": entry})
        write_file(self._gathered, f"{bounds[0]}-{bounds[1]}.json", [content])

    def gathered(self, stage: str) -> dict[tuple[int, int], ShardEntry]:
        """The shuffled shards that were made from the stage with this checksum, by their range of positions."""
        found = {}
        for file in self._gathered.files():
            try:
                kept = msgspec.json.decode(self._gathered.read(file), type=_Gathered)
            except (OSError, ValueError):
                continue
            if kept.stage == stage:
                start, _, stop = file.removesuffix(".json").partition("-")
                found[int(start), int(stop)] = kept.entry
        return found

    def clear(self) -> None:
        """Forget the build, and delete everything of it that belongs to no dataset."""
        self.work.remove()


class _InputEntry(msgspec.Struct):
    path: str
    fingerprint: str


class _Provenance(msgspec.Struct):
    """What a build reads of the provenance."""

    inputs: Sequence[_InputEntry] = ()
    tasks: Sequence[TaskResult] = ()


class _Gathered(msgspec.Struct):
    stage: str
    entry: ShardEntry


def _refuse_other_settings(out: Store, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if different := differences(old, new):
        raise SettingsChangedError(
            f"{out.name}: {what} with other settings: {'; '.join(different)}. Use rebuild=True to build all of it "
            "again, or another output directory"
        )
