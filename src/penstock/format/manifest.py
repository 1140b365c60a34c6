"""The manifest, `penstock.json`: the file that makes a directory a dataset.

It is JSON; its first line is `{"checksum": "<32 hex digits>",` and the checksum is that of all bytes after
the first newline. It is written last, so a directory without one is no dataset, and it names every other
file with its size and checksum. What the dataset was made from, which may be long, stands in a second
file, the provenance, which opening a dataset does not read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from penstock.errors import (
    CorruptError,
    DatasetNotFoundError,
    FormatError,
    PenstockError,
    UnfinishedBuildError,
    VersionError,
)
from penstock.format.checksum import checksum
from penstock.format.container import VERSION, StoredFile
from penstock.format.fields import Field, parse_fields
from penstock.store.local import write_atomic

MANIFEST_NAME = "penstock.json"
BUILD_NAME = ".build"
"""The folder of a build that is under way, or was cut off and can be continued."""

_PREFIX = b'{"checksum": "'
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_HEX = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    stored: StoredFile
    records: int
    elements: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.stored), "records": self.records, "elements": dict(self.elements)}

    @staticmethod
    def from_json(value: Any) -> "ShardEntry":
        stored = parse_stored(value)
        if not all(_is_count(number) for number in (value["records"], *value["elements"].values())):
            raise FormatError(f"shard {stored.file}: damaged counts")
        return ShardEntry(stored=stored, records=value["records"], elements=dict(value["elements"]))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    fields: Mapping[str, Field]
    shards: Sequence[ShardEntry]
    index: StoredFile
    provenance: StoredFile | None = None
    tokenizer: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None
    written_by: str = ""
    checksum: str = ""

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)

    @property
    def files(self) -> list[StoredFile]:
        """Every file of the dataset but the manifest itself."""
        extra = [self.index, *([self.provenance] if self.provenance else [])]
        if self.tokenizer and self.tokenizer.get("stored"):
            extra.append(parse_stored(self.tokenizer["stored"]))
        return [*(shard.stored for shard in self.shards), *extra]


def parse_stored(value: Any) -> StoredFile:
    stored = StoredFile(**{field.name: value[field.name] for field in dataclass_fields(StoredFile)})
    if not isinstance(stored.file, str) or not _FILE_NAME.fullmatch(stored.file):
        raise FormatError(f"file {str(stored.file)[:200]!r}: must be a plain name inside the dataset's directory")
    if not (_is_count(stored.bytes) and _is_count(stored.header_bytes) and stored.header_bytes <= stored.bytes):
        raise FormatError(f"file {stored.file}: damaged sizes")
    if not all(isinstance(text, str) and _HEX.fullmatch(text) for text in (stored.checksum, stored.header_checksum)):
        raise FormatError(f"file {stored.file}: damaged checksum")
    return stored


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Write the manifest, which is the moment at which the dataset comes into being."""
    body = {
        "format": "penstock",
        "version": VERSION,
        "records": manifest.records,
        "fields": [{"name": name, **field.to_json()} for name, field in manifest.fields.items()],
        "shards": [shard.to_json() for shard in manifest.shards],
        "index": asdict(manifest.index),
        "provenance": asdict(manifest.provenance) if manifest.provenance else None,
        "tokenizer": manifest.tokenizer,
        "settings": manifest.settings,
        "written_by": manifest.written_by,
    }
    # One line a shard, so that people and `diff` can read it.
    lines = [f"{json.dumps(key)}: {_dump(value)}" for key, value in body.items()]
    rest = (",\n".join(lines) + "}\n").encode()
    digest = checksum(rest)
    write_atomic(directory / MANIFEST_NAME, [_PREFIX, digest.encode(), b'",\n', rest])
    return replace(manifest, checksum=digest)


def _dump(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "]"
    return json.dumps(value)


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _nothing_here(directory) from None
    return parse_manifest(raw, str(path))


def _nothing_here(directory: Path) -> PenstockError:
    if (directory / BUILD_NAME).exists():
        return UnfinishedBuildError(f"{directory}: its build has not finished; run the same command again to continue it")
    if directory.is_dir():
        return DatasetNotFoundError(f"{directory}: not a dataset, it has no {MANIFEST_NAME}; make one with `penstock build`")
    return DatasetNotFoundError(f"{directory}: no such dataset; make one with `penstock build`")


def parse_manifest(raw: bytes, name: str) -> Manifest:
    """Read a manifest that may have been damaged or forged."""
    digest, rest = _split_checksum(raw, name)
    try:
        body = json.loads(raw)
        if body["format"] != "penstock":
            raise FormatError(f"format {body['format']!r}")
        if body["version"] != VERSION:
            raise VersionError(f"{name}: format version {body['version']!r}, and this Penstock reads version {VERSION}")
        if checksum(rest) != digest:
            raise FormatError("its checksum does not match its content")
        provenance = body["provenance"]
        names = [entry["name"] for entry in body["fields"]]
        manifest = Manifest(
            fields=parse_fields({n: Field.from_json(e) for n, e in zip(names, body["fields"], strict=True)}),
            shards=[ShardEntry.from_json(entry) for entry in body["shards"]],
            index=parse_stored(body["index"]),
            provenance=parse_stored(provenance) if provenance else None,
            tokenizer=body["tokenizer"],
            settings=body["settings"],
            written_by=str(body["written_by"]),
            checksum=digest,
        )
        if manifest.records != body["records"]:
            raise FormatError(f"{body['records']} records, but the shards hold {manifest.records}")
        if any(set(shard.elements) != set(names) for shard in manifest.shards) or len(set(names)) != len(names):
            raise FormatError("shards and manifest name different fields")
        _ = manifest.files
    except VersionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{name}: damaged manifest: {error}. Restore it from a copy, or rebuild the dataset") from None
    return manifest


def _split_checksum(raw: bytes, name: str) -> tuple[str, bytes]:
    first, _, rest = raw.partition(b"\n")
    digest = first[len(_PREFIX) : -2]
    if not first.startswith(_PREFIX) or not _HEX.fullmatch(digest.decode("latin-1")):
        raise CorruptError(f"{name}: not a Penstock manifest, its first line is {first[:60]!r}")
    return digest.decode(), rest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
