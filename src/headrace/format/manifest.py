"""The manifest, `headrace.json`: the file that makes a directory a dataset.

It is JSON; its first line is `{"checksum": "<32 hex digits>",` and the checksum is that of all bytes after
the first newline. It is written last, so a directory without one is not a dataset, and it names every other
file with its size and checksum. What the dataset was made from, which may be long, is in a second file, the
provenance, which is not read when a dataset is opened.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.errors import (
    CorruptError,
    DatasetNotFoundError,
    FormatError,
    HeadraceError,
    UnfinishedBuildError,
    VersionError,
)
from headrace.format.checksum import checksum
from headrace.format.container import ALIGNMENT, MAX_HEADER_BYTES, VERSION, StoredFile, check_version
from headrace.format.fields import MAX_RECORDS, Field, parse_fields
from headrace.store.store import Store, write_file

MANIFEST_NAME = "headrace.json"
BUILD_NAME = ".build"
"""The folder of a build that is running, or was interrupted and can be continued."""
PREVIOUS_NAME = ".previous.json"
"""The manifest before the current one; its files are kept for readers that have them open."""

_PREFIX = b'{"checksum": "'
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_CHECKSUM = re.compile("[0-9a-f]{32}")
_HEADER_CHECKSUM = re.compile("[0-9a-f]{16}")
_FIRST_LINE = re.compile(rb'{"checksum": "([0-9a-f]{32})",')


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
        if value["records"] > MAX_RECORDS:
            raise FormatError(
                f"shard {stored.file}: {value['records']} records, but the maximum is {MAX_RECORDS}"
            )
        return ShardEntry(stored=stored, records=value["records"], elements=dict(value["elements"]))


@dataclass(frozen=True, kw_only=True)
class FurtherFile:
    """A file that a reader may ignore if it does not know the purpose. `verify` checks it like any other."""

    purpose: str
    stored: StoredFile

    def to_json(self) -> dict[str, Any]:
        return {"purpose": self.purpose, **asdict(self.stored)}

    @staticmethod
    def from_json(value: Any) -> "FurtherFile":
        if not isinstance(value["purpose"], str):
            raise FormatError(f"the purpose of a further file is {str(value['purpose'])[:80]}, not a string")
        return FurtherFile(purpose=value["purpose"], stored=parse_stored(value))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    fields: Mapping[str, Field]
    shards: Sequence[ShardEntry]
    index: StoredFile
    provenance: StoredFile | None = None
    tokenizer: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None
    further: Sequence[FurtherFile] = ()
    written_by: str = ""
    checksum: str = ""

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)

    @property
    def files(self) -> list[StoredFile]:
        """Every file of the dataset except the manifest itself."""
        extra = [self.index, *([self.provenance] if self.provenance else [])]
        if self.tokenizer and self.tokenizer.get("stored") is not None:
            extra.append(parse_stored(self.tokenizer["stored"]))
        extra += [further.stored for further in self.further]
        return [*(shard.stored for shard in self.shards), *extra]

    def has_further(self, purpose: str) -> bool:
        """Whether there is a further file for a purpose."""
        return any(further.purpose == purpose for further in self.further)


def parse_stored(value: Any) -> StoredFile:
    stored = StoredFile(
        value["file"], value["bytes"], value["checksum"], value["header_bytes"], value["header_checksum"]
    )
    if not is_file_name(stored.file):
        raise FormatError(
            f"file {str(stored.file)[:200]!r}: must be a plain name inside the dataset's directory"
        )
    are_counts = _is_count(stored.bytes) and _is_count(stored.header_bytes)
    if not are_counts or stored.header_bytes > stored.bytes:
        raise FormatError(f"file {stored.file}: damaged sizes")
    if stored.header_bytes > ALIGNMENT + MAX_HEADER_BYTES:
        raise FormatError(f"file {stored.file}: its header cannot have {stored.header_bytes} bytes")
    if not (_is_match(_CHECKSUM, stored.checksum) and _is_match(_HEADER_CHECKSUM, stored.header_checksum)):
        raise FormatError(f"file {stored.file}: damaged checksum")
    return stored


def write_manifest(store: Store, manifest: Manifest) -> Manifest:
    """Write the manifest. With this the dataset exists."""
    body = {
        "format": "headrace",
        "version": VERSION,
        "records": manifest.records,
        "fields": [{"name": name, **field.to_json()} for name, field in manifest.fields.items()],
        "shards": [shard.to_json() for shard in manifest.shards],
        "index": asdict(manifest.index),
        "provenance": asdict(manifest.provenance) if manifest.provenance else None,
        "tokenizer": manifest.tokenizer,
        "settings": manifest.settings,
        "further": [further.to_json() for further in manifest.further],
        "written_by": manifest.written_by,
    }
    # One line for each shard, so that people and `diff` can read it.
    lines = [f"{json.dumps(key)}: {_dump(value)}" for key, value in body.items()]
    rest = (",\n".join(lines) + "}\n").encode()
    digest = checksum(rest)
    write_file(store, MANIFEST_NAME, [_PREFIX, digest.encode(), b'",\n', rest])
    return replace(manifest, checksum=digest)


def _dump(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "]"
    return json.dumps(value)


def read_manifest(store: Store) -> Manifest:
    return read_manifest_and_bytes(store)[1]


def read_manifest_and_bytes(store: Store) -> tuple[bytes, Manifest]:
    try:
        return read_one_manifest(store, MANIFEST_NAME)
    except FileNotFoundError:
        raise _nothing_here(store) from None


def read_one_manifest(store: Store, file: str) -> tuple[bytes, Manifest]:
    """The manifest in a file, and its bytes. If they are wrong and come over a network, they are read once more, since
    they may have been changed on their way."""
    raw, name = store.read(file), store.locate(file)
    try:
        return raw, parse_manifest(raw, name)
    except FormatError:
        if not store.is_remote:
            raise
    raw = store.read(file)
    return raw, parse_manifest(raw, name)


def read_raw_manifest(store: Store) -> bytes:
    try:
        return store.read(MANIFEST_NAME)
    except FileNotFoundError:
        raise _nothing_here(store) from None


def read_version(store: Store, expected_checksum: str) -> Manifest | None:
    """The manifest with this checksum: the current one, or the one before; None if it is neither."""
    current = read_manifest(store)
    if current.checksum == expected_checksum:
        return current
    try:
        previous = read_one_manifest(store, PREVIOUS_NAME)[1]
    except (OSError, FormatError):
        return None
    return previous if previous.checksum == expected_checksum else None


def _nothing_here(store: Store) -> HeadraceError:
    if store.folder(BUILD_NAME).exists():
        return UnfinishedBuildError(
            f"{store.name}: is not complete yet; start the same build again to continue it (a build in parts, with "
            "finish=True), or the same copy, or headrace.Writer(..., resume=True) if a Writer was at work"
        )
    place, _, name = store.name.rpartition("/")
    if place and name == MANIFEST_NAME:
        return DatasetNotFoundError(f"{store.name}: not a dataset; did you mean {place}?")
    if store.exists():
        return DatasetNotFoundError(
            f"{store.name}: not a dataset, since it has no {MANIFEST_NAME}; build one with `headrace build`"
        )
    return DatasetNotFoundError(f"{store.name}: no such dataset; build one with `headrace build`")


def parse_manifest(raw: bytes, name: str) -> Manifest:
    """Read a manifest that may have been damaged or forged."""
    digest, rest = _split_checksum(raw, name)
    try:
        if checksum(rest) != digest:
            raise FormatError("its checksum does not match its content")
        body = json.loads(raw.decode("utf-8"))
        if body["format"] != "headrace" or type(body["version"]) is not int:
            raise FormatError(f"format {str(body['format'])[:80]!r}, version {str(body['version'])[:80]!r}")
        check_version(body["version"], name)
        manifest = _parse_body(body, digest)
    except VersionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f"{name}: damaged manifest: {str(error)[:300]}. Restore it from a copy, or rebuild the dataset"
        ) from None
    return manifest


def _parse_body(body: Any, digest: str) -> Manifest:
    _check_kinds(body)
    manifest = Manifest(
        fields=_parse_field_list(body["fields"]),
        shards=[ShardEntry.from_json(entry) for entry in body["shards"]],
        index=parse_stored(body["index"]),
        provenance=None if body["provenance"] is None else parse_stored(body["provenance"]),
        tokenizer=body["tokenizer"],
        settings=body["settings"],
        further=tuple(FurtherFile.from_json(entry) for entry in body["further"]),
        written_by=body["written_by"],
        checksum=digest,
    )
    if not _is_count(body["records"]) or manifest.records != body["records"]:
        raise FormatError(f"{str(body['records'])[:80]} records, but the shards hold {manifest.records}")
    for shard in manifest.shards:
        _check_elements(shard, manifest.fields)
    _check_described_alike(manifest.files)
    return manifest


def _check_kinds(body: Any) -> None:
    """Check the types of the values that are not parsed any further."""
    for key in ("provenance", "tokenizer", "settings"):
        if not (body[key] is None or isinstance(body[key], dict)):
            raise FormatError(f"{key!r} is neither an object nor null")
    for key in ("shards", "further"):
        if not isinstance(body[key], list):
            raise FormatError(f"{key!r} is not a list")
    if not isinstance(body["written_by"], str):
        raise FormatError("'written_by' is not a string")


def _parse_field_list(entries: Any) -> Mapping[str, Field]:
    names = [entry["name"] for entry in entries]
    if len(set(names)) != len(names):
        raise FormatError("two fields have the same name")
    return parse_fields({entry["name"]: Field.from_json(entry) for entry in entries})


def _check_described_alike(files: Sequence[StoredFile]) -> None:
    described: dict[str, StoredFile] = {}
    for stored in files:
        if described.setdefault(stored.file, stored) != stored:
            raise FormatError(f"file {stored.file} is described twice, with different contents")


def _check_elements(shard: ShardEntry, fields: Mapping[str, Field]) -> None:
    if set(shard.elements) != set(fields):
        raise FormatError(f"{shard.stored.file}: the shard and the manifest name different fields")
    for name, field in fields.items():
        if not field.variable and shard.elements[name] != shard.records:
            raise FormatError(
                f"{shard.stored.file}: {name!r} has a different number of records than its shard"
            )


def _split_checksum(raw: bytes, name: str) -> tuple[str, bytes]:
    first, _, rest = raw.partition(b"\n")
    match = _FIRST_LINE.fullmatch(first)
    if not match:
        raise CorruptError(f"{name}: not a Headrace manifest: its first line is {first[:60]!r}")
    return match[1].decode(), rest


def is_file_name(value: Any) -> bool:
    return _is_match(_FILE_NAME, value) and value != MANIFEST_NAME


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_match(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
