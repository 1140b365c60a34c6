"""What is already in the output directory: a finished dataset, an unfinished build, both or nothing.

A finished dataset and the journal of an unfinished build are the same to a new build: results of tasks that
may still hold. They count only if they were made with the same settings.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import CorruptError, SettingsChangedError, SettingsError
from headrace.format.manifest import BUILD_NAME, MANIFEST_NAME, Manifest, read_manifest
from headrace.ingest.journal import Journal, read_journal
from headrace.ingest.task import Result
from headrace.store.local import write_atomic

STANDARD_INPUT_NAME = "stdin"


class Site:
    """Owns `<out>/.build` while the directory's lock is held."""

    def __init__(self, out: Path, *, rebuild: bool) -> None:
        self.out, self.folder = out, out / BUILD_NAME
        self._rebuild = rebuild
        self._state = self._read_state()
        self._finished = self._read_finished()

    def _read_state(self) -> dict[str, Any] | None:
        try:
            state = json.loads((self.folder / "state.json").read_bytes())
            return state if isinstance(state, dict) and isinstance(state.get("settings"), dict) else None
        except (OSError, ValueError):
            return None

    def _read_finished(self) -> Manifest | None:
        if not (self.out / MANIFEST_NAME).exists():
            return None
        try:
            manifest = read_manifest(self.out)
        except CorruptError:
            if self._rebuild:
                return None
            raise
        if manifest.settings is None and not self._rebuild:
            raise SettingsError(
                f"{self.out}: holds a dataset that was not made by a build; choose another directory, or --rebuild"
            )
        return manifest

    @property
    def standard_input(self) -> Path:
        """Where standard input is kept while it is built from."""
        return self.folder / STANDARD_INPUT_NAME

    @property
    def shard_bytes(self) -> int | None:
        """What was chosen here before, so that a growing input does not change how it is cut."""
        if self._rebuild:
            return None
        settings = (
            (self._state or {}).get("settings") or (self._finished.settings if self._finished else None) or {}
        )
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
            if not self._rebuild and self._has_results():
                raise _changed(self.out, "an unfinished build is here", self._state["settings"], settings)
            self._state = None
            self._discard()
        if self.finished and self.finished.settings != settings:
            raise _changed(self.out, "the dataset was built", self.finished.settings or {}, settings)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._state:
            self._state = {"settings": dict(settings), "rebuild": self._rebuild}
            write_atomic(self.folder / "state.json", [json.dumps(self._state).encode()])

    def _has_results(self) -> bool:
        """Whether the unfinished build has finished any of its parts."""
        return any(True for _ in read_journal(self.folder / "journal.jsonl"))

    def _discard(self) -> None:
        """Forget the unfinished build, but not the standard input that this run has just kept there."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != STANDARD_INPUT_NAME:
                path.unlink()

    def known_results(self) -> dict[str, Result]:
        """Results by the key of their task; the journal's are newer than the dataset's."""
        known = {result.key: result for result in self.finished_results()}
        for entry in read_journal(self.folder / "journal.jsonl"):
            if "result" in entry:
                result = Result.from_json(entry["result"])
                known[result.key] = result
        return known

    def finished_results(self) -> Iterator[Result]:
        if self.finished and self.finished.provenance:
            try:
                provenance = json.loads((self.out / self.finished.provenance.file).read_bytes())
                yield from (Result.from_json(entry) for entry in provenance["tasks"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CorruptError(
                    f"{self.out}: damaged provenance ({error}); use --rebuild to build anew"
                ) from None

    def finished_inputs(self) -> dict[str, str]:
        """Path -> fingerprint of the inputs that the finished dataset was made from."""
        if not (self.finished and self.finished.provenance):
            return {}
        provenance = json.loads((self.out / self.finished.provenance.file).read_bytes())
        return {entry["path"]: entry["fingerprint"] for entry in provenance["inputs"]}

    def gathered(self, stage: str) -> dict[tuple[int, int], dict[str, Any]]:
        """Shuffled shards already written from the stage of that checksum."""
        entries = (
            entry for entry in read_journal(self.folder / "journal.jsonl") if entry.get("stage") == stage
        )
        return {(entry["gather"][0], entry["gather"][1]): entry["entry"] for entry in entries}

    def journal(self) -> Journal:
        return Journal(self.folder / "journal.jsonl")

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _changed(out: Path, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> SettingsChangedError:
    old, new = _flat(old), _flat(new)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    differences = "; ".join(
        f"{name} was {_short(old.get(name))}, is now {_short(new.get(name))}" for name in names
    )
    return SettingsChangedError(
        f"{out}: {what} with other settings: {differences}. Use --rebuild to build all of it anew, "
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
