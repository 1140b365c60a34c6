"""`headrace.build`: plan, leave out what is already there, run the rest, and write the manifest last."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from headrace.checks import check_boolean, choice, whole_number
from headrace.errors import BuildError, HeadraceError, SettingsError
from headrace.format.fields import Field
from headrace.ingest.choose_tokenizer import TokenizerOptions, choose_tokenizer
from headrace.ingest.complete import DatasetDescription, complete, report_part
from headrace.ingest.differences import DEFAULT_TEXT_FIELD
from headrace.ingest.engine import EngineChoice, EngineKind
from headrace.ingest.part import Part, parse_part
from headrace.ingest.plan import BuildTask, make_plan
from headrace.ingest.report import BuildReport, OnProgress
from headrace.ingest.run import Made, run_part, run_plan
from headrace.ingest.settings import BuildSettings, automatic_shard_bytes, check_seed, parse_columns
from headrace.ingest.site import Share, Site
from headrace.ingest.task import TaskSettings, token_fields
from headrace.public import public
from headrace.readers.bounds import MAX_RECORD_BYTES
from headrace.readers.formats import InputFormat
from headrace.readers.found import check_text_field, find_fields
from headrace.readers.inputs import (
    STANDARD_INPUT,
    InputFile,
    Inputs,
    as_list,
    check_is_text,
    find_inputs,
)
from headrace.readers.raw_file import LocalRawFile
from headrace.readers.reader import ReadOptions
from headrace.store.address import open_output
from headrace.store.local import LocalStore
from headrace.store.memory import MemoryStore
from headrace.store.store import Store
from headrace.tokenizers.definition import Definition

_log = logging.getLogger(__name__)

INGEST_VERSION = 3
"""Increased when the same inputs and settings no longer give the same shards: then everything is built again."""

_LARGEST_SHARD_BYTES = 256 * 2**20


@public
def build(
    inputs: Inputs,
    out: str | os.PathLike[str] | Store,
    *,
    tokenizer: Any = None,
    text_field: str | None = None,
    columns: Sequence[str] | Mapping[str, str | None] | None = None,
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
    engine: str = "local",
    address: str | None = None,
    part: str | None = None,
    finish: bool = False,
    max_bad_records: int = 0,
    max_record_bytes: int = MAX_RECORD_BYTES,
    rebuild: bool = False,
    drop_previous: bool = False,
    progress: OnProgress | None = None,
) -> BuildReport:
    """Turn raw data into a dataset in the directory `out`.

    Run it again to continue a build that was interrupted, or to bring the dataset up to date with its inputs: only what
    has changed is built. The result does not depend on the number of workers, byte for byte.

    Args:
        inputs: Files, globs, directories, or "-" for standard input; one or several. Also addresses of objects,
            patterns and prefixes in object stores, like "s3://bucket/texts/*.jsonl".
        out: The directory of the dataset, which is created if it does not exist; or a store, or its address.
        tokenizer: "bytes", the path of a `tokenizer.json` or a `.tiktoken` file, the name of a tiktoken encoding, or a
            tokenizer object. Without one, text files become byte tokens and tables keep their columns as fields.
        text_field: The column or key that holds the text ("text" by default).
        columns: The columns to keep, as a list, or as a dict that also gives their types, like {"x": "float32"}.
        format: The format of all inputs, if it cannot be told from their names: "text", "jsonl", "csv", "parquet",
            "arrow" or "npy".
        include: Patterns of file names, such as "*.py": only the files that match are taken from directories and
            prefixes, and those of unknown format are read as text.
        split: What one document of a text file is: "file", "line" or "separator".
        separator: The text that ends a document, with split="separator".
        eos: The token that ends each document: its name, True for the tokenizer's own (the default), or False for none.
        bos: The token that begins each document: its name, or True for the tokenizer's own. By default there is none.
        allow_special: Whether special tokens that are written out in a text become special tokens. By default they stay
            plain text, so that a document cannot forge a boundary.
        shuffle: Whether to store the records in a random order. For an object store, this needs as much space on the
            local disk for temporary files (TMPDIR) as the dataset takes.
        seed: The seed of that order. Without `shuffle` it has no effect.
        shard_bytes: The approximate size of a shard. By default it depends on the size of the inputs.
        workers: The number of worker processes. By default, one for each core of this machine, or of the cluster.
        engine: What runs the build: "local", the processors of this machine, or "ray", a Ray cluster. Then the output
            must be where all machines of the cluster see it: on a shared disk, or in an object store.
        address: The address of the Ray cluster, like "10.0.0.1:6379" or "auto". By default the one that `RAY_ADDRESS`
            names; without it, Ray is started on this machine for the duration of the build.
        part: Build only one part, for batch schedulers: "3/16" is part 3 of 16, counted from 0. "auto" takes it from a
            Slurm array, and "auto/16" from the numbers of a Kubernetes Job or a Slurm array. Parts may run at the same
            time, in any order and more than once. Nothing is a dataset before `finish`.
        finish: Complete a build when all of its parts are done. Inputs and settings must be those of the parts.
        max_bad_records: How many unreadable records may be left out. If there are more, the build stops.
        max_record_bytes: The longest record that is read (128 MiB by default). A longer one counts as unreadable, so
            that a damaged or hostile file cannot fill the memory.
        rebuild: Build everything again, for example because settings have changed.
        drop_previous: Delete the files of the version before at once. By default they are kept for readers that have it
            open, until the next build that changes something.
        progress: A function that is called from time to time with a `Progress`.

    Returns:
        A `BuildReport`: the number of records and tokens, what was built, and what was left out.
    """
    started = time.monotonic()
    seed = check_seed(seed)
    settings = BuildSettings(
        text_field=text_field,
        columns=parse_columns(columns),
        format=format,  # type: ignore[arg-type]  # strings are parsed there
        split=split,  # type: ignore[arg-type]
        separator=separator,
        shuffle_seed=seed if shuffle else None,
        shard_bytes=shard_bytes,
    )
    max_bad_records = whole_number("max_bad_records", max_bad_records, 0)
    max_record_bytes = whole_number("max_record_bytes", max_record_bytes, 1)
    check_boolean("drop_previous", drop_previous)
    store = open_output(out)
    chosen = _choose_engine(engine, address, workers, store)
    own_part = _chosen_part(part, finish, inputs)
    run = _RunOptions(
        engine=chosen,
        part=own_part,
        finish=finish,
        max_bad_records=max_bad_records,
        max_record_bytes=max_record_bytes,
        drop_previous=drop_previous,
        progress=progress or _ignore_progress,
    )
    found = _find_given(inputs, store, settings.format, include)
    options = TokenizerOptions(tokenizer=tokenizer, eos=eos, bos=bos, allow_special=allow_special)
    definition = choose_tokenizer(settings, found.formats, options)
    _check_directory(store)
    store.create()
    share = Share.PART if own_part else Share.FINISH if finish else Share.ALL
    # Parts of a build work side by side.
    lock = nullcontext() if own_part else store.lock("headrace build")
    with lock:
        site = Site(
            store, rebuild=rebuild, share=share, has_other_machines=chosen.kind is not EngineKind.LOCAL
        )
        report = _build(site, settings, definition, found.with_standard_input(site), run)
    return replace(report, seconds=time.monotonic() - started)


@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    """How a build is carried out; none of this changes the dataset, apart from the bad records that are left out."""

    engine: EngineChoice
    part: Part | None
    finish: bool
    max_bad_records: int
    max_record_bytes: int
    drop_previous: bool
    progress: OnProgress


def _ignore_progress(_: Any) -> None:
    pass


def _choose_engine(engine: str, address: str | None, workers: int | None, store: Store) -> EngineChoice:
    kind = choice("engine", engine, EngineKind)
    if address is not None and kind is EngineKind.LOCAL:
        raise SettingsError(
            f"address={address!r}: is that of a cluster; add engine='ray', or leave address out"
        )
    count = None if workers is None else whole_number("workers", workers, 1)
    if isinstance(store, MemoryStore):
        # Only this process can write to a store that is in its memory.
        if kind is not EngineKind.LOCAL:
            raise SettingsError(f"{store.name}: is in the memory of this process; build with engine='local'")
        if count not in (None, 1):
            raise SettingsError(f"{store.name}: is in the memory of this process; build with workers=1")
        count = 1
    return EngineChoice(kind, count, address)


def _chosen_part(part: str | None, finish: bool, inputs: Inputs) -> Part | None:
    check_boolean("finish", finish)
    if part is None and not finish:
        return None
    if part is not None and finish:
        raise SettingsError("part= and finish= exclude each other; finish when all parts are done")
    if STANDARD_INPUT in as_list(inputs):
        raise SettingsError(
            "standard input can only be read once, so it cannot be an input of a build in parts; name files"
        )
    return None if part is None else parse_part(part)


def _check_directory(store: Store) -> None:
    if isinstance(store, LocalStore) and store.directory.exists() and not store.exists():
        raise SettingsError(f"out={store.name!r}: is a file; name a directory")


@dataclass(frozen=True)
class _FoundInputs:
    """The input files, and the format of standard input if that was named as well."""

    files: list[InputFile]
    standard_input: InputFormat | None
    is_format_given: bool

    @property
    def formats(self) -> set[InputFormat]:
        of_files = {file.format for file in self.files}
        return of_files if self.standard_input is None else of_files | {self.standard_input}

    def with_standard_input(self, site: Site) -> list[InputFile]:
        """All inputs, sorted. Standard input is read here."""
        if self.standard_input is None:
            return self.files
        kept = _keep_standard_input(site, self.standard_input)
        if not self.is_format_given:
            _check_standard_input(site)
        return sorted([*self.files, kept])


def _find_given(
    inputs: Inputs,
    out: Store,
    format: InputFormat | None,
    include: Sequence[str],
) -> _FoundInputs:
    given = as_list(inputs)
    named = [name for name in given if name != STANDARD_INPUT]
    standard_input = None
    if len(named) < len(given):
        standard_input = format or InputFormat.TEXT
    files = []
    if named:
        # Files in the output are never inputs.
        files = find_inputs(named, out=out.name, format=format, include=include)
    return _FoundInputs(files, standard_input, format is not None)


def _keep_standard_input(site: Site, format: InputFormat) -> InputFile:
    """Standard input can be read only once, but a build reads its inputs in ranges: keep it in a file until the end."""
    site.claim()
    with open(site.standard_input, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        return InputFile(STANDARD_INPUT, format, file.tell(), kept_at=str(site.standard_input))


def _check_standard_input(site: Site) -> None:
    try:
        check_is_text(LocalRawFile(site.standard_input), "standard input")
    except SettingsError:
        site.standard_input.unlink()
        raise


def _build(
    site: Site,
    settings: BuildSettings,
    definition: Definition | None,
    files: list[InputFile],
    run: _RunOptions,
) -> BuildReport:
    """Build in the directory of `site`, whose lock the caller holds."""
    total = sum(file.bytes for file in files)
    shard_bytes = settings.shard_bytes or site.shard_bytes or automatic_shard_bytes(total)
    fields, options, left_out = _fields_and_options(settings, definition, files)
    options = replace(options, max_record_bytes=run.max_record_bytes)
    task_settings = TaskSettings(
        out=site.out.name,
        fields=fields,
        options=options,
        largest_shard_bytes=min(4 * shard_bytes, _LARGEST_SHARD_BYTES),
        max_bad_records=run.max_bad_records,
        definition=definition,
        local_stage=site.local_stage,
    )
    described = _describe_settings(replace(settings, shard_bytes=shard_bytes), fields, definition)
    site.begin(described)
    tasks = list(make_plan(files, shard_bytes, options, site.known_ranges()))
    if run.part is not None:
        return _build_part(site, settings, files, tasks, task_settings, run, run.part)
    if run.finish:
        site.refuse_other_inputs(file.path for file in files)
    made = run_plan(
        tasks,
        site,
        task_settings,
        shuffle_seed=settings.shuffle_seed,
        engine=run.engine,
        progress=run.progress,
        only_finish=run.finish,
    )
    if not any(shard.records for shard in made.shards):
        site.clear()
        raise _nothing_to_build(files, made)
    description = DatasetDescription(fields=fields, settings=described, definition=definition)
    report = complete(site, files, made, description, drop_previous=run.drop_previous)
    return replace(report, left_out=left_out)


def _build_part(
    site: Site,
    settings: BuildSettings,
    files: Sequence[InputFile],
    tasks: Sequence[BuildTask],
    task_settings: TaskSettings,
    run: _RunOptions,
    part: Part,
) -> BuildReport:
    if len(tasks) < part.count:
        _log.warning(
            "there are only %d tasks for %d parts, so some parts have nothing to do; use fewer parts, or a smaller "
            "shard_bytes",
            len(tasks),
            part.count,
        )
    try:
        with site.part_at_work(part):
            made = run_part(
                part.of(tasks),
                site,
                task_settings,
                is_shuffled=settings.shuffle_seed is not None,
                engine=run.engine,
                progress=run.progress,
            )
    except (HeadraceError, OSError):
        # If others have finished the build, its folder is gone, and that is what went wrong.
        site.check_under_way()
        raise
    return report_part(site, files, made, task_settings.fields, part)


def _nothing_to_build(files: Sequence[InputFile], made: Made) -> BuildError:
    inputs = "1 input" if len(files) == 1 else f"{len(files)} inputs"
    inputs += f" ({sum(file.bytes for file in files):,} bytes)"
    bad_count = sum(result.bad_count for result in made.results)
    if not bad_count:
        return BuildError(f"no documents in {inputs}: there is nothing to build")
    records = (
        "The only record was bad and was"
        if bad_count == 1
        else f"All {bad_count:,} records were bad and were"
    )
    first = next(result.bad[0] for result in made.results if result.bad)
    return BuildError(f"no good documents in {inputs}. {records} left out. The first: {first}")


def _describe_settings(
    settings: BuildSettings, fields: Mapping[str, Field], definition: Definition | None
) -> dict[str, Any]:
    """The settings as the manifest holds them: a dataset is extended only by builds with equal ones."""
    tokenizer = None
    if definition:
        tokenizer = {**definition.identity, "fingerprint": definition.fingerprint}
    if settings.text_field == DEFAULT_TEXT_FIELD:
        # Whether the default was named makes no difference.
        settings = replace(settings, text_field=None)
    return {
        **settings.to_json(),
        "fields": {name: field.notation for name, field in fields.items()},
        "tokenizer": tokenizer,
        "ingest_version": INGEST_VERSION,
    }


def _fields_and_options(
    settings: BuildSettings, definition: Definition | None, files: Sequence[InputFile]
) -> tuple[dict[str, Field], ReadOptions, tuple[str, ...]]:
    """The dataset's fields, how inputs are read, and the columns that are left out."""
    split, separator = settings.split, settings.separator.encode()
    if definition:
        text_field = settings.text_field or DEFAULT_TEXT_FIELD
        check_text_field(files, text_field)
        options = ReadOptions(text_field=text_field, split=split, separator=separator)
        return token_fields(definition), options, ()
    found = find_fields(files, settings.columns or {})
    options = ReadOptions(
        fields=found.fields,
        inferred=found.inferred,
        all_columns=settings.columns is None,
        split=split,
        separator=separator,
    )
    return found.fields, options, found.left_out
