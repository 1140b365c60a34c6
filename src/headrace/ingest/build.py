"""`headrace.build`: plan, leave out what is already there, run the rest, and write the manifest last."""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

import headrace
from headrace.errors import BuildError, SettingsError
from headrace.format.checksum import checksum
from headrace.format.fields import Field
from headrace.format.finish import finish_dataset, remove_strays, store_document
from headrace.format.manifest import Manifest
from headrace.ingest.plan import make_plan
from headrace.ingest.report import BuildReport, OnProgress
from headrace.ingest.results import TaskResult
from headrace.ingest.run import Made, run_plan
from headrace.ingest.settings import BuildSettings, automatic_shard_bytes, parse_columns
from headrace.ingest.site import Site
from headrace.ingest.task import TaskSettings, token_fields
from headrace.observe.host import useful_cores
from headrace.public import public
from headrace.readers.inputs import STANDARD_INPUT, InputFile, find_inputs
from headrace.readers.reader import InputFormat, ReadOptions, reader_for
from headrace.store.address import open_store
from headrace.store.local import LocalStore
from headrace.store.memory import MemoryStore
from headrace.store.store import Store
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.find import find_tokenizer

INGEST_VERSION = 2
"""Goes up when the same inputs and settings give other shards than before: then all of it is built again."""

_LARGEST_SHARD_BYTES = 256 * 2**20


@public
def build(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
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
    max_bad_records: int = 0,
    rebuild: bool = False,
    progress: OnProgress | None = None,
) -> BuildReport:
    """Turn raw data into a dataset in the directory `out`.

    Run it again to continue a build that was interrupted, or to bring the dataset up to date with its inputs: only what
    has changed is built. The result does not depend on the number of workers, byte for byte.

    Args:
        inputs: Files, globs, directories, or "-" for standard input; one of them or several.
        out: The directory of the dataset, which is created if it does not exist; or a store, or its address.
        tokenizer: "bytes", the path of a `tokenizer.json` or a `.tiktoken` file, the name of a tiktoken encoding, or a
            tokenizer object. Without one, text files become bytes tokens and tables keep their columns as fields.
        text_field: The column or key that holds the text ("text" by default).
        columns: The columns to keep, as a list, or as a dict that also gives their types, like {"x": "float32"}.
        format: The format of all inputs, if their names do not tell it: "text", "jsonl", "csv", "parquet", "arrow" or
            "npy".
        include: Patterns of file names to take from directories, such as "*.py"; these are read as text.
        split: What a document of a text file is: "file", "line" or "separator".
        separator: The text that ends a document, with split="separator".
        eos: The token that ends each document: its name, True for the tokenizer's own (the default), or False for none.
        bos: The token that begins each document: its name, or True for the tokenizer's own. None is added by default.
        allow_special: Whether special tokens that are written out in a text become special tokens. By default they stay
            plain text, so that a document cannot forge a boundary.
        shuffle: Whether the records are stored in a random order.
        seed: The seed of that order.
        shard_bytes: About how large a shard is. By default this is chosen by the size of the inputs.
        workers: How many worker processes to use. By default, one for each core.
        max_bad_records: How many records that cannot be read may be left out. With more, the build stops.
        rebuild: Build everything again, for example because settings have changed.
        progress: A function that is called now and then with a `Progress`.

    Returns:
        A `BuildReport`: how many records and tokens there are, what was built and what was left out.
    """
    started = time.monotonic()
    settings = BuildSettings(
        text_field=text_field,
        columns=parse_columns(columns),
        format=format,  # type: ignore[arg-type]  # strings are parsed there
        split=split,  # type: ignore[arg-type]
        separator=separator,
        shuffle_seed=seed if shuffle else None,
        shard_bytes=shard_bytes,
    )
    if max_bad_records < 0:
        raise SettingsError(f"max_bad_records={max_bad_records}: must be 0 or more")
    store = open_store(out)
    count = workers
    if count is None:
        # What is in the memory of this process can be written by this process alone.
        count = 1 if isinstance(store, MemoryStore) else max(1, int(useful_cores()))
    if count < 1:
        raise SettingsError(f"workers={workers}: must be at least 1")
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    from_disk = [name for name in given if os.fspath(name) != STANDARD_INPUT]
    files = (
        find_inputs(from_disk, out=_local(store), format=settings.format, include=include)
        if from_disk
        else []
    )
    kinds = {file.format for file in files} | (
        {settings.format or InputFormat.TEXT} if len(from_disk) < len(given) else set()
    )
    definition = _definition(settings, kinds, tokenizer, eos, bos, allow_special)
    if isinstance(store, LocalStore) and store.directory.exists() and not store.exists():
        raise SettingsError(f"out={store.name!r}: is a file; name a directory")
    store.create()
    with store.lock("headrace build"):
        store.remove_leftovers()
        site = Site(store, rebuild=rebuild)
        if len(from_disk) < len(given):
            files = sorted([*files, _keep_standard_input(site, settings.format or InputFormat.TEXT)])
        report = _build(
            site, settings, definition, files, count, max_bad_records, progress or (lambda _: None)
        )
    return replace(report, seconds=time.monotonic() - started)


def _local(store: Store) -> Path | None:
    """The directory of the output, if it is a local one: what lies there is never an input."""
    return store.directory if isinstance(store, LocalStore) else None


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


def _keep_standard_input(site: Site, format: InputFormat) -> InputFile:
    """Standard input can be read once, and a build cuts its inputs: keep it in a file until the end."""
    site.standard_input.parent.mkdir(parents=True, exist_ok=True)
    with open(site.standard_input, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        return InputFile(STANDARD_INPUT, format, file.tell())


def _build(
    site: Site,
    settings: BuildSettings,
    definition: Definition | None,
    files: list[InputFile],
    workers: int,
    max_bad_records: int,
    progress: OnProgress,
) -> BuildReport:
    """Build in the directory of `site`, whose lock the caller holds."""
    total = sum(file.bytes for file in files)
    shard_bytes = settings.shard_bytes or site.shard_bytes or automatic_shard_bytes(total)
    fields, options = _fields_and_options(site, settings, definition, files[0])
    task_settings = TaskSettings(
        out=site.out.name,
        fields=fields,
        options=options,
        largest_shard_bytes=min(4 * shard_bytes, _LARGEST_SHARD_BYTES),
        max_bad_records=max_bad_records,
        definition=definition,
        standard_input=str(site.standard_input),
    )
    described = {
        **replace(settings, shard_bytes=shard_bytes).to_json(),
        "fields": {name: field.notation for name, field in fields.items()},
        "tokenizer": {**definition.identity, "fingerprint": definition.fingerprint} if definition else None,
        "ingest_version": INGEST_VERSION,
    }
    site.begin(described)
    tasks = list(make_plan(files, shard_bytes, options, task_settings.locate))
    made = run_plan(
        tasks,
        site,
        task_settings,
        shuffle_seed=settings.shuffle_seed,
        workers=workers,
        progress=progress,
    )
    if not any(shard.records for shard in made.shards):
        site.clear()
        raise BuildError(f"no documents in {len(files)} inputs ({total:,} bytes): nothing to build")
    return _report(site, files, made, fields, described, definition)


def _report(
    site: Site,
    files: list[InputFile],
    made: Made,
    fields: Mapping[str, Field],
    described: Mapping[str, Any],
    definition: Definition | None,
) -> BuildReport:
    """Finish the dataset, and say what came of the build."""
    before, inputs = site.finished_inputs(), _describe_inputs(files, made.results)
    manifest = _finish(site, fields, described, definition, inputs, made)
    after = {entry["path"]: entry["fingerprint"] for entry in inputs}
    return BuildReport(
        path=_local(site.out) or site.out.name,
        records=manifest.records,
        elements={name: sum(shard.elements[name] for shard in made.shards) for name in fields},
        shards=len(made.shards),
        bytes=sum(file.bytes for file in manifest.files),
        inputs=len(files),
        input_bytes=sum(file.bytes for file in files),
        added=len(after.keys() - before.keys()),
        changed=sum(before[path] != after[path] for path in after.keys() & before.keys()),
        removed=len(before.keys() - after.keys()),
        built=len(made.results) - made.reused,
        reused=made.reused,
        bad_count=sum(result.bad_count for result in made.results),
        bad=[record for result in made.results for record in result.bad],
        encoder=made.encoder_name,
        seconds=0.0,
    )


def _fields_and_options(
    site: Site, settings: BuildSettings, definition: Definition | None, first: InputFile
) -> tuple[dict[str, Field], ReadOptions]:
    split, separator = settings.split, settings.separator.encode()
    if definition:
        text_field = settings.text_field or "text"
        return token_fields(definition), ReadOptions(text_field=text_field, split=split, separator=separator)
    path = site.standard_input if first.path == STANDARD_INPUT else Path(first.path)
    chosen = settings.columns or {}
    to_infer = [name for name, notation in chosen.items() if not notation]
    fields = reader_for(first.format).infer(path, to_infer) if to_infer or not chosen else {}
    if chosen:
        fields = {
            name: Field.parse(notation) if notation else fields[name] for name, notation in chosen.items()
        }
    return fields, ReadOptions(fields=fields, split=split, separator=separator)


def _finish(
    site: Site,
    fields: Mapping[str, Field],
    settings: Mapping[str, Any],
    definition: Definition | None,
    inputs: list[dict[str, Any]],
    made: Made,
) -> Manifest:
    """Provenance, tokenizer, index, and last the manifest; then the old version and the build's folder go."""
    provenance = {"inputs": inputs, "tasks": msgspec.to_builtins(made.results)}
    tokenizer = None
    if definition:
        tokenizer = definition.to_json()
        if definition.content:
            tokenizer["stored"] = asdict(store_document(site.out, "tokenizer", definition.content))
    manifest = finish_dataset(
        site.out,
        fields,
        made.shards,
        f"headrace {headrace.__version__}",
        tokenizer=tokenizer,
        settings=settings,
        provenance=store_document(site.out, "provenance", json.dumps(provenance, indent=0).encode()),
    )
    remove_strays(site.out, manifest)
    site.clear()
    return manifest


def _describe_inputs(files: Sequence[InputFile], results: Sequence[TaskResult]) -> list[dict[str, Any]]:
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
