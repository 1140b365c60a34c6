"""The last step of every writer: the index from the shards' histograms, then the manifest, which makes it a dataset."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.format.container import StoredFile, parse_head
from penstock.format.fields import Field, FieldKind
from penstock.format.index import merge_histograms, write_index
from penstock.format.manifest import BUILD_NAME, MANIFEST_NAME, Manifest, ShardEntry, write_manifest
from penstock.format.shard import Shard
from penstock.store.local import map_bytes


def finish_dataset(
    directory: Path,
    fields: Mapping[str, Field],
    shards: Sequence[ShardEntry],
    written_by: str,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    provenance: StoredFile | None = None,
) -> Manifest:
    histograms: dict[str, list[Any]] = {n: [] for n, f in fields.items() if f.kind is FieldKind.RAGGED}
    for entry in shards:
        buffer = map_bytes(directory / entry.stored.file)
        header = parse_head(buffer[: entry.stored.header_bytes].tobytes(), len(buffer), entry.stored.file)
        shard = Shard(buffer, header, fields, entry.stored.file)
        for name, gathered in histograms.items():
            gathered.append((shard.part(name, "lengths").copy(), shard.part(name, "counts").copy()))
    index = write_index(directory, {name: merge_histograms(gathered) for name, gathered in histograms.items()})
    manifest = Manifest(
        fields=fields,
        shards=shards,
        index=index,
        provenance=provenance,
        tokenizer=tokenizer,
        settings=settings,
        written_by=written_by,
    )
    return write_manifest(directory, manifest)


def remove_strays(directory: Path, manifest: Manifest) -> None:
    """Delete shards and indexes that the manifest no longer names. Maps of them stay valid where they are open."""
    kept = {stored.file for stored in manifest.files} | {MANIFEST_NAME, BUILD_NAME}
    for path in directory.glob("*.pstk"):
        if path.name not in kept:
            path.unlink(missing_ok=True)
