"""The records that one consumer gets in one epoch: the blocks that it takes, each read from its beginning.

A state is `[turn, records of that block handed out, bad records before that block]`; resuming reads the block again.
"""

from collections.abc import Iterator

from headrace.errors import StateError
from headrace.observe.counting import now, spent
from headrace.readers.formats import InputFormat
from headrace.readers.reader import reader_for
from headrace.readers.spans import Record, RecordOptions, SpanReader
from headrace.streams.bad import StreamBadRecords
from headrace.streams.blocks import Blocks, Turns
from headrace.streams.blocks_ahead import BlocksAhead
from headrace.streams.cursor import State, count_in, damaged, parts_of


class Readers:
    """The reader of each format, created when it is first needed, so that text files do not load Arrow."""

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._made: dict[InputFormat, SpanReader] = {}

    def __getitem__(self, format: InputFormat) -> SpanReader:
        if format not in self._made:
            self._made[format] = reader_for(format).span_reader(self._options)
        return self._made[format]


class RecordCursor:
    def __init__(
        self, blocks: Blocks, turns: Turns, readers: Readers, bad: StreamBadRecords, state: State = None
    ) -> None:
        self._blocks, self._turns, self._readers, self._bad = blocks, turns, readers, bad
        self._turn: int
        self._before: int
        """How many records of the block were handed out before those in `_chunk`."""
        self._turn, self._before, bad.in_files = (
            (0, 0, 0) if state is None else map(count_in, parts_of(state, 3))
        )
        if self._turn > turns.count:
            raise damaged(state)
        self._bad_before = bad.in_files
        self._skip = self._before
        self._chunk: list[Record] = []
        self._index = 0
        self._chunks: Iterator[list[Record]] | None = None
        self._ahead = BlocksAhead(blocks, turns)

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        while self._index >= len(self._chunk):
            self._next_chunk()
        record = self._chunk[self._index]
        self._index += 1
        return record

    def take(self, count: int) -> list[Record]:
        """Up to `count` records at once. Raises StopIteration if there are none."""
        taken: list[Record] = []
        while len(taken) < count:
            try:
                while self._index >= len(self._chunk):
                    self._next_chunk()
            except StopIteration:
                break
            some = self._chunk[self._index : self._index + count - len(taken)]
            taken += some
            self._index += len(some)
        if not taken:
            raise StopIteration
        return taken

    def state(self) -> State:
        return [self._turn, self._before + self._index, self._bad_before]

    def place(self) -> tuple[int, int]:
        """The position as two numbers, of the block and of the record, that no other consumer has in this epoch."""
        return self._turns.place(self._turn), self._before + self._index

    def _next_chunk(self) -> None:
        if self._chunks is None:
            self._chunks = self._read()
        begun = now()
        chunk = next(self._chunks, None)
        spent("read", begun)
        if chunk is None:
            self._end_block()
            return
        if self._skip:
            skipped = min(self._skip, len(chunk))
            self._skip -= skipped
            chunk = chunk[skipped:]
            if not chunk:
                return
        self._before += self._index
        self._chunk, self._index = chunk, 0

    def _read(self) -> Iterator[list[Record]]:
        try:
            block = self._ahead.take(self._turn)
        except IndexError:
            if self._skip:
                raise damaged(self.state()) from None
            raise StopIteration from None
        path = block.file.path

        def report(where: str, reason: str) -> None:
            self._bad.report_in_file(path, where, reason)

        return self._readers[block.file.format].read(block, report)

    def _end_block(self) -> None:
        if self._skip:
            block = self._blocks[self._turns[self._turn]]
            raise StateError(
                f"{block.file.path}, from byte {block.start}: {self._skip} fewer records than when the state was "
                "saved; the file or max_bad_records has changed since then"
            )
        self._chunks, self._chunk, self._index = None, [], 0
        self._turn, self._before, self._bad_before = self._turn + 1, 0, self._bad.in_files
