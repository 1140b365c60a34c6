"""What is already in the output directory: a finished dataset, an unfinished build, both, or nothing.

To a new build, a finished dataset and the results of an unfinished build are the same: results of tasks that may still
hold. They count only if they were made with the same settings. Each result of an unfinished build is a separate file,
which is either complete or absent, so that any store can hold them (`format/workplace.py` has the rest of `.build`):

    .build/state.json                   the settings, and whether everything is being built again
    .build/results/<key>.json           the result of a task
    .build/gathered/<start>-<stop>.json a shuffled shard
    .build/stage/                       the records of a shuffled build in input order
    .build/stdin                        the content of standard input
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import CorruptError, SettingsChangedError, SettingsError, UnfinishedBuildError
from headrace.format.manifest import MANIFEST_NAME, Manifest, ShardEntry, read_manifest
from headrace.format.workplace import BUILD_STATE_NAME, Workplace
from headrace.ingest.gather import stage_in
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
        self._refuse_unfinished_writer()
        self._state = self._read_state()
        self._finished = self._read_finished()
        self._provenance = self._read_provenance()

    def _refuse_unfinished_writer(self) -> None:
        if self._writer.shards() and not self._rebuild:
            raise UnfinishedBuildError(
                f"{self.out.name}: a headrace.Writer was interrupted here, and its records would be lost; complete it "
                "with headrace.Writer(..., resume=True), choose another directory, or use --rebuild to discard them"
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
                "or use --rebuild"
            )
        return manifest

    def _read_provenance(self) -> "_Provenance":
        """What the dataset that is to be extended was made from."""
        if not (self.finished and self.finished.provenance):
            return _Provenance()
        try:
            content = self.out.read(self.finished.provenance.file)
            return msgspec.json.decode(content, type=_Provenance)
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptError(
                f"{self.out.name}: the provenance is damaged ({error}); use --rebuild to build all of it again"
            ) from None

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
        if self._state and self._state["settings"] != settings:
            if not self._rebuild:
                raise _changed(self.out, "an unfinished build is here", self._state["settings"], settings)
            self._state = None
        if self.finished and self.finished.settings != settings:
            raise _changed(self.out, "the dataset was built", self.finished.settings or {}, settings)
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
        for folder in (self._results, self._gathered, stage_in(self.out)):
            folder.remove_all()
        self._writer.remove()
        self._folder.remove(BUILD_STATE_NAME)

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

    def finished_inputs(self) -> dict[str, str]:
        """Path -> fingerprint, for the inputs that the finished dataset was made from."""
        return {entry.path: entry.fingerprint for entry in self._provenance.inputs}

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


def _changed(out: Store, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> SettingsChangedError:
    old, new = _flat(old), _flat(new)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    differences = "; ".join(
        f"{name} was {_short(old.get(name))}, is now {_short(new.get(name))}" for name in names
    )
    return SettingsChangedError(
        f"{out.name}: {what} with other settings: {differences}. Use --rebuild to build all of it again, "
        "or another output directory"
    )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"tokenizer": {"eos_id": 5}} -> {"tokenizer.eos_id": 5}, so that a difference is named exactly."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
