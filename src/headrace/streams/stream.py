"""A stream of records, and its operations. Every operation returns a new stream and leaves the old one unchanged.

    data = headrace.stream("data/*.jsonl", shuffle=True).tokenize("bytes").pack(seq_len=2048).batch(8)
    for batch in data:
        step(batch["tokens"], batch["labels"])

Each loop is one epoch, and the next loop is the next epoch. A loop that is left early (`break`) and started again
begins where it began before.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from headrace.checks import whole_number
from headrace.load.world import find_world
from headrace.order.world import World
from headrace.public import public
from headrace.streams.bad import StreamBadRecords
from headrace.streams.batch import BatchOperation
from headrace.streams.consumer import Consumer, find_consumer
from headrace.streams.cursor import Cursor, OpenAt, Operation, State
from headrace.streams.function import Filter, Map
from headrace.streams.iteration import StreamIteration
from headrace.streams.pack import ROW_FIELDS, make_pack
from headrace.streams.source import StreamInputs
from headrace.streams.state import Start, describe, from_state, to_state
from headrace.streams.tokenize import make_tokenize


class Stream:
    counts_epochs = True
    """Each loop is another epoch. A DataLoader whose workers are copies must count the epochs for them."""
    counts_reads = True
    """The time spent reading is counted separately: the rest that a loader measures is spent in operations."""

    def __init__(
        self, source: StreamInputs, world: World | None = None, operations: tuple[Operation, ...] = ()
    ) -> None:
        """Without a world, it is the one that torch.distributed or the environment defines when a loop begins."""
        self.inputs, self._world, self._operations = source, world, operations
        self._start = Start()
        """Where the next loop begins."""
        self._latest: StreamIteration | None = None

    # Operations

    @public
    def map(self, function: Callable[[Any], Any]) -> Self:
        """Apply the function to each item."""
        return self._then(Map(function))

    @public
    def filter(self, function: Callable[[Any], Any]) -> Self:
        """Keep the items for which the function returns a true value."""
        return self._then(Filter(function))

    @public
    def batch(self, batch_size: int, *, drop_last: bool = False) -> Self:
        """Combine `batch_size` items at a time; dicts become a dict of columns."""
        return self._then(BatchOperation(whole_number("batch_size", batch_size, 1), drop_last))

    @public
    def tokenize(
        self,
        tokenizer: Any,
        *,
        text_field: str = "text",
        eos: str | bool | None = None,
        bos: str | bool | None = None,
        allow_special: bool = False,
    ) -> Self:
        """Turn the text of each record into `{"tokens": array}`, with the tokens that `headrace.build` would store."""
        return self._then(make_tokenize(tokenizer, text_field, eos=eos, bos=bos, allow_special=allow_special))

    @public
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
        """Pack tokens into rows of `seq_len` tokens with labels, positions, segments and a loss mask, like those of a
        `headrace.Loader`. Best fit packs `buffer` documents at a time."""
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
        other = type(self)(self.inputs, self._world, (*self._operations, operation))
        # The new stream keeps an epoch that was set, but not a place, which counts the items of the old stream.
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
        bad = StreamBadRecords(self.inputs.settings.max_bad_records)

        def open_source(state: State) -> Cursor:
            return self.inputs.open(consumer, epoch, state, bad)

        open_below: OpenAt = open_source
        for operation in self._operations:
            open_below = _opener(operation, open_below, bad)
        return open_below(place)

    @property
    def epoch(self) -> int:
        """The epoch of the latest loop, or of the next one if the latest has ended."""
        return self._now.epoch

    @public
    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop with this epoch; trainers call this before each epoch. A loaded state that belongs to
        this epoch is kept."""
        number = whole_number("epoch", epoch, 0)
        self._start = self._start if self._start.epoch == number else Start(number)
        self._latest = None

    # State

    @cached_property
    def _described(self) -> dict[str, Any]:
        return describe(self.inputs, self._operations)

    @property
    def _now(self) -> Start:
        return self._start if self._latest is None else self._latest.start

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest loop after the last item that it handed out; it can be stored as JSON."""
        return to_state(self._described, self._now)

    @public
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop with the item that follows the saved position."""
        self._start, self._latest = from_state(state, self._described), None

    # How it appears to others

    @property  # type: ignore[misc]  # nobody sets it
    def __class__(self) -> type[Self]:
        # isinstance() looks here: when torch calls it, this must be an IterableDataset. By then torch has been
        # imported, and before that nobody needs to know.
        data = sys.modules.get("torch.utils.data")
        if data is not None and hasattr(data, "IterableDataset"):
            data.IterableDataset.register(Stream)
        return type(self)

    # There is no `__len__`, because the records are not counted.

    def __repr__(self) -> str:
        files = self.inputs.files
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        size = sum(file.bytes for file in files)
        steps = "".join(f".{operation.describe()}" for operation in self._operations)
        return f"stream({count}, {size:,} bytes){steps}"

    def __getstate__(self) -> dict[str, Any]:
        # The rank must be determined here: a worker that has just been started cannot find it out.
        return {**self.__dict__, "_world": self._world or find_world(), "_latest": None}

    def __copy__(self) -> Self:
        """The copy has its own place: each thread that works for a DataLoader has a copy."""
        other = type(self)(self.inputs, self._world, self._operations)
        other._start = self._start
        return other


def _opener(operation: Operation, open_below: OpenAt, bad: StreamBadRecords) -> OpenAt:
    return lambda state: operation.open(open_below, state, bad)
