"""One task: read slices, tokenize or take columns, write shards. It runs in any process and knows no other task."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.format.checksum import checksum
from headrace.format.container import StoredFile
from headrace.format.fields import Field, FieldKind
from headrace.format.manifest import ShardEntry
from headrace.format.ragged import Ragged
from headrace.format.shard import Column, ShardBuilder
from headrace.ingest.plan import BuildTask, Slice
from headrace.ingest.results import BadRecord, TaskResult, too_many
from headrace.readers.bad_records import encodable
from headrace.readers.columns import Strings, Texts
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile
from headrace.readers.raw_file import RawFile
from headrace.readers.reader import ReadOptions, reader_for
from headrace.store.address import open_store
from headrace.store.store import Store
from headrace.tokenizers.definition import Definition
from headrace.tokenizers.encoders import Encoder
from headrace.tokenizers.parity import load_encoder
from headrace.tokenizers.tokenizer import tokenize

TOKENS = "tokens"
_SLICED_BY_BYTES = (InputFormat.TEXT, InputFormat.JSONL, InputFormat.CSV)
_MOST_SLICES_AHEAD, _MOST_BYTES_AHEAD = 8, 16 * 2**20
KEPT_BAD_RECORDS = 1000
"""How many bad records of one task are listed by name; all are counted."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Everything that a task needs besides its slices, and the same for every task of a build. It is plain data and can
    be sent anywhere: it includes the tokenizer with all its content."""

    out: str
    """The name of the store that shards go to."""
    fields: Mapping[str, Field]
    options: ReadOptions
    largest_shard_bytes: int
    max_bad_records: int
    definition: Definition | None = None
    local_stage: str = ""
    """The directory of the stage of a shuffled build, if that is not in the store (`gather.py`)."""
    encoder: str = ""
    """Which of the tokenizer's encoders is used."""


@dataclass(frozen=True)
class Workbench:
    """Task settings in use: the store is open and the encoder is loaded."""

    settings: TaskSettings
    store: Store
    encoder: Encoder | None

    @staticmethod
    def prepare(settings: TaskSettings, store: Store | None = None) -> "Workbench":
        """`store` is the store that the settings name, if the caller has already opened it."""
        encoder = None
        if settings.definition and settings.encoder:
            encoder = load_encoder(settings.definition, settings.encoder)
        return Workbench(settings, store or open_store(settings.out), encoder)


Advance = Callable[[int, int, int], None]
"""Called with (input bytes, records, elements) as a task goes on."""


def run_task(task: BuildTask, bench: Workbench, advance: Advance) -> TaskResult:
    fingerprints = fingerprints_of(task)
    bad = BadRecords(bench.settings.max_bad_records)
    shards = list(_write_shards(bench, _columns(task, bench, bad), advance))
    most = bench.settings.options.max_record_bytes
    return TaskResult(task.slices, fingerprints, shards, bad.count, bad.listed, most)


def still_holds(task: BuildTask, result: TaskResult, bench: Workbench) -> bool:
    """Whether an earlier result is what the task would give now: the same input, and shards that are still there."""
    if result.bad_count and result.max_record_bytes != bench.settings.options.max_record_bytes:
        return False
    return fingerprints_of(task) == list(result.fingerprints) and all_there(bench.store, result.shards)


def fingerprints_of(task: BuildTask) -> list[str]:
    """For each slice, a text that is another one if its content is."""
    return [_fingerprint(piece, file) for piece, file in zip(task.slices, task.files, strict=True)]


def _fingerprint(piece: Slice, file: InputFile) -> str:
    raw = file.raw()
    version = raw.version()
    if version is not None:
        return version
    return reader_for(piece.format).fingerprint(raw, piece.start, piece.stop)


def all_there(store: Store, shards: Sequence[ShardEntry]) -> bool:
    """Whether all of these shards are still complete and undamaged; otherwise they are built again."""
    try:
        return all(_is_there(store, shard.stored) for shard in shards)
    except OSError:
        return False


def _is_there(store: Store, stored: StoredFile) -> bool:
    if store.is_remote:
        # An object gets its name whole or not at all, and a server checks what it keeps; reading it takes long.
        return store.status(stored.file).bytes == stored.bytes
    return checksum(store.view(stored.file)) == stored.checksum


@dataclass
class BadRecords:
    """Counts bad records and stops the task when there are more than allowed."""

    allowed: int
    count: int = 0
    listed: list[BadRecord] = field(default_factory=list)

    def report(self, path: str, where: str, reason: str) -> None:
        self.count += 1
        record = BadRecord(path, where, encodable(reason))
        if len(self.listed) < KEPT_BAD_RECORDS:
            self.listed.append(record)
        if self.count > self.allowed:
            raise too_many(self.count, self.allowed, record)


@dataclass(frozen=True)
class TaskBlock:
    """Some records of a task. `locate(i)` gives the path of record i's file, and its place in that file."""

    columns: Mapping[str, Column | Texts | Strings]
    locate: Callable[[int], tuple[str, str]]
    input_bytes: int

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def _columns(
    task: BuildTask, bench: Workbench, bad: BadRecords
) -> Iterator[tuple[Mapping[str, Column], int]]:
    """Columns that are ready for a shard, each with the number of input bytes that they were made from."""
    settings = bench.settings
    for block in merged(_blocks(task, settings, bad), settings.options.block_bytes):
        if settings.definition is None or bench.encoder is None:
            yield {name: _plain(column) for name, column in block.columns.items()}, block.input_bytes
            continue
        texts = next(iter(block.columns.values()))

        def report(record: int, reason: str, block: TaskBlock = block) -> None:
            path, where = block.locate(record)
            bad.report(path, where, reason)

        if isinstance(texts, (Texts, Strings)):
            yield {TOKENS: tokenize(texts, settings.definition, bench.encoder, report)}, block.input_bytes


def _plain(column: Column | Texts | Strings) -> Column:
    return column.to_ragged() if isinstance(column, (Texts, Strings)) else column


def _blocks(task: BuildTask, settings: TaskSettings, bad: BadRecords) -> Iterator[TaskBlock]:
    """The blocks of all slices."""
    for piece, raw in _with_next_fetched(task):

        def report(where: str, reason: str, path: str = piece.path) -> None:
            bad.report(path, where, reason)

        reader = reader_for(piece.format)
        for block in reader.read(raw, piece.start, piece.stop, settings.options, report):

            def locate(
                record: int, where: Callable[[int], str] = block.locate, path: str = piece.path
            ) -> tuple[str, str]:
                return path, where(record)

            yield TaskBlock(block.columns, locate, block.input_bytes)


def _with_next_fetched(task: BuildTask) -> Iterator[tuple[Slice, RawFile]]:
    """The slices with their files. Of remote ones, the beginnings of the next ones are fetched while one is read."""
    waiting: deque[tuple[Slice, RawFile]] = deque()
    sizes: deque[int] = deque()
    for piece, file in zip(task.slices, task.files, strict=True):
        raw = file.raw()
        if piece.format in _SLICED_BY_BYTES:
            raw.expect([(piece.start, piece.stop)])
        elif file.is_small:
            raw.expect([(0, file.bytes)])
        waiting.append((piece, raw))
        sizes.append(file.bytes)
        # The first one is not ahead: it is read next.
        while len(sizes) > _MOST_SLICES_AHEAD or sum(sizes) - sizes[0] > _MOST_BYTES_AHEAD:
            sizes.popleft()
            yield waiting.popleft()
    yield from waiting


def merged(blocks: Iterator[TaskBlock], block_bytes: int) -> Iterator[TaskBlock]:
    """Join small blocks of one text column, so that an encoder is not called once for each small file."""
    waiting: list[TaskBlock] = []
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


def _join(blocks: list[TaskBlock]) -> TaskBlock:
    if len(blocks) == 1:
        return blocks[0]
    name = next(iter(blocks[0].columns))
    columns = [block.columns[name] for block in blocks]
    texts = [column.to_texts() for column in columns if isinstance(column, (Texts, Strings))]
    input_bytes = sum(block.input_bytes for block in blocks)
    return TaskBlock({name: _join_texts(texts)}, _join_locate(blocks), input_bytes)


def _join_texts(texts: list[Texts]) -> Texts:
    sizes = [len(column.data) for column in texts]
    # Where the bytes of each column begin among those of all columns.
    shifts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    shifted = list(zip(texts, shifts, strict=True))
    return Texts(
        np.concatenate([column.data for column in texts]),
        np.concatenate([column.starts + shift for column, shift in shifted]),
        np.concatenate([column.stops + shift for column, shift in shifted]),
    )


def _join_locate(blocks: list[TaskBlock]) -> Callable[[int], tuple[str, str]]:
    """The `locate` of all these blocks joined into one."""
    counts = [len(block) for block in blocks]
    firsts = np.cumsum([0, *counts])

    def locate(record: int) -> tuple[str, str]:
        which = int(np.searchsorted(firsts, record, side="right")) - 1
        return blocks[which].locate(record - int(firsts[which]))

    return locate


def _write_shards(
    bench: Workbench, columns: Iterator[tuple[Mapping[str, Column], int]], advance: Advance
) -> Iterator[ShardEntry]:
    builder = ShardBuilder(bench.settings.fields)
    written = 0
    for block, input_bytes in columns:
        before = builder.records
        builder.append(block)
        elements = sum(_count_elements(column) for column in block.values())
        advance(input_bytes, builder.records - before, elements)
        if builder.payload_bytes >= bench.settings.largest_shard_bytes:
            yield builder.write(bench.store)
            builder, written = ShardBuilder(bench.settings.fields), written + 1
    if builder.records or not written:
        yield builder.write(bench.store)


def _count_elements(column: Column) -> int:
    return len(column.values) if isinstance(column, Ragged) else len(column)


def token_fields(definition: Definition) -> dict[str, Field]:
    return {TOKENS: Field(FieldKind.RAGGED, definition.dtype)}
