"""What a Writer keeps in `.build` until its dataset is complete, so that another Writer can go on.

    .build/writer.json              how the Writer was begun
    .build/shards/<number>.json     a finished shard

A shard counts if it and all shards before it have a note and are whole.
"""

import itertools
from collections.abc import Iterator, Mapping

import msgspec

from headrace.format.manifest import ShardEntry
from headrace.format.workplace import WRITER_STATE_NAME
from headrace.store.store import Store, write_file


class WriterState(msgspec.Struct, frozen=True):
    """How a Writer was begun. Only one that was begun in the same way may go on."""

    fields: Mapping[str, str]
    shard_bytes: int
    replaces: str | None
    """The checksum of the dataset that was there at the beginning."""


class WriterNotes:
    def __init__(self, out: Store, folder: Store) -> None:
        self._out, self._folder = out, folder
        self._notes = folder.folder("shards")

    def read_state(self) -> WriterState | None:
        """None if no Writer was interrupted here."""
        try:
            return msgspec.json.decode(self._folder.read(WRITER_STATE_NAME), type=WriterState)
        except (OSError, ValueError):
            return None

    def write_state(self, state: WriterState) -> None:
        write_file(self._folder, WRITER_STATE_NAME, [msgspec.json.encode(state)])

    def shards(self) -> list[ShardEntry]:
        """The shards that are safe."""
        return list(itertools.takewhile(self._is_whole, self._entries()))

    def _entries(self) -> Iterator[ShardEntry]:
        for number in itertools.count():
            try:
                yield msgspec.json.decode(self._notes.read(_note_name(number)), type=ShardEntry)
            except (OSError, ValueError):
                return

    def _is_whole(self, entry: ShardEntry) -> bool:
        try:
            return self._out.status(entry.stored.file).bytes == entry.stored.bytes
        except OSError:
            return False

    def keep(self, number: int, entry: ShardEntry) -> None:
        self._notes.create()  # an interrupted `close` may have removed it
        write_file(self._notes, _note_name(number), [msgspec.json.encode(entry)])

    def remove(self) -> None:
        self._notes.remove_all()
        self._folder.remove(WRITER_STATE_NAME)


def _note_name(number: int) -> str:
    return f"{number:08d}.json"
