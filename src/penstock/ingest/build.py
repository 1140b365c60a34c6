"""`penstock.build`: plan, leave out what is already there, run the rest, and write the manifest last."""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import BuildError, FieldError, SettingsError
from penstock.format.checksum import checksum
from penstock.format.fields import Field
from penstock.format.finish import finish_dataset, remove_strays, store_document
from penstock.format.manifest import Manifest, ShardEntry
from penstock.ingest.engine import run_jobs
from penstock.ingest.gather import shuffled_ranges
from penstock.ingest.inputs import STANDARD_INPUT, InputFile, find_inputs
from penstock.ingest.plan import Task, make_plan
from penstock.ingest.readers.reader import InputFormat, ReadOptions, reader_for
from penstock.ingest.report import BuildReport, OnProgress, Progress
from penstock.ingest.settings import BuildSettings, automatic_shard_bytes
from penstock.ingest.site import Site
from penstock.ingest.task import Result, Workbench, task_key, token_fields, too_many
from penstock.ingest.tokenizers.definition import Definition
from penstock.ingest.tokenizers.find import find_tokenizer
from penstock.ingest.tokenizers.parity import SAMPLE_BYTES, choose_encoder
from penstock.store.local import directory_lock, remove_leftovers

_LARGEST_SHARD_BYTES = 256 * 2**20


def build(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    text_field: str | None = None,
    columns: Sequence[str] | None = None,
    format: str | None = None,
    include: Sequence[str] = (),
    split: str = "file",
    separator: str = "",
    eos: str | bool | None = None,
    bos: str | bool | None = None,
    allow_special: bool = False,
    shuffle: bool = False,
    seed: int = 0,
    shard_bytes: int | None = None,
    workers: int | None = None,
    max_bad_records: int = 0,
    rebuild: bool = False,
    progress: OnProgress | None = None,
) -> BuildReport:
    """Turn raw data into a dataset in the directory `out`; see `docs/build.md` for each argument.

    Run it again to continue a build that was cut off, or to bring the dataset up to date with its inputs.
    """
    started = time.monotonic()
    settings = BuildSettings(
        text_field=text_field,
        columns=tuple(columns) if columns is not None else None,
        format=InputFormat(format) if format in tuple(InputFormat) else format,  # type: ignore[arg-type]
        split=split,  # type: ignore[arg-type]
        separator=separator,
        shuffle_seed=seed if shuffle else None,
        shard_bytes=shard_bytes,
    )
    if max_bad_records < 0:
        raise SettingsError(f"max_bad_records={max_bad_records}: must be 0 or more")
    count = _available_cores() if workers is None else workers
    if count < 1:
        raise SettingsError(f"workers={workers}: must be at least 1")
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    target = Path(out)
    from_disk = [name for name in given if os.fspath(name) != STANDARD_INPUT]
    files = find_inputs(from_disk, out=target, format=settings.format, include=include) if from_disk else []
    kinds = {file.format for file in files} | (
        {settings.format or InputFormat.TEXT} if len(from_disk) < len(given) else set()
    )
    definition = _definition(settings, kinds, tokenizer, eos, bos, allow_special)
    if target.exists() and not target.is_dir():
        raise SettingsError(f"out={str(target)!r}: is a file; name a directory")
    target.mkdir(parents=True, exist_ok=True)
    with directory_lock(target, "penstock build"):
        remove_leftovers(target)
        site = Site(target, rebuild=rebuild)
        run = _Run(site, settings, definition, count, max_bad_records, progress or (lambda _: None))
        if len(from_disk) < len(given):
            files = sorted([*files, run.keep_standard_input(settings.format or InputFormat.TEXT)])
        return run.build(files, started)


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _definition(
    settings: BuildSettings,
    kinds: set[InputFormat],
    tokenizer: Any,
    eos: str | bool | None,
    bos: str | bool | None,
    allow_special: bool,
) -> Definition | None:
    """The tokenizer, or None for a dataset of records: tables without a tokenizer and without a text field."""
    if tokenizer is None and settings.text_field is None and kinds and InputFormat.TEXT not in kinds:
        if eos or bos or allow_special:
            raise SettingsError("eos, bos and allow_special belong to a tokenizer, and none was given")
        return None
    if settings.columns is not None:
        raise SettingsError(
            "columns are for datasets of records; with a tokenizer, text_field names the one column"
        )
    if tokenizer is None and kinds != {InputFormat.TEXT} and settings.text_field is None:
        raise SettingsError(
            "text files and tables together: name a tokenizer and a text_field, or build two datasets"
        )
    return find_tokenizer(
        "bytes" if tokenizer is None else tokenizer, eos=eos, bos=bos, allow_special=allow_special
    )


class _Run:
    """One run of a build, in the directory of `site`, whose lock the caller holds."""

    def __init__(
        self,
        site: Site,
        settings: BuildSettings,
        definition: Definition | None,
        workers: int,
        max_bad_records: int,
        progress: OnProgress,
    ) -> None:
        self._site, self._settings, self._definition = site, settings, definition
        self._workers, self._max_bad_records, self._progress = workers, max_bad_records, progress
        self._standard_input: Path | None = None
        self._encoder_name: str | None = None

    def keep_standard_input(self, format: InputFormat) -> InputFile:
        """Standard input can be read once, and a build cuts its inputs: keep it in a file until the end."""
        self._site.folder.mkdir(parents=True, exist_ok=True)
        self._standard_input = self._site.folder / "stdin"
        with open(self._standard_input, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
            return InputFile(STANDARD_INPUT, format, file.tell())

    def build(self, files: list[InputFile], started: float) -> BuildReport:
        settings = self._settings
        total = sum(file.bytes for file in files)
        shard_bytes = settings.shard_bytes or self._site.shard_bytes or automatic_shard_bytes(total)
        settings = replace(settings, shard_bytes=shard_bytes)
        fields, options = self._fields(files[0])
        bench = Workbench(
            directory=self._site.out,
            fields=fields,
            options=options,
            largest_shard_bytes=min(4 * shard_bytes, _LARGEST_SHARD_BYTES),
            max_bad_records=self._max_bad_records,
            definition=self._definition,
            standard_input=self._standard_input,
        )
        described = {
            **settings.to_json(),
            "fields": {name: field.notation for name, field in fields.items()},
            "tokenizer": {**self._definition.to_json(), "fingerprint": self._definition.fingerprint}
            if self._definition
            else None,
        }
        self._site.begin(described)
        tasks = list(make_plan(files, shard_bytes, options, bench.locate))
        if settings.shuffle_seed is None:
            results, reused = self._run_tasks(tasks, bench)
            shards = [shard for result in results for shard in result.shards if shard.records]
        else:
            results, reused, shards = self._shuffled(tasks, bench, settings.shuffle_seed)
        if not any(shard.records for shard in shards):
            if not self._site.finished:
                self._site.clear()
            raise BuildError(f"no documents in {len(files)} inputs ({total:,} bytes): nothing to build")
        return self._finish(files, fields, described, results, shards, reused, started)

    def _fields(self, first: InputFile) -> tuple[dict[str, Field], ReadOptions]:
        settings = self._settings
        separator = settings.separator.encode()
        if self._definition:
            options = ReadOptions(
                text_field=settings.text_field or "text", split=settings.split, separator=separator
            )
            return token_fields(self._definition), options
        path = (
            self._standard_input
            if first.path == STANDARD_INPUT and self._standard_input
            else Path(first.path)
        )
        fields = reader_for(first.format).infer(path)
        if settings.columns is not None:
            missing = [name for name in settings.columns if name not in fields]
            if missing:
                raise FieldError(
                    f"{first.path}: no column {missing[0]!r}; there are {', '.join(map(repr, fields))}"
                )
            fields = {name: fields[name] for name in settings.columns}
        return fields, ReadOptions(fields=fields, split=settings.split, separator=separator)

    # Running

    def _run_tasks(self, tasks: list[Task], bench: Workbench) -> tuple[list[Result], int]:
        """Every task's result, in the plan's order, and how many were there already."""
        results = self._results_that_hold(tasks, bench)
        left = [number for number in range(len(tasks)) if number not in results]
        reused = len(results)
        bad = sum(result.bad_count for result in results.values())
        size = sum(tasks[number].input_bytes for number in left)
        tally = _Tally("reading", size, len(left), self._progress, tokens=self._definition is not None)
        journal = self._site.journal()

        def outcome(job: int, message: dict[str, Any]) -> None:
            nonlocal bad
            journal.append(message)
            result = results[left[job]] = Result.from_json(message["result"])
            bad += result.bad_count
            tally.finish_task()
            if bad > self._max_bad_records:
                raise too_many(bad, self._max_bad_records, result.bad[-1])

        jobs = [
            {
                "slices": [piece.to_json() for piece in tasks[number].slices],
                "input_bytes": tasks[number].input_bytes,
            }
            for number in left
        ]
        try:
            if jobs:
                self._run(jobs, self._with_encoder([tasks[number] for number in left], bench), outcome, tally)
        finally:
            journal.close()
        return [results[number] for number in range(len(tasks))], reused

    def _results_that_hold(self, tasks: list[Task], bench: Workbench) -> dict[int, Result]:
        """Results from before, each checked against the input as it is now."""
        known = self._site.known_results()
        keys = [task_key(task.slices) for task in tasks]
        candidates = [number for number, key in enumerate(keys) if key in known]
        size = sum(tasks[number].input_bytes for number in candidates)
        tally = _Tally("checking", size, len(candidates), self._progress)
        holding: dict[int, Result] = {}

        def outcome(job: int, message: dict[str, Any]) -> None:
            number = candidates[job]
            if message["holds"]:
                holding[number] = known[keys[number]]
            tally.advance([tasks[number].input_bytes, 0, 0])
            tally.finish_task()

        self._run([{"check": known[keys[number]].to_json()} for number in candidates], bench, outcome, tally)
        return holding

    def _run(self, jobs: list[dict[str, Any]], bench: Workbench, outcome: Any, tally: "_Tally") -> None:
        run_jobs(
            jobs,
            bench,
            workers=self._workers,
            encoder_name=self._encoder_name or "",
            definition_file=self._definition_file(),
            outcome=outcome,
            advance=tally.advance,
        )

    def _definition_file(self) -> Path | None:
        """Worker processes read the tokenizer from the build's folder."""
        if not self._definition or not self._definition.content:
            return None
        path = self._site.folder / "tokenizer.json"
        path.write_bytes(self._definition.content)
        return path

    def _with_encoder(self, tasks: Sequence[Task], bench: Workbench) -> Workbench:
        if not self._definition:
            return bench
        spread = [tasks[0], tasks[len(tasks) // 2], tasks[-1]] if tasks else []
        documents = [text for task in spread for text in _sample(task, bench, SAMPLE_BYTES // 3)]
        encoder, self._encoder_name = choose_encoder(self._definition, documents)
        return replace(bench, encoder=encoder)

    def _shuffled(
        self, tasks: list[Task], bench: Workbench, seed: int
    ) -> tuple[list[Result], int, list[ShardEntry]]:
        """Build in input order in a folder of its own, then write the records in the order of the permutation."""
        finished = self._site.finished
        if finished:
            return self._unchanged(tasks, bench, finished)
        stage = self._site.folder / "stage"
        stage.mkdir(exist_ok=True)
        remove_leftovers(stage)
        results, reused = self._run_tasks(tasks, replace(bench, directory=stage))
        shards = [shard for result in results for shard in result.shards if shard.records]
        staged = finish_dataset(stage, bench.fields, shards, "stage")
        payload = sum(shard.stored.bytes for shard in shards)
        ranges = shuffled_ranges(staged.records, payload, bench.largest_shard_bytes // 4)
        done = self._site.gathered(staged.checksum)
        entries = {bounds: ShardEntry.from_json(entry) for bounds, entry in done.items()}
        left = [bounds for bounds in ranges if bounds not in entries]
        jobs = [{"gather": list(bounds), "stage": str(stage), "seed": seed} for bounds in left]
        journal = self._site.journal()
        tally = _Tally("shuffling", payload, len(left), self._progress)

        def outcome(number: int, message: dict[str, Any]) -> None:
            entries[left[number]] = ShardEntry.from_json(message["entry"])
            journal.append(
                {"gather": list(left[number]), "stage": staged.checksum, "entry": message["entry"]}
            )
            tally.advance([entries[left[number]].stored.bytes, 0, 0])
            tally.finish_task()

        try:
            self._run(jobs, bench, outcome, tally)
        finally:
            journal.close()
        return (
            [replace(result, shards=()) for result in results],
            reused,
            [entries[bounds] for bounds in ranges],
        )

    def _unchanged(
        self, tasks: list[Task], bench: Workbench, finished: Manifest
    ) -> tuple[list[Result], int, list[ShardEntry]]:
        before = list(self._site.finished_results())
        now = [
            [reader_for(s.format).fingerprint(bench.locate(s.path), s.start, s.stop) for s in task.slices]
            for task in tasks
        ]
        same = [task_key(task.slices) for task in tasks] == [result.key for result in before]
        if not same or now != [list(result.fingerprints) for result in before]:
            self._site.clear()
            raise BuildError(
                f"{self._site.out}: inputs have changed, and a shuffled dataset is shuffled as a whole; "
                "use --rebuild to build all of it anew"
            )
        return before, len(before), list(finished.shards)

    # The end

    def _finish(
        self,
        files: list[InputFile],
        fields: Mapping[str, Field],
        settings: Mapping[str, Any],
        results: list[Result],
        shards: list[ShardEntry],
        reused: int,
        started: float,
    ) -> BuildReport:
        out = self._site.out
        before = self._site.finished_inputs()
        inputs = _describe_inputs(files, results)
        provenance = {"inputs": inputs, "tasks": [result.to_json() for result in results]}
        stored = store_document(out, "provenance", json.dumps(provenance, indent=0).encode())
        tokenizer = None
        if self._definition:
            tokenizer = dict(settings["tokenizer"])
            if self._definition.content:
                tokenizer["stored"] = vars(store_document(out, "tokenizer", self._definition.content))
        manifest = finish_dataset(
            out,
            fields,
            shards,
            f"penstock {penstock.__version__}",
            tokenizer=tokenizer,
            settings=settings,
            provenance=stored,
        )
        remove_strays(out, manifest)
        self._site.clear()
        after = {entry["path"]: entry["fingerprint"] for entry in inputs}
        return BuildReport(
            path=out,
            records=manifest.records,
            elements={name: sum(shard.elements[name] for shard in shards) for name in fields},
            shards=len(shards),
            bytes=sum(file.bytes for file in manifest.files),
            inputs=len(files),
            input_bytes=sum(file.bytes for file in files),
            added=len(after.keys() - before.keys()),
            changed=sum(before[path] != after[path] for path in after.keys() & before.keys()),
            removed=len(before.keys() - after.keys()),
            built=len(results) - reused,
            reused=reused,
            bad_count=sum(result.bad_count for result in results),
            bad=[record for result in results for record in result.bad],
            encoder=self._encoder_name,
            seconds=time.monotonic() - started,
        )


class _Tally:
    """Adds up what the tasks report and passes it on."""

    def __init__(
        self, stage: str, total_bytes: int, total_tasks: int, progress: OnProgress, *, tokens: bool = False
    ) -> None:
        self._progress = progress
        self._state = Progress(
            stage=stage,
            input_bytes=0,
            total_bytes=total_bytes,
            records=0,
            tokens=0 if tokens else None,
            finished_tasks=0,
            total_tasks=total_tasks,
        )
        progress(self._state)

    def advance(self, amounts: list[int]) -> None:
        input_bytes, records, elements = amounts
        now = self._state
        self._state = replace(
            now,
            input_bytes=now.input_bytes + input_bytes,
            records=now.records + records,
            tokens=None if now.tokens is None else now.tokens + elements,
        )
        self._progress(self._state)

    def finish_task(self) -> None:
        self._state = replace(self._state, finished_tasks=self._state.finished_tasks + 1)
        self._progress(self._state)


def _sample(task: Task, bench: Workbench, most_bytes: int) -> list[bytes]:
    """Some of a task's documents, for the check that the fast encoder is right."""
    options = replace(bench.options, block_bytes=most_bytes)
    documents: list[bytes] = []
    for piece in task.slices:
        path = bench.locate(piece.path)
        for block in reader_for(piece.format).read(path, piece.start, piece.stop, options, lambda *_: None):
            texts = next(iter(block.columns.values()))
            for number in range(len(texts)):
                text = texts[number]
                if isinstance(text, bytes):
                    # A cut in the middle of a character is mended: any text will do.
                    documents.append(text[:most_bytes].decode(errors="ignore").encode())
                    most_bytes -= len(documents[-1])
                if most_bytes <= 0:
                    return documents
    return documents


def _describe_inputs(files: Sequence[InputFile], results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each input with its size and a fingerprint of its whole content."""
    pieces: dict[str, list[tuple[int, str]]] = {file.path: [] for file in files}
    for result in results:
        for piece, digest in zip(result.slices, result.fingerprints, strict=True):
            pieces[piece.path].append((piece.start, digest))
    return [
        {
            "path": file.path,
            "format": file.format.value,
            "bytes": file.bytes,
            "fingerprint": checksum("".join(digest for _, digest in sorted(pieces[file.path])).encode()),
        }
        for file in files
    ]
