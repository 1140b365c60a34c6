"""What is already in the output directory: a finished dataset, an unfinished build, both, or nothing.

To a new build, a finished dataset and the results of an unfinished build are the same: results of tasks that may still
hold. They count only if they were made with the same settings. Each result of an unfinished build is a separate file,
which is either complete or absent, so that any store can hold them (`format/workplace.py` has the rest of `.build`):

    .build/state.json                   the settings, and whether everything is being built again
    .build/results/<key>.json           the result of a task
    .build/gathered/<start>-<stop>.json a shuffled shard
    .build/stage/                       the records of a shuffled build in input order
    .build/stdin                        the content of standard input
    .build/parts/<number>-<count>       a part that is done, of a build that several machines share (`part.py`)

If the directory is in an object store, stage and standard input are in a temporary directory of this machine, unless
other machines need the stage as well.

Parts of a build work side by side without a lock. Each writes into a folder of its own, names what it has finished by
content, and notes it in files that others neither change nor remove. Only the first one, which finds nothing here,
needs the lock for a moment, so that what is begun is begun once.
"""

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import (
    BuildError,
    CorruptError,
    SettingsChangedError,
    SettingsError,
    UnfinishedBuildError,
)
from headrace.format.manifest import MANIFEST_NAME, Manifest, ShardEntry, read_manifest
from headrace.format.workplace import BUILD_STATE_NAME, COPY_STATE_NAME, NEW_NAME, Workplace
from headrace.ingest.differences import differences
from headrace.ingest.gather import stage_of
from headrace.ingest.part import Part
from headrace.ingest.results import TaskResult
from headrace.ingest.writer_notes import WriterNotes
from headrace.store.fetching import fetching
from headrace.store.store import Store, lock_in_turn, write_file

_STANDARD_INPUT_NAME = "stdin"
_LONGEST_WAIT_SECONDS = 180.0
"""Longer than the lease of a part that was killed at its beginning."""
_PARTS_SHOWN = 20
_READ_AT_ONCE = 1024


class Share(Enum):
    """How much of a build is carried out here."""

    ALL = "all"
    PART = "part"
    """Some of the tasks; others are carried out elsewhere, at the same time or another."""
    FINISH = "finish"
    """What comes after all tasks."""


class Site:
    """Owns the folder `.build` while the caller holds the lock of the store; a part shares it with other parts."""

    def __init__(
        self, out: Store, *, rebuild: bool, share: Share = Share.ALL, has_other_machines: bool = False
    ) -> None:
        self._share = share
        self._has_other_machines = has_other_machines or share is not Share.ALL
        new = f"part-{secrets.token_hex(8)}" if share is Share.PART else NEW_NAME
        self.out, self.work = out, Workplace(out, new)
        self._folder = self.work.folder
        self._results, self._gathered = self._folder.folder("results"), self._folder.folder("gathered")
        self._parts = self._folder.folder("parts")
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
        if not is_state:
            return None
        # A part may be at work that has not finished anything yet.
        return state if state.get("parts") or self._results.files() else None

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
        of all parts of the stage: from an object store, all of it would be fetched for each of them. If other machines
        take part, the stage must be where they see it, and is copied to each of them when it is complete."""
        is_elsewhere = self.out.is_remote and not self._has_other_machines
        return str(self._folder.scratch() / "stage") if is_elsewhere else ""

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
        if self._share is Share.PART:
            self._join(settings)
            return
        if self._share is Share.FINISH:
            self._refuse_without_parts()
            self._refuse_other_parts(settings)
        elif self._has_parts and not self._rebuild:
            self._refuse_unfinished_parts()
        self._begin(settings)

    @property
    def _has_parts(self) -> bool:
        return bool(self._state and self._state.get("parts"))

    def _refuse_unfinished_parts(self) -> None:
        if self.finished is None or self._results.files():
            raise UnfinishedBuildError(
                f"{self.out.name}: parts of a build were built here, and some may still be at work; complete it with "
                "finish=True when all parts are done, or use rebuild=True to discard them"
            )
        # Some were only run once more after the build was finished, and have found nothing to do.
        self.work.check_nobody_at_work()
        self._state = None

    def _refuse_other_parts(self, settings: Mapping[str, Any]) -> None:
        """Refuse what is not the build that parts have begun. Neither a part nor the end of a build ever discards what
        parts have done."""
        if not self._has_parts or self._state is None:
            return
        if different := differences(self._state["settings"], settings):
            raise SettingsChangedError(
                f"{self.out.name}: parts of a build are here with other settings: {'; '.join(different)}. Use the same "
                "settings for all parts and at the end, or remove the parts with `headrace clean`"
            )
        if self._rebuild and not self._state.get("rebuild"):
            raise UnfinishedBuildError(
                f"{self.out.name}: parts of a build without rebuild=True are here; complete it with finish=True and "
                "without rebuild=True, or remove the parts with `headrace clean`"
            )

    def _join(self, settings: Mapping[str, Any]) -> None:
        """Go on with a build that other parts have begun, or begin it for them."""
        if not self._is_begun(settings):
            with lock_in_turn(self.out, "a part of headrace build", _LONGEST_WAIT_SECONDS):
                self._state = self._read_state()
                if not self._is_begun(settings):
                    self._begin(settings)
        self.claim()

    def _is_begun(self, settings: Mapping[str, Any]) -> bool:
        """Whether parts are at work here already; a SettingsChangedError if they have other settings."""
        self._refuse_other_parts(settings)
        return self._has_parts

    def _refuse_without_parts(self) -> None:
        if not self._has_parts and not self.finished:
            raise BuildError(
                f"{self.out.name}: no part of a build was built here; build all parts with part='0/N' to "
                "part='N-1/N' first, and check that the output is the same"
            )

    def _begin(self, settings: Mapping[str, Any]) -> None:
        if self._has_parts and self._rebuild:
            self.work.check_nobody_at_work()
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
        for folder in (self._results, self._gathered, self._parts):
            folder.create()
        is_first_part = self._share is Share.PART and not self._has_parts
        if not self._state or is_first_part:
            # A part may go on with what an interrupted build without parts has done.
            begun = self._state or {"settings": dict(settings), "rebuild": self._rebuild}
            self._state = {**begun, "parts": True} if is_first_part else begun
            write_file(self._folder, BUILD_STATE_NAME, [json.dumps(self._state).encode()])

    def _discard(self) -> None:
        """Forget the unfinished build, but not the standard input that this run has just kept there."""
        if not self._folder.exists():
            return
        self.claim()
        self.work.discard()
        # Results first: without the settings beside them, nothing would say what they were made with.
        for folder in (self._results, self._gathered, self._parts, self.stage):
            folder.remove_all()
        self._writer.remove()
        for name in (COPY_STATE_NAME, BUILD_STATE_NAME):
            self._folder.remove(name)

    # Parts

    @contextlib.contextmanager
    def part_at_work(self, part: Part) -> Iterator[None]:
        """Note the part, and let others know that it is at work as long as this lasts."""
        write_file(self._parts, f"{part.number}-{part.count}", [b""])
        with self.work.at_work(f"part {part} of headrace build"):
            yield
            self.work.new.remove_all()

    def how_to_complete(self, tasks: Iterable[int]) -> str:
        """Which parts have not done these tasks, as far as the notes that parts make at their beginning tell."""
        counts = sorted({int(file.partition("-")[2]) for file in self._parts.files()})
        if len(counts) != 1:
            shown = " and ".join(map(str, counts)) or "unknown numbers"
            return f"they were divided into {shown} parts; run all parts of one number"
        count = counts[0]
        numbers = sorted({task % count for task in tasks})
        named = ", ".join(map(str, numbers[:_PARTS_SHOWN]))
        more = f" and {len(numbers) - _PARTS_SHOWN} more" if len(numbers) > _PARTS_SHOWN else ""
        return f"run {'part' if len(numbers) == 1 else 'parts'} {named}{more} of {count}"

    def refuse_other_inputs(self, paths: Iterable[str]) -> None:
        """Refuse to leave out what parts have built: an input that is not found, or a pattern that finds fewer."""
        built = {piece.path for result in self._unfinished_results for piece in result.slices}
        missing = sorted(built - set(paths))
        if missing:
            shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
            raise BuildError(
                f"{self.out.name}: parts were built from {len(missing):,} inputs that are not among those given now: "
                f"{shown}; give the same inputs, or remove the parts with `headrace clean` and build them again"
            )

    def check_under_way(self) -> None:
        """A BuildError if the build that a part belongs to was finished or discarded in the meantime."""
        if self._share is Share.PART and not self._folder.has(BUILD_STATE_NAME):
            self.work.new.remove_all()
            raise BuildError(
                f"{self.out.name}: the build that this part belongs to was finished or discarded in the meantime, so "
                "nothing is left to do here; look at it with `headrace inspect`"
            )

    # Results of tasks

    def keep(self, result: TaskResult) -> None:
        write_file(self._results, f"{result.key}.json", [msgspec.json.encode(result)])

    def known_results(self) -> dict[str, TaskResult]:
        """Results by the key of their task; those of the unfinished build replace those of the dataset."""
        found = (*self.finished_results(), *self._unfinished_results)
        return {result.key: result for result in found}

    @cached_property
    def _unfinished_results(self) -> list[TaskResult]:
        """Those that were there when this build first asked: each takes a request if they are in a bucket."""
        found = []
        for _, content in read_each(self._results):
            # A task whose result is damaged is run again.
            with contextlib.suppress(ValueError):
                found.append(msgspec.json.decode(content, type=TaskResult))
        return found

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
        for file, content in read_each(self._gathered):
            try:
                kept = msgspec.json.decode(content, type=_Gathered)
            except ValueError:
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


def read_each(folder: Store) -> Iterator[tuple[str, bytes]]:
    """All files of a folder that can be read, with their contents. There may be one for each task of a large build, so
    those of a remote store are read many at a time."""
    at_once = _READ_AT_ONCE if folder.is_remote else 1
    files = folder.files()
    for first in range(0, len(files), at_once):
        some = files[first : first + at_once]
        contents = fetching().urgent([partial(_read_if_possible, folder, file) for file in some])
        yield from (
            (file, content) for file, content in zip(some, contents, strict=True) if content is not None
        )


def _read_if_possible(folder: Store, file: str) -> bytes | None:
    """None for a file that is gone or damaged: what it says is found out again. A server may be back soon."""
    try:
        return folder.read(file)
    except FileNotFoundError:
        return None
    except OSError:
        if folder.is_remote:
            raise
        return None
