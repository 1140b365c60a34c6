"""Where a stream's records come from: files and settings, which are opened for one consumer at one place."""

from dataclasses import dataclass
from functools import cached_property

from headrace.readers.inputs import InputFile
from headrace.streams.bad import StreamBadRecords
from headrace.streams.blocks import Blocks, Turns
from headrace.streams.consumer import Consumer
from headrace.streams.cursor import (
    Cursor,
    GroupCursor,
    State,
    count_in,
    damaged,
    parts_of,
    split_state,
)
from headrace.streams.epochs import Epochs
from headrace.streams.records import Readers, RecordCursor
from headrace.streams.settings import StreamSettings
from headrace.streams.window import ShuffleWindows


@dataclass(frozen=True)
class StreamInputs:
    files: tuple[InputFile, ...]
    settings: StreamSettings

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(self.files, self.settings.block_bytes, self.settings.split)

    def open(self, consumer: Consumer, epoch: int, place: State, bad: StreamBadRecords) -> Cursor:
        """`place` is a state of the cursor, or None for the beginning of the epoch."""
        settings, readers = self.settings, Readers(self.settings.record_options)

        def open_epoch(epoch: int, inner: State) -> Cursor:
            bad.forget()
            seed = settings.seed if settings.shuffle else None
            turns = Turns(self.blocks.count, consumer, epoch, seed)
            if seed is None:
                return RecordCursor(self.blocks, turns, readers, bad, inner)
            begin, handed = split_state(inner)
            records = RecordCursor(self.blocks, turns, readers, bad, begin)
            return GroupCursor(ShuffleWindows(records, settings.buffer, seed, epoch), handed)

        now, inner = (epoch, None) if place is None else parts_of(place, 2)
        is_epoch = now == epoch or (settings.repeat and count_in(now) > epoch)
        if type(now) is not int or not is_epoch:
            raise damaged(place)
        return Epochs(open_epoch, now, inner, repeat=settings.repeat)
