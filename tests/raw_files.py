"""Raw files of every format, all with the same records, and the same files in a bucket."""

import csv
import gzip
import io
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headrace.readers import inputs, parquet
from headrace.store import remote_content
from headrace.store.remote import RemoteStore
from headrace.streams import blocks_ahead
from tests.s3_server import BUCKET, S3Server
from tests.samples import documents

RECORDS: list[dict[str, Any]] = [
    {"n": number, "text": f'{text}\n"{number}", quoted', "x": number / 4}
    for number, text in enumerate(documents(120))
]
SHARD_BYTES, BLOCK_BYTES = 4096, 3000


@dataclass(frozen=True)
class RawFormat:
    name: str
    write: Callable[[Path], None]
    build: dict[str, Any] = field(default_factory=dict)
    """Settings of a build that reads it, beside those that are the same for all."""
    stream: dict[str, Any] = field(default_factory=dict)


def _lines() -> str:
    return "".join(json.dumps(record) + "\n" for record in RECORDS)


def _table(delimiter: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(RECORDS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(RECORDS)
    return text.getvalue()


def _arrow(path: Path, kind: Any, **options: Any) -> None:
    table = pa.Table.from_pylist(RECORDS)
    with kind(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_table(table, max_chunksize=25)


def _parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=25)


def _structured(path: Path) -> None:
    array = np.zeros(len(RECORDS), dtype=[("n", "<i4"), ("größe", "<f8", (3,))])
    array["n"] = [record["n"] for record in RECORDS]
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version=(3, 0))


def _texts(path: Path) -> None:
    path.write_text("\n".join(record["text"] for record in RECORDS))


_TOKENS: dict[str, Any] = {"tokenizer": "bytes"}
_FORMATS = [
    RawFormat("whole.txt", _texts, {}, {"split": "file"}),
    RawFormat("lines.txt", _texts, {"split": "line"}),
    RawFormat("parts.txt", _texts, {"separator": "\n\n"}, {"separator": "\n\n"}),
    RawFormat("packed.txt.gz", lambda path: path.write_bytes(gzip.compress(_lines().encode())) and None),
    RawFormat("a.jsonl", lambda path: path.write_text(_lines()) and None, _TOKENS),
    RawFormat("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(_lines().encode())) and None),
    RawFormat("a.jsonl.zst", lambda path: path.write_bytes(zstandard.compress(_lines().encode())) and None),
    RawFormat("a.csv", lambda path: path.write_bytes(_table(",").encode()) and None, _TOKENS),
    RawFormat("b.tsv", lambda path: path.write_bytes(_table("\t").encode()) and None),
    RawFormat("a.csv.gz", lambda path: path.write_bytes(gzip.compress(_table(",").encode())) and None),
    RawFormat("a.parquet", _parquet, _TOKENS, {"fields": ["text", "n"]}),
    RawFormat("a.arrow", lambda path: _arrow(path, pa.ipc.new_file), _TOKENS, {"fields": ["x", "n"]}),
    RawFormat("packed.arrow", lambda path: _arrow(path, pa.ipc.new_file, compression="zstd")),
    RawFormat("stream.arrow", lambda path: _arrow(path, pa.ipc.new_stream)),
    RawFormat("a.npy", lambda path: np.save(path, np.arange(1800).reshape(-1, 3))),
    RawFormat("fields.npy", _structured),
]
FORMATS = {each.name: each for each in _FORMATS}


def write_all(folder: Path) -> None:
    folder.mkdir(parents=True)
    for each in _FORMATS:
        each.write(folder / each.name)


def put(address: str, name: str, content: bytes | str) -> None:
    """Store one object, or replace it."""
    encoded = content.encode() if isinstance(content, str) else content
    RemoteStore(address)._objects.put(name, encoded)


def upload(folder: Path, address: str) -> None:
    """Everything in a folder and the folders in it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(address, str(path.relative_to(folder)), path.read_bytes())


@dataclass(frozen=True)
class Twins:
    """The same files in a folder and under a prefix of the bucket that nobody else uses."""

    folder: Path
    address: str


def upload_for_module(folder: Path, server: S3Server) -> Twins:
    """For a fixture of a whole module, in which the environment of its tests is not set yet."""
    address = f"s3://{BUCKET}/{secrets.token_hex(8)}"
    with pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment().items():
            environment.setenv(name, value)
        upload(folder, address)
    return Twins(folder, address)


def read_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small objects are read as large ones are: in several pieces, some of them ahead."""
    for module in (remote_content, inputs, parquet):
        monkeypatch.setattr(module, "SMALL_BYTES", 500)
    monkeypatch.setattr(remote_content, "PIECE_BYTES", 4000)
    monkeypatch.setattr(remote_content, "_LEAST_BYTES", 700)
    monkeypatch.setattr(parquet, "_JOINED_BYTES", 4000)
    monkeypatch.setattr(blocks_ahead, "_TOGETHER_BYTES", 6500)
