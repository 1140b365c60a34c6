"""The last step of every writer: the index from the shards' histograms, the units, then the manifest.

The manifest is what makes the directory a dataset.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.format.checksum import checksum, header_checksum
from headrace.format.container import StoredFile
from headrace.format.fields import Field, FieldKind
from headrace.format.index import IndexWriter
from headrace.format.manifest import FurtherFile, Manifest, ShardEntry, write_manifest
from headrace.format.shard import each_tables
from headrace.format.units import RowCounts, write_units
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
    count_rows: RowCounts | None = None,
    into: Store | None = None,
) -> Manifest:
    """Write the index, the units and the manifest to the store that holds the shards, or to another one.

    `count_rows` is told how the shards are cut into units, and may write a further file about that.
    """
    into = into or store
    writer = IndexWriter(into)
    for name in (name for name, field in fields.items() if field.kind is FieldKind.RAGGED):
        # Only a few shards are open at a time; each is opened twice, for its histogram and for its lengths.
        writer.add(
            name,
            (shard.histogram(name) for shard in each_tables(store, shards, fields)),
            (shard.lengths(name) for shard in each_tables(store, shards, fields)),
        )
    index = writer.write()
    units = write_units(store, into, fields, shards, index, count_rows)
    manifest = Manifest(
        fields=fields,
        shards=shards,
        index=index,
        provenance=provenance,
        tokenizer=tokenizer,
        settings=settings,
        further=(*further, *units),
        written_by=written_by,
    )
    return write_manifest(into, manifest)


def store_document(store: Store, stem: str, content: bytes) -> StoredFile:
    """Write a file that is not a container, such as a JSON document; its name has its checksum."""
    digest = checksum(content)
    name = f"{stem}-{digest[:16]}.json"
    write_file(store, name, [content])
    return StoredFile(name, len(content), digest, 0, header_checksum(b""))
