"""Carries out a plan: leaves out what is already there, runs the rest on an engine, and shuffles if asked to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from headrace.errors import BuildError
from headrace.format.finish import finish_dataset
from headrace.format.manifest import Manifest, ShardEntry
from headrace.ingest.engine import Engine, EngineChoice, EngineKind
from headrace.ingest.gather import shuffled_ranges
from headrace.ingest.jobs import (
    CheckResult,
    ForgetStage,
    GatherShard,
    Job,
    Outcome,
    ResultChecked,
    RunTask,
    ShardGathered,
    TaskDone,
)
from headrace.ingest.local_engine import LocalEngine
from headrace.ingest.plan import BuildTask
from headrace.ingest.report import OnProgress, ProgressTally
from headrace.ingest.results import TaskResult, task_key, too_many
from headrace.ingest.site import Site
from headrace.ingest.task import TaskSettings, all_there, fingerprints_of
from headrace.observe.host import useful_cores
from headrace.readers.reader import ReadOptions, reader_for
from headrace.store.store import Store
from headrace.tokenizers.parity import SAMPLE_BYTES, choose_encoder

_Kind = TypeVar("_Kind", TaskDone, ResultChecked, ShardGathered)


@dataclass(frozen=True)
class Made:
    """What a run produced: the tasks' results in the order of the plan, and the dataset's shards in their own."""

    results: Sequence[TaskResult]
    shards: Sequence[ShardEntry]
    reused: int
    encoder_name: str | None = None


def run_plan(
    tasks: Sequence[BuildTask],
    site: Site,
    settings: TaskSettings,
    *,
    shuffle_seed: int | None,
    engine: EngineChoice,
    progress: OnProgress,
    only_finish: bool = False,
) -> Made:
    """Run every task in the store of `site`, whose lock the caller holds. With `only_finish`, all of them must have
    been run before, as parts."""
    with _open_engine(engine, tasks, settings) as opened:
        run = _PlanRun(site, settings, opened, progress, only_finish)
        if shuffle_seed is not None:
            return run.shuffled(tasks, shuffle_seed)
        results, reused = run.tasks(tasks, site.out, site.work.new)
        return Made(results, _shards(results), reused, run.encoder_name)


def run_part(
    tasks: Sequence[BuildTask],
    site: Site,
    settings: TaskSettings,
    *,
    is_shuffled: bool,
    engine: EngineChoice,
    progress: OnProgress,
) -> Made:
    """Run the tasks of one part of a build, beside other parts."""
    with _open_engine(engine, tasks, settings) as opened:
        run = _PlanRun(site, settings, opened, progress)
        store, new = site.out, site.work.new
        if is_shuffled:
            store = new = site.stage
            store.create()
        results, reused = run.tasks(tasks, store, new)
        return Made(results, _shards(results), reused, run.encoder_name)


def _open_engine(choice: EngineChoice, tasks: Sequence[BuildTask], settings: TaskSettings) -> Engine:
    if choice.kind is EngineKind.LOCAL:
        workers = min(choice.workers or max(1, int(useful_cores())), len(tasks))
        return LocalEngine(workers, _modules(tasks, settings))
    from headrace.ingest.ray_engine import RayEngine

    return RayEngine(choice.address, choice.workers)


def _modules(tasks: Sequence[BuildTask], settings: TaskSettings) -> list[str]:
    """The modules that the workers will need and that take long to import."""
    formats = sorted({piece.format.value for task in tasks for piece in task.slices})
    needs_encoder = settings.definition and settings.definition.kind != "bytes"
    encoders = ["awkward", "gigatoken"] if needs_encoder else []
    return [*(f"headrace.readers.{name}" for name in formats), *encoders]


class _PlanRun:
    def __init__(
        self,
        site: Site,
        settings: TaskSettings,
        engine: Engine,
        progress: OnProgress,
        only_finish: bool = False,
    ) -> None:
        self._site, self._settings, self._engine, self._progress = site, settings, engine, progress
        self._only_finish = only_finish
        self.encoder_name: str | None = None

    def tasks(self, tasks: Sequence[BuildTask], store: Store, new: Store) -> tuple[list[TaskResult], int]:
        """Every task's result, in the order of the plan, and how many of them were already there. The shards are in
        `store`; tasks write theirs to `new`, and from there they are moved."""
        known = self._results_that_hold(tasks, store)
        bad = _BadTally(self._settings.max_bad_records)
        bad.add(list(known.values()))
        left = [number for number in range(len(tasks)) if number not in known]
        results = dict(known)
        if left and self._only_finish:
            raise BuildError(
                f"{self._site.out.name}: {len(left):,} of {len(tasks):,} tasks are not done, or their inputs have "
                f"changed since; {self._site.how_to_complete(left)}, and then finish"
            )
        if left and store is new and self._site.finished:
            # In the stage of a shuffled dataset, which is gone since it was finished.
            raise self._cannot_be_extended()
        if left:
            self._site.check_under_way()
            # Only now that there is something to write; otherwise the version before stays as it is.
            self._site.work.drop_previous()
            to_run = [tasks[number] for number in left]
            made = self._run_tasks(to_run, store, new, bad)
            results |= {number: made[job] for job, number in enumerate(left)}
        return [results[number] for number in range(len(tasks))], len(known)

    def _run_tasks(
        self, tasks: Sequence[BuildTask], store: Store, new: Store, bad: "_BadTally"
    ) -> dict[int, TaskResult]:
        """Run tasks that have no result yet; each result is kept for the next build as soon as it is there."""
        size = sum(task.input_bytes for task in tasks)
        settings = self._with_encoder(tasks, replace(self._settings, out=new.name))
        tally = ProgressTally(
            "reading", size, len(tasks), self._progress, tokens=settings.definition is not None
        )
        results: dict[int, TaskResult] = {}

        def outcome(job: int, done: TaskDone) -> None:
            result = _without_empty_shards(done.result)
            self._site.check_under_way()
            if new is not store:
                self._site.work.adopt(shard.stored.file for shard in result.shards)
            self._site.keep(result)
            results[job] = result
            tally.finish_task()
            bad.add([result])

        self._run([RunTask(task) for task in tasks], settings, new, TaskDone, outcome, tally)
        return results

    def _results_that_hold(self, tasks: Sequence[BuildTask], store: Store) -> dict[int, TaskResult]:
        """The results of earlier builds that still hold, by the number of their task."""
        settings = replace(self._settings, out=store.name)
        known = self._site.known_results()
        keys = [task_key(task.slices) for task in tasks]
        candidates = [number for number, key in enumerate(keys) if key in known]
        size = sum(tasks[number].input_bytes for number in candidates)
        tally = ProgressTally("checking", size, len(candidates), self._progress)
        holding: dict[int, TaskResult] = {}

        def outcome(job: int, done: ResultChecked) -> None:
            number = candidates[job]
            if done.holds:
                holding[number] = known[keys[number]]
            tally.advance(tasks[number].input_bytes)
            tally.finish_task()

        jobs = [CheckResult(tasks[number], known[keys[number]]) for number in candidates]
        self._run(jobs, settings, store, ResultChecked, outcome, tally)
        return holding

    def _run(
        self,
        jobs: Sequence[Job],
        settings: TaskSettings,
        store: Store,
        kind: type[_Kind],
        outcome: Callable[[int, _Kind], None],
        tally: ProgressTally,
    ) -> None:
        """Run jobs whose outcomes are all of one kind."""

        def checked(job: int, done: Outcome) -> None:
            if not isinstance(done, kind):
                found = type(done).__name__
                raise BuildError(
                    f"the engine gave a {found} for a {type(jobs[job]).__name__}, not a {kind.__name__}"
                )
            outcome(job, done)

        self._engine.run(
            jobs,
            settings,
            store,
            outcome=checked,
            advance=lambda told: tally.advance(told.input_bytes, told.records, told.elements),
        )

    def _with_encoder(self, tasks: Sequence[BuildTask], settings: TaskSettings) -> TaskSettings:
        if settings.definition is None:
            return settings
        spread = [tasks[0], tasks[len(tasks) // 2], tasks[-1]]
        documents = [text for task in spread for text in _sample(task, settings, SAMPLE_BYTES // 3)]
        _, self.encoder_name = choose_encoder(settings.definition, documents)
        return replace(settings, encoder=self.encoder_name)

    def shuffled(self, tasks: Sequence[BuildTask], seed: int) -> Made:
        """Build in input order in a separate folder, then write the records in the order of the permutation."""
        if self._site.finished:
            return self._unchanged(tasks, self._site.finished)
        stage = self._site.stage
        stage.create()
        if not self._only_finish:
            stage.remove_leftovers()
        results, reused = self.tasks(tasks, stage, stage)
        shards = _shards(results)
        staged = finish_dataset(stage, self._settings.fields, shards, "stage")
        payload = sum(shard.stored.bytes for shard in shards)
        ranges = shuffled_ranges(staged.records, payload, self._settings.largest_shard_bytes // 4)
        entries = self._gather(staged.checksum, ranges, seed, payload)
        # The shards of the stage are deleted; a result keeps only what it was made from.
        without_shards = [replace(result, shards=()) for result in results]
        return Made(without_shards, entries, reused, self.encoder_name)

    def _gather(
        self, checksum: str, ranges: list[tuple[int, int]], seed: int, payload: int
    ) -> list[ShardEntry]:
        out = self._site.out
        known = self._site.gathered(checksum)
        entries = {bounds: entry for bounds, entry in known.items() if all_there(out, [entry])}
        left = [bounds for bounds in ranges if bounds not in entries]
        tally = ProgressTally("shuffling", payload * len(left) // len(ranges), len(left), self._progress)

        def outcome(job: int, done: ShardGathered) -> None:
            self._site.work.adopt([done.entry.stored.file])
            self._site.keep_gathered(checksum, left[job], done.entry)
            entries[left[job]] = done.entry
            tally.advance(done.entry.stored.bytes)
            tally.finish_task()

        jobs = [GatherShard(start, stop, seed) for start, stop in left]
        try:
            self._run(jobs, self._settings, out, ShardGathered, outcome, tally)
        finally:
            self._engine.run_on_each_machine(ForgetStage(), self._settings, out)
        return [entries[bounds] for bounds in ranges]

    def _unchanged(self, tasks: Sequence[BuildTask], finished: Manifest) -> Made:
        before = list(self._site.finished_results())
        content_now = [fingerprints_of(task) for task in tasks]
        content_before = [list(result.fingerprints) for result in before]
        same_plan = [task_key(task.slices) for task in tasks] == [result.key for result in before]
        if not same_plan or content_now != content_before:
            self._site.clear()
            raise self._cannot_be_extended()
        return Made(before, finished.shards, len(before))

    def _cannot_be_extended(self) -> BuildError:
        return BuildError(
            f"{self._site.out.name}: the inputs have changed, and a shuffled dataset can only be shuffled as a whole; "
            "use rebuild=True to build all of it again"
        )


class _BadTally:
    """Counts the bad records of all tasks, and raises an error when there are more than allowed."""

    def __init__(self, allowed: int) -> None:
        self._allowed, self._count = allowed, 0

    def add(self, results: Sequence[TaskResult]) -> None:
        self._count += sum(result.bad_count for result in results)
        if self._count > self._allowed:
            latest = next(result.bad[-1] for result in results if result.bad)
            raise too_many(self._count, self._allowed, latest)


def _shards(results: Sequence[TaskResult]) -> list[ShardEntry]:
    return [shard for result in results for shard in result.shards]


def _without_empty_shards(result: TaskResult) -> TaskResult:
    """A task without records writes an empty shard, which no dataset holds and no later build would find."""
    return replace(result, shards=[shard for shard in result.shards if shard.records])


def _sample(task: BuildTask, settings: TaskSettings, most_bytes: int) -> list[bytes]:
    """Some of a task's documents, to check that the fast encoder is right."""
    documents: list[bytes] = []
    for text in _texts_of(task, replace(settings.options, block_bytes=most_bytes)):
        # A character that is cut in half is left out: any text will do.
        documents.append(text[:most_bytes].decode(errors="ignore").encode())
        most_bytes -= len(documents[-1])
        if most_bytes <= 0:
            break
    return documents


def _texts_of(task: BuildTask, options: ReadOptions) -> Iterator[bytes]:
    for piece, file in zip(task.slices, task.files, strict=True):
        reader = reader_for(piece.format)
        for block in reader.read(file.raw(), piece.start, piece.stop, options, lambda *_: None):
            texts = next(iter(block.columns.values()))
            for number in range(len(texts)):
                text = texts[number]
                if isinstance(text, bytes):
                    yield text
