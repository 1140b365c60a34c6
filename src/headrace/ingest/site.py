"""What is already at the place of the output: a finished dataset, an unfinished build, both or nothing.

A finished dataset and the results of an unfinished build are the same to a new build: results of tasks that
may still hold. They count only if they were made with the same settings. Each result of an unfinished build is a file
of its own, whole or not there, so that any store can hold them:

    .build/state.json                   the settings, and whether all is built again
    .build/results/<key>.json           what a task made
    .build/gathered/<start>-<stop>.json a shuffled shard
    .build/stage/                       the records of a shuffled build in input order
    .build/stdin                        what came by standard input
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import CorruptError, SettingsChangedError, SettingsError
from headrace.format.manifest import BUILD_NAME, MANIFEST_NAME, Manifest, ShardEntry, read_manifest
from headrace.ingest.gather import stage_in
from headrace.ingest.results import TaskResult
from headrace.store.store import Store, write_file

_STATE_NAME, _STANDARD_INPUT_NAME = "state.json", "stdin"


class Site:
    """Owns the folder `.build` while the lock of the store is held."""

    def __init__(self, out: Store, *, rebuild: bool) -> None:
        self.out, self._folder = out, out.folder(BUILD_NAME)
        self._results, self._gathered = self._folder.folder("results"), self._folder.folder("gathered")
        self._rebuild = rebuild
        self._state = self._read_state()
        self._finished = self._read_finished()

    def _read_state(self) -> dict[str, Any] | None:
        """What an unfinished build was begun with; None if there is none, or none that has finished anything."""
        try:
            state = json.loads(self._folder.read(_STATE_NAME))
        except (OSError, ValueError):
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
                f"{self.out.name}: holds a dataset that was not made by a build; choose another directory, or --rebuild"
            )
        return manifest

    @property
    def standard_input(self) -> Path:
        """The local file in which standard input is kept while it is built from."""
        return self._folder.scratch() / _STANDARD_INPUT_NAME

    @property
    def shard_bytes(self) -> int | None:
        """What was chosen here before, so that a growing input does not change how it is cut."""
        if self._rebuild:
            return None
        finished = self._finished.settings if self._finished else None
        settings = (self._state or {}).get("settings") or finished or {}
        value = settings.get("shard_bytes")
        return value if type(value) is int else None

    @property
    def finished(self) -> Manifest | None:
        """The dataset to extend; none if it is to be replaced."""
        replaced = self._rebuild or bool(self._state and self._state.get("rebuild"))
        return None if replaced else self._finished

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Refuse to mix settings; otherwise write down that a build with these is under way."""
        if self._state and self._state["settings"] != settings:
            if not self._rebuild:
                raise _changed(self.out, "an unfinished build is here", self._state["settings"], settings)
            self._state = None
        if self.finished and self.finished.settings != settings:
            raise _changed(self.out, "the dataset was built", self.finished.settings or {}, settings)
        if not self._state:
            # Results of whatever settings, if their own are not there to tell.
            self._discard()
        for folder in (self._folder, self._results, self._gathered):
            folder.create()
        if not self._state:
            self._state = {"settings": dict(settings), "rebuild": self._rebuild}
            write_file(self._folder, _STATE_NAME, [json.dumps(self._state).encode()])

    def _discard(self) -> None:
        """Forget the unfinished build, but not the standard input that this run has just kept there."""
        # Results first: without the settings beside them, nobody could tell what they were made with.
        for folder in (self._results, self._gathered, stage_in(self.out)):
            folder.remove_all()
        self._folder.remove(_STATE_NAME)

    # Results of tasks

    def keep(self, result: TaskResult) -> None:
        write_file(self._results, f"{result.key}.json", [msgspec.json.encode(result)])

    def known_results(self) -> dict[str, TaskResult]:
        """Results by the key of their task; the unfinished build's are newer than the dataset's."""
        known = {result.key: result for result in self.finished_results()}
        for file in self._results.files():
            try:
                result = msgspec.json.decode(self._results.read(file), type=TaskResult)
            except (OSError, ValueError):
                continue  # it is built again
            known[result.key] = result
        return known

    def finished_results(self) -> Iterator[TaskResult]:
        if self.finished and self.finished.provenance:
            try:
                provenance = json.loads(self.out.read(self.finished.provenance.file))
                yield from (msgspec.convert(entry, TaskResult) for entry in provenance["tasks"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CorruptError(
                    f"{self.out.name}: damaged provenance ({error}); use --rebuild to build all of it again"
                ) from None

    def finished_inputs(self) -> dict[str, str]:
        """Path -> fingerprint of the inputs that the finished dataset was made from."""
        if not (self.finished and self.finished.provenance):
            return {}
        provenance = json.loads(self.out.read(self.finished.provenance.file))
        return {entry["path"]: entry["fingerprint"] for entry in provenance["inputs"]}

    # Shards of a shuffled build

    def keep_gathered(self, stage: str, bounds: tuple[int, int], entry: ShardEntry) -> None:
        """A shuffled shard, made from the stage of that checksum."""
        content = msgspec.json.encode({"stage": stage, "entry": entry})
        write_file(self._gathered, f"{bounds[0]}-{bounds[1]}.json", [content])

    def gathered(self, stage: str) -> dict[tuple[int, int], ShardEntry]:
        """Shuffled shards that were written from the stage of that checksum."""
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
        self._discard()
        self._folder.remove_all()


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
        flat |= (
            {f"{name}.{key}": inner for key, inner in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
