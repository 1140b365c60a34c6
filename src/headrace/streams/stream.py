"""A stream of records, and what can be done to it. Every operation gives a new stream and leaves the old one as it is.

    data = headrace.stream("data/*.jsonl", shuffle=True).tokenize("bytes").pack(seq_len=2048).batch(8)
    for batch in data:
        step(batch["tokens"], batch["labels"])

Each loop is one epoch, the next loop the next epoch. A loop that is left early (`break`) and started again begins where
it began.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from headrace.load.world import find_world
from headrace.order.world import World
from headrace.streams.bad import StreamBadRecords
from headrace.streams.batch import BatchOperation
from headrace.streams.consumer import Consumer, find_consumer
from headrace.streams.cursor import Cursor, OpenAt, Operation, State
from headrace.streams.filter import Filter
from headrace.streams.iteration import StreamIteration
from headrace.streams.map import Map
from headrace.streams.pack import ROW_FIELDS, make_pack
from headrace.streams.settings import whole_number
from headrace.streams.source import StreamInputs
from headrace.streams.state import Start, describe, from_state, to_state
from headrace.streams.tokenize import make_tokenize


class Stream:
    counts_epochs = True
    """Each loop is another epoch: a DataLoader whose workers are copies must count for them."""
    counts_reads = True
    """What reading costs is counted apart: the rest that a loader sees is what operations do."""

    def __init__(
        self, source: StreamInputs, world: World | None = None, operations: tuple[Operation, ...] = ()
    ) -> None:
        """Without a world: the one that torch.distributed or the environment tells when a loop begins."""
        self._source, self._world, self._operations = source, world, operations
        self._start = Start()
        """Where the next loop begins."""
        self._latest: StreamIteration | None = None

    # Operations

    def map(self, function: Callable[[Any], Any]) -> Self:
        """What the function makes of each item."""
        return self._then(Map(function))

    def filter(self, function: Callable[[Any], Any]) -> Self:
        """Those items for which the function gives something true."""
        return self._then(Filter(function))

    def batch(self, batch_size: int, *, drop_last: bool = False) -> Self:
        """So many items at a time; of dicts, a dict of columns."""
        return self._then(BatchOperation(whole_number("batch_size", batch_size, 1), drop_last))

    def tokenize(
        self,
        tokenizer: Any,
        *,
        text_field: str = "text",
        eos: str | bool | None = None,
        bos: str | bool | None = None,
        allow_special: bool = False,
    ) -> Self:
        """`{"tokens": array}` for each record's text, as `headrace.build` would store it."""
        return self._then(make_tokenize(tokenizer, text_field, eos=eos, bos=bos, allow_special=allow_special))

    def pack(
        self,
        seq_len: int,
        *,
        packing: str = "best-fit",
        buffer: int = 1024,
        overlong: str = "split",
        labels: str = "shifted",
        dtype: Any = "int64",
        pad_id: int = 0,
        ignore_index: int = -100,
        fields: Sequence[str] = ROW_FIELDS,
        token_field: str = "tokens",
    ) -> Self:
        """Rows of `seq_len` tokens with labels, positions, segments and loss mask, as those of a `headrace.Loader`;
        best fit packs `buffer` documents at a time."""
        options = {
            "seq_len": seq_len,
            "packing": packing,
            "overlong": overlong,
            "labels": labels,
            "dtype": dtype,
            "pad_id": pad_id,
            "ignore_index": ignore_index,
            "fields": fields,
            "token_field": token_field,
        }
        return self._then(make_pack(buffer, options))

    def _then(self, operation: Operation) -> Self:
        other = type(self)(self._source, self._world, (*self._operations, operation))
        # An epoch that was set holds for what is made of the stream; a place is one among other items.
        other._start = Start(self._start.epoch)
        return other

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        def ended(start: Start) -> None:
            if self._latest is iteration:
                self._start = start

        consumer = find_consumer(self._world or find_world())
        iteration = StreamIteration(self._open, self._described, consumer, self._start, ended)
        self._latest = iteration
        return iteration

    def _open(self, consumer: Consumer, epoch: int, place: State) -> Cursor:
        bad = StreamBadRecords(self._source.settings.max_bad_records)

        def open_source(state: State) -> Cursor:
            return self._source.open(consumer, epoch, state, bad)

        open_below: OpenAt = open_source
        for operation in self._operations:
            open_below = _opener(operation, open_below, bad)
        return open_below(place)

    @property
    def epoch(self) -> int:
        """The epoch of the latest loop, or of the next one if that has ended."""
        return self._now.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop with that epoch; trainers call it before each. A state that was loaded and belongs to
        that epoch stays."""
        number = whole_number("epoch", epoch, 0)
        self._start = self._start if self._start.epoch == number else Start(number)
        self._latest = None

    # State

    @cached_property
    def _described(self) -> dict[str, Any]:
        return describe(self._source, self._operations)

    @property
    def _now(self) -> Start:
        return self._start if self._latest is None else self._latest.start

    def state_dict(self) -> dict[str, Any]:
        """Where the latest loop stands after the item handed out last; JSON can hold it."""
        return to_state(self._described, self._now)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop with the very next item."""
        self._start, self._latest = from_state(state, self._described), None

    # What others make of it

    @property  # type: ignore[misc]  # nobody sets it
    def __class__(self) -> type[Self]:
        # isinstance() asks for the class: when it is torch that asks, it shall know that this is an IterableDataset. By
        # then torch is there, and before that nobody needs to know.
        data = sys.modules.get("torch.utils.data")
        if data is not None and hasattr(data, "IterableDataset"):
            data.IterableDataset.register(Stream)
        return type(self)

    # No `__len__`: nobody counts.

    def __repr__(self) -> str:
        files = self._source.files
        steps = "".join(f".{operation.describe()}" for operation in self._operations)
        return f"stream({len(files)} files, {sum(file.bytes for file in files):,} bytes){steps}"

    def __getstate__(self) -> dict[str, Any]:
        # Which rank this is must be known where it is known: a worker that has just been started does not know.
        return {**self.__dict__, "_world": self._world or find_world(), "_latest": None}

    def __copy__(self) -> Self:
        """With a place of its own: threads that work for one DataLoader have a copy each."""
        other = type(self)(self._source, self._world, self._operations)
        other._start = self._start
        return other


def _opener(operation: Operation, open_below: OpenAt, bad: StreamBadRecords) -> OpenAt:
    return lambda state: operation.open(open_below, state, bad)
