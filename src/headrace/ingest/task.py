"""One task: read slices, tokenize or take columns, write shards. Runs in any process, knows no other task."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import BadRecordsError
from headrace.format.checksum import checksum
from headrace.format.fields import Field, FieldKind
from headrace.format.manifest import ShardEntry
from headrace.format.shard import Column, ShardBuilder
from headrace.ingest.plan import Slice, Task
from headrace.readers.columns import Block, Strings, Texts
from headrace.readers.inputs import STANDARD_INPUT
from headrace.readers.reader import ReadOptions, Split, reader_for
from headrace.store.local import map_bytes
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.encoders import Encoder
from headrace.tokenizers.tokenizer import tokenize

TOKENS = "tokens"
KEPT_BAD_RECORDS = 1000
"""How many bad records of one task are listed by name; all are counted."""


@dataclass(frozen=True)
class BadRecord:
    path: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.reason}"


@dataclass(frozen=True)
class Result:
    """What a task made. `fingerprints` belong to the slices, in order."""

    slices: Sequence[Slice]
    fingerprints: Sequence[str]
    shards: Sequence[ShardEntry]
    bad_count: int = 0
    bad: Sequence[BadRecord] = ()

    @property
    def key(self) -> str:
        return task_key(self.slices)

    def to_json(self) -> dict[str, Any]:
        return {
            "slices": [piece.to_json() for piece in self.slices],
            "fingerprints": list(self.fingerprints),
            "shards": [shard.to_json() for shard in self.shards],
            "bad_count": self.bad_count,
            "bad": [asdict(record) for record in self.bad],
        }

    @staticmethod
    def from_json(value: Any) -> "Result":
        return Result(
            [Slice.from_json(piece) for piece in value["slices"]],
            list(value["fingerprints"]),
            [ShardEntry.from_json(shard) for shard in value["shards"]],
            value["bad_count"],
            [BadRecord(**record) for record in value["bad"]],
        )


def task_key(slices: Sequence[Slice]) -> str:
    """Names a task's input; with its fingerprints it says whether a result still holds."""
    return "|".join(f"{piece.path}:{piece.format}:{piece.start}:{piece.stop}" for piece in slices)


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """All that a task needs besides its slices: the same for every task of a build."""

    directory: Path
    fields: Mapping[str, Field]
    options: ReadOptions
    largest_shard_bytes: int
    max_bad_records: int
    standard_input: Path
    definition: Definition | None = None
    encoder: Encoder | None = None

    def locate(self, path: str) -> Path:
        """The file behind an input's name: standard input is kept in one."""
        return self.standard_input if path == STANDARD_INPUT else Path(path)


Advance = Callable[[int, int, int], None]
"""Called with (input bytes, records, elements) as a task goes on."""


def run_task(task: Task, bench: Workbench, advance: Advance) -> Result:
    fingerprints = [fingerprint_of(piece, bench) for piece in task.slices]
    bad = BadRecords(bench.max_bad_records)
    shards = list(_write_shards(bench, _columns(task, bench, bad), advance))
    return Result(task.slices, fingerprints, shards, bad.count, bad.listed)


def still_holds(result: Result, bench: Workbench) -> bool:
    """Whether a result from before is what the task would give now: same input, shards still there."""
    now = [fingerprint_of(piece, bench) for piece in result.slices]
    return now == list(result.fingerprints) and all_there(bench.directory, result.shards)


def fingerprint_of(piece: Slice, bench: Workbench) -> str:
    return reader_for(piece.format).fingerprint(bench.locate(piece.path), piece.start, piece.stop)


def all_there(directory: Path, shards: Sequence[ShardEntry]) -> bool:
    """Whether shards from before are still whole, to the last byte: what is damaged is built again."""
    try:
        return all(
            checksum(map_bytes(directory / shard.stored.file)) == shard.stored.checksum for shard in shards
        )
    except OSError:
        return False


@dataclass
class BadRecords:
    """Counts bad records and stops the task when there are more than allowed."""

    allowed: int
    count: int = 0
    listed: list[BadRecord] = field(default_factory=list)

    def report(self, path: str, where: str, reason: str) -> None:
        self.count += 1
        record = BadRecord(path, where, reason)
        if len(self.listed) < KEPT_BAD_RECORDS:
            self.listed.append(record)
        if self.count > self.allowed:
            raise too_many(self.count, self.allowed, record)


def too_many(count: int, allowed: int, latest: BadRecord) -> BadRecordsError:
    return BadRecordsError(
        f"bad record in {latest}. That makes {count}, and max_bad_records is {allowed}: mend the input, or allow "
        "more with --max-bad-records N; what is finished is kept, the same command continues"
    )


def _columns(task: Task, bench: Workbench, bad: BadRecords) -> Iterator[tuple[Mapping[str, Column], int]]:
    """Columns ready for a shard, with the input bytes they stand for."""
    for block in merged(_blocks(task, bench, bad), bench.options.block_bytes):
        if bench.definition is None or bench.encoder is None:
            yield {name: _plain(column) for name, column in block.columns.items()}, block.input_bytes
            continue
        texts = next(iter(block.columns.values()))

        def report(record: int, reason: str, block: Block = block) -> None:
            path, _, where = block.locate(record).partition("\0")
            bad.report(path, where, reason)

        if isinstance(texts, (Texts, Strings)):
            yield {TOKENS: tokenize(texts, bench.definition, bench.encoder, report)}, block.input_bytes


def _plain(column: Column | Texts | Strings) -> Column:
    return column.to_ragged() if isinstance(column, (Texts, Strings)) else column


def _blocks(task: Task, bench: Workbench, bad: BadRecords) -> Iterator[Block]:
    """The blocks of all slices; `locate` then gives path and place, a NUL between them."""
    for piece in task.slices:

        def report(where: str, reason: str, path: str = piece.path) -> None:
            bad.report(path, where, reason)

        reader = reader_for(piece.format)
        path = bench.locate(piece.path)
        for block in reader.read(path, piece.start, piece.stop, bench.options, report):

            def locate(record: int, block: Block = block, path: str = piece.path) -> str:
                return f"{path}\0{block.locate(record)}"

            yield Block(block.columns, locate, block.input_bytes)


def merged(blocks: Iterator[Block], block_bytes: int) -> Iterator[Block]:
    """Join small blocks of one text column, so that an encoder is not called once for each small file."""
    waiting: list[Block] = []
    size = 0
    for block in blocks:
        column = next(iter(block.columns.values()))
        text_bytes = column.text_bytes if isinstance(column, (Texts, Strings)) else block_bytes
        if len(block.columns) > 1 or text_bytes >= block_bytes // 2:
            if waiting:
                yield _join(waiting)
            waiting, size = [], 0
            yield block
            continue
        waiting.append(block)
        size += text_bytes
        if size >= block_bytes:
            yield _join(waiting)
            waiting, size = [], 0
    if waiting:
        yield _join(waiting)


def _join(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    name = next(iter(blocks[0].columns))
    columns = [block.columns[name] for block in blocks]
    texts = [column.to_texts() for column in columns if isinstance(column, (Texts, Strings))]
    shifts = np.cumsum([0, *(len(column.data) for column in texts[:-1])], dtype=np.int64)
    pairs = list(zip(texts, shifts, strict=True))
    joined = Texts(
        np.concatenate([column.data for column, _ in pairs]),
        np.concatenate([column.starts + shift for column, shift in pairs]),
        np.concatenate([column.stops + shift for column, shift in pairs]),
    )
    firsts = np.cumsum([0, *(len(block) for block in blocks)])

    def locate(record: int) -> str:
        which = int(np.searchsorted(firsts, record, side="right")) - 1
        return blocks[which].locate(record - int(firsts[which]))

    return Block({name: joined}, locate, sum(block.input_bytes for block in blocks))


def _write_shards(
    bench: Workbench, columns: Iterator[tuple[Mapping[str, Column], int]], advance: Advance
) -> Iterator[ShardEntry]:
    builder = ShardBuilder(bench.fields)
    written = 0
    for block, input_bytes in columns:
        before = builder.records
        builder.append(block)
        elements = sum(len(c.values) if hasattr(c, "values") else len(c) for c in block.values())
        advance(input_bytes, builder.records - before, elements)
        if builder.payload_bytes >= bench.largest_shard_bytes:
            yield builder.write(bench.directory)
            builder, written = ShardBuilder(bench.fields), written + 1
    if builder.records or not written:
        yield builder.write(bench.directory)


def read_options_to_json(options: ReadOptions) -> dict[str, Any]:
    return {
        "text_field": options.text_field,
        "fields": [{"name": name, **kept.to_json()} for name, kept in options.fields.items()],
        "split": options.split.value,
        "separator": options.separator.decode(),
        "block_bytes": options.block_bytes,
    }


def read_options_from_json(value: Any) -> ReadOptions:
    return ReadOptions(
        text_field=value["text_field"],
        fields={entry["name"]: Field.from_json(entry) for entry in value["fields"]},
        split=Split(value["split"]),
        separator=value["separator"].encode(),
        block_bytes=value["block_bytes"],
    )


def token_fields(definition: Definition) -> dict[str, Field]:
    return {TOKENS: Field(FieldKind.RAGGED, definition.dtype)}
