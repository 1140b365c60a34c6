"""Carries out a plan: leaves out what is there already, runs the rest in worker processes, shuffles if asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import BuildError
from headrace.format.finish import finish_dataset
from headrace.format.manifest import Manifest, ShardEntry
from headrace.ingest.engine import Crew, Outcome
from headrace.ingest.gather import shuffled_ranges
from headrace.ingest.plan import Task
from headrace.ingest.report import OnProgress, Tally
from headrace.ingest.site import Site
from headrace.ingest.task import Result, Workbench, all_there, fingerprint_of, task_key, too_many
from headrace.readers.reader import reader_for
from headrace.store.local import remove_leftovers
from headrace.tokenizers.parity import SAMPLE_BYTES, choose_encoder


@dataclass(frozen=True)
class Made:
    """What a run gave: the tasks' results in the plan's order, and the dataset's shards in theirs."""

    results: Sequence[Result]
    shards: Sequence[ShardEntry]
    reused: int
    encoder_name: str | None = None


def run_plan(
    tasks: Sequence[Task],
    site: Site,
    bench: Workbench,
    *,
    shuffle_seed: int | None,
    workers: int,
    progress: OnProgress,
) -> Made:
    """Every task's result, in the directory of `site`, whose lock the caller holds."""
    with Crew(min(workers, len(tasks)), _modules(tasks, bench)) as crew:
        run = _Run(site, bench, crew, progress)
        if shuffle_seed is not None:
            return run.shuffled(tasks, shuffle_seed)
        results, reused = run.tasks(tasks, bench)
        return Made(results, _shards(results), reused, run.encoder_name)


def _modules(tasks: Sequence[Task], bench: Workbench) -> list[str]:
    """What the workers will need and takes long to import."""
    formats = sorted({piece.format.value for task in tasks for piece in task.slices})
    encoders = ["awkward", "gigatoken"] if bench.definition and bench.definition.kind != "bytes" else []
    return [*(f"headrace.readers.{name}" for name in formats), *encoders]


class _Run:
    def __init__(self, site: Site, bench: Workbench, crew: Crew, progress: OnProgress) -> None:
        self._site, self._bench, self._crew, self._progress = site, bench, crew, progress
        self.encoder_name: str | None = None

    def tasks(self, tasks: Sequence[Task], bench: Workbench) -> tuple[list[Result], int]:
        """Every task's result, in the plan's order, and how many were there already."""
        results = self._results_that_hold(tasks, bench)
        left = [number for number in range(len(tasks)) if number not in results]
        reused = len(results)
        bad = sum(result.bad_count for result in results.values())
        if bad > bench.max_bad_records:
            latest = next(result.bad[-1] for result in results.values() if result.bad)
            raise too_many(bad, bench.max_bad_records, latest)
        size = sum(tasks[number].input_bytes for number in left)
        tally = Tally("reading", size, len(left), self._progress, tokens=bench.definition is not None)
        journal = self._site.journal()

        def outcome(job: int, message: dict[str, Any]) -> None:
            nonlocal bad
            journal.append(message)
            result = results[left[job]] = Result.from_json(message["result"])
            bad += result.bad_count
            tally.finish_task()
            if bad > bench.max_bad_records:
                raise too_many(bad, bench.max_bad_records, result.bad[-1])

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

    def _results_that_hold(self, tasks: Sequence[Task], bench: Workbench) -> dict[int, Result]:
        """Results from before, each checked against the input as it is now."""
        known = self._site.known_results()
        keys = [task_key(task.slices) for task in tasks]
        candidates = [number for number, key in enumerate(keys) if key in known]
        size = sum(tasks[number].input_bytes for number in candidates)
        tally = Tally("checking", size, len(candidates), self._progress)
        holding: dict[int, Result] = {}

        def outcome(job: int, message: dict[str, Any]) -> None:
            number = candidates[job]
            if message["holds"]:
                holding[number] = known[keys[number]]
            tally.advance([tasks[number].input_bytes, 0, 0])
            tally.finish_task()

        self._run([{"check": known[keys[number]].to_json()} for number in candidates], bench, outcome, tally)
        return holding

    def _run(self, jobs: list[dict[str, Any]], bench: Workbench, outcome: Outcome, tally: Tally) -> None:
        self._crew.run(
            jobs,
            bench,
            encoder_name=self.encoder_name or "",
            definition_file=self._definition_file(),
            outcome=outcome,
            advance=tally.advance,
        )

    def _definition_file(self) -> Path | None:
        """Worker processes read the tokenizer from the build's folder."""
        definition = self._bench.definition
        if definition is None or not definition.content:
            return None
        path = self._site.folder / "tokenizer.json"
        path.write_bytes(definition.content)
        return path

    def _with_encoder(self, tasks: Sequence[Task], bench: Workbench) -> Workbench:
        if bench.definition is None:
            return bench
        spread = [tasks[0], tasks[len(tasks) // 2], tasks[-1]]
        documents = [text for task in spread for text in _sample(task, bench, SAMPLE_BYTES // 3)]
        encoder, self.encoder_name = choose_encoder(bench.definition, documents)
        return replace(bench, encoder=encoder)

    def shuffled(self, tasks: Sequence[Task], seed: int) -> Made:
        """Build in input order in a folder of its own, then write the records in the order of the permutation."""
        if self._site.finished:
            return self._unchanged(tasks, self._site.finished)
        stage = self._site.folder / "stage"
        stage.mkdir(exist_ok=True)
        remove_leftovers(stage)
        results, reused = self.tasks(tasks, replace(self._bench, directory=stage))
        shards = _shards(results)
        staged = finish_dataset(stage, self._bench.fields, shards, "stage")
        payload = sum(shard.stored.bytes for shard in shards)
        ranges = shuffled_ranges(staged.records, payload, self._bench.largest_shard_bytes // 4)
        entries = self._gather(stage, staged.checksum, ranges, seed, payload)
        # The stage goes; what is kept of the results is what they were made from.
        return Made([replace(result, shards=()) for result in results], entries, reused, self.encoder_name)

    def _gather(
        self, stage: Path, checksum: str, ranges: list[tuple[int, int]], seed: int, payload: int
    ) -> list[ShardEntry]:
        known = {
            bounds: ShardEntry.from_json(entry) for bounds, entry in self._site.gathered(checksum).items()
        }
        entries = {bounds: e for bounds, e in known.items() if all_there(self._bench.directory, [e])}
        left = [bounds for bounds in ranges if bounds not in entries]
        jobs = [{"gather": list(bounds), "stage": str(stage), "seed": seed} for bounds in left]
        journal = self._site.journal()
        tally = Tally("shuffling", payload * len(left) // len(ranges), len(left), self._progress)

        def outcome(job: int, message: dict[str, Any]) -> None:
            journal.append({"gather": list(left[job]), "stage": checksum, **message})
            entries[left[job]] = ShardEntry.from_json(message["entry"])
            tally.advance([entries[left[job]].stored.bytes, 0, 0])
            tally.finish_task()

        try:
            self._run(jobs, self._bench, outcome, tally)
        finally:
            journal.close()
        return [entries[bounds] for bounds in ranges]

    def _unchanged(self, tasks: Sequence[Task], finished: Manifest) -> Made:
        before = list(self._site.finished_results())
        now = [[fingerprint_of(piece, self._bench) for piece in task.slices] for task in tasks]
        same = [task_key(task.slices) for task in tasks] == [result.key for result in before]
        if not same or now != [list(result.fingerprints) for result in before]:
            self._site.clear()
            raise BuildError(
                f"{self._site.out}: inputs have changed, and a shuffled dataset is shuffled as a whole; "
                "use --rebuild to build all of it anew"
            )
        return Made(before, finished.shards, len(before))


def _shards(results: Sequence[Result]) -> list[ShardEntry]:
    return [shard for result in results for shard in result.shards if shard.records]


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
