"""The last step of a build: write everything that describes the shards, the manifest last, and report the outcome."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import headrace
from headrace.format.checksum import checksum
from headrace.format.fields import Field
from headrace.format.finish import finish_dataset, store_document
from headrace.format.manifest import Manifest, ShardEntry
from headrace.ingest.part import Part
from headrace.ingest.report import BuildReport
from headrace.ingest.results import BadRecord, TaskResult
from headrace.ingest.run import Made
from headrace.ingest.site import Site
from headrace.readers.inputs import InputFile
from headrace.rows.unit_counts import RowCounter
from headrace.store.local import LocalStore
from headrace.store.store import Store
from headrace.tokenizers.definition import Definition


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """What the manifest says about a dataset apart from its shards."""

    fields: Mapping[str, Field]
    settings: Mapping[str, Any]
    definition: Definition | None


def complete(
    site: Site,
    files: Sequence[InputFile],
    made: Made,
    description: DatasetDescription,
    *,
    drop_previous: bool,
) -> BuildReport:
    """Complete the dataset, and report what the build did. `seconds` is left for the caller to fill in."""
    inputs = _describe_inputs(files, made.results)
    before, all_before = site.finished_inputs(), site.inputs_before()
    after = {entry["path"]: entry["fingerprint"] for entry in inputs}
    manifest = _write(site, made, description, inputs)
    if drop_previous:
        site.work.drop_previous()
    previous_bytes = site.work.previous_bytes
    site.clear()
    in_both = after.keys() & before.keys()
    removed = [path for path in all_before if path not in after]
    return replace(
        _report(site, files, made, description.fields),
        bytes=sum(file.bytes for file in manifest.files),
        previous_bytes=previous_bytes,
        added=len(after.keys() - before.keys()),
        changed=sum(before[path] != after[path] for path in in_both),
        removed=len(removed),
        removed_inputs=removed,
    )


def report_part(
    site: Site, files: Sequence[InputFile], made: Made, fields: Mapping[str, Field], part: Part
) -> BuildReport:
    """What a part of a build did. Inputs are those of the whole build."""
    return replace(_report(site, files, made, fields), part=str(part))


def _report(site: Site, files: Sequence[InputFile], made: Made, fields: Mapping[str, Field]) -> BuildReport:
    """What was made, without what it has changed in the dataset."""
    return BuildReport(
        path=local_directory(site.out) or site.out.name,
        records=sum(shard.records for shard in made.shards),
        elements=_count_elements(made.shards, fields),
        shards=len(made.shards),
        bytes=sum(shard.stored.bytes for shard in made.shards),
        previous_bytes=0,
        inputs=len(files),
        input_bytes=sum(file.bytes for file in files),
        added=0,
        changed=0,
        removed=0,
        built=len(made.results) - made.reused,
        reused=made.reused,
        bad_count=sum(result.bad_count for result in made.results),
        bad=_list_bad(made.results),
        encoder=made.encoder_name,
        seconds=0.0,
    )


def local_directory(store: Store) -> Path | None:
    """The directory of a local store; None for any other store."""
    return store.directory if isinstance(store, LocalStore) else None


def _count_elements(shards: Sequence[ShardEntry], fields: Mapping[str, Field]) -> dict[str, int]:
    return {name: sum(shard.elements[name] for shard in shards) for name in fields}


def _list_bad(results: Sequence[TaskResult]) -> list[BadRecord]:
    return [record for result in results for record in result.bad]


def _write(site: Site, made: Made, description: DatasetDescription, inputs: list[dict[str, Any]]) -> Manifest:
    """Write the tokenizer, the provenance, the index and the manifest, and make them the dataset."""
    new = site.work.new
    tokenizer = _store_tokenizer(new, description.definition)
    provenance = {"inputs": inputs, "tasks": msgspec.to_builtins(made.results)}
    manifest = finish_dataset(
        site.out,
        description.fields,
        made.shards,
        f"headrace {headrace.__version__}",
        tokenizer=tokenizer,
        settings=description.settings,
        provenance=store_document(new, "provenance", json.dumps(provenance, indent=0).encode()),
        count_rows=RowCounter(description.fields),
        into=new,
    )
    site.work.publish(manifest)
    return manifest


def _store_tokenizer(out: Store, definition: Definition | None) -> dict[str, Any] | None:
    """Store the tokenizer's content, if it has any, and return its entry in the manifest."""
    if definition is None:
        return None
    entry = definition.to_json()
    if definition.content:
        entry["stored"] = asdict(store_document(out, "tokenizer", definition.content))
    return entry


def _describe_inputs(files: Sequence[InputFile], results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """Each input with its size and a fingerprint of its whole content."""
    digests: dict[str, list[tuple[int, str]]] = {file.path: [] for file in files}
    for result in results:
        for piece, digest in zip(result.slices, result.fingerprints, strict=True):
            digests[piece.path].append((piece.start, digest))
    return [
        {
            "path": file.path,
            "format": file.format.value,
            "bytes": file.bytes,
            "fingerprint": _join_digests(digests[file.path]),
        }
        for file in files
    ]


def _join_digests(digests: list[tuple[int, str]]) -> str:
    """One fingerprint from those of a file's slices, each given with the start of its slice."""
    in_order = [digest for _, digest in sorted(digests)]
    return checksum("".join(in_order).encode())
