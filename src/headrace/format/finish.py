"""The last step of every writer: the index from the shards' histograms, then the manifest.

The manifest is what makes the directory a dataset.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.format.checksum import checksum, header_checksum
from headrace.format.container import StoredFile
from headrace.format.fields import Field, FieldKind
from headrace.format.index import IndexWriter
from headrace.format.manifest import FurtherFile, Manifest, ShardEntry, write_manifest
from headrace.format.shard import load_shard
from headrace.store.store import Store, write_file


def finish_dataset(
    store: Store,
    fields: Mapping[str, Field],
    shards: Sequence[ShardEntry],
    written_by: str,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    provenance: StoredFile | None = None,
    further: Sequence[FurtherFile] = (),
    into: Store | None = None,
) -> Manifest:
    """Write the index and the manifest to the store that holds the shards, or to another one."""
    into = into or store
    writer = IndexWriter(into)
    for name in (name for name, field in fields.items() if field.kind is FieldKind.RAGGED):
        # Only one shard is open at a time; each is mapped twice, for its histogram and for its lengths.
        writer.add(
            name,
            (load_shard(store, entry.stored, fields).histogram(name) for entry in shards),
            (load_shard(store, entry.stored, fields).lengths(name) for entry in shards),
        )
    manifest = Manifest(
        fields=fields,
        shards=shards,
        index=writer.write(),
        provenance=provenance,
        tokenizer=tokenizer,
        settings=settings,
        further=further,
        written_by=written_by,
    )
    return write_manifest(into, manifest)


def store_document(store: Store, stem: str, content: bytes) -> StoredFile:
    """Write a file that is not a container, such as a JSON document; its name has its checksum."""
    digest = checksum(content)
    name = f"{stem}-{digest[:16]}.json"
    write_file(store, name, [content])
    return StoredFile(name, len(content), digest, 0, header_checksum(b""))
