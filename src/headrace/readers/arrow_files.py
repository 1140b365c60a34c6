"""Raw files as Arrow opens them: mapped if they are local, and otherwise by reads of what Arrow asks for."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from headrace.readers.raw_file import RawFile
from headrace.store.fetching import fetching
from headrace.store.remote_file import RemoteFile


def arrow_file(raw: RawFile) -> Any:
    """A file that Arrow can seek in."""
    raw.size()  # or an error that says what is wrong
    if raw.path is not None:
        return pa.memory_map(str(raw.path))
    return pa.PythonFile(RemoteFile(raw.content()), mode="r")


class BatchFile:
    """An Arrow file in the file format: its record batches, by number. Threads may share it."""

    def __init__(self, raw: RawFile) -> None:
        self._is_remote = raw.path is None
        file = arrow_file(raw)
        # The batches of a mapped file are views of this buffer.
        self._content = file if self._is_remote else file.read_buffer()
        self._reader: Any = pa.ipc.open_file(self._content)
        self._chosen: list[int] | None = None
        self._lock = threading.Lock()
        self.schema = self._reader.schema

    def __len__(self) -> int:
        count: int = self._reader.num_record_batches
        return count

    def __getitem__(self, number: int) -> Any:
        with self._lock:
            return self._reader.get_batch(number)

    def rows_before(self, number: int) -> int:
        """How many rows the batches before this one have. Compressed batches must be decompressed to count them."""
        return sum(self[each].num_rows for each in range(number))

    def choose(self, columns: list[int], sample: int) -> None:
        """Read only these columns from now on, if that saves anything, as it does for batches like the sample."""
        if columns == self._chosen:
            return
        self._chosen = columns
        if not self._is_remote and self._is_in_place(self[sample]):
            return
        options = pa.ipc.IpcReadOptions(included_fields=columns)
        with self._lock:
            self._reader = pa.ipc.open_file(self._content, options=options)

    def _is_in_place(self, batch: Any) -> bool:
        """Whether a batch can be used where it lies in the mapped file. If so, unwanted columns cost nothing, while
        leaving them out would make Arrow copy the others. If not, it is compressed, and unwanted columns are better
        left out."""
        buffers = [
            buffer for column in batch.columns for buffer in column.buffers() if buffer and buffer.size
        ]
        begin, size = self._content.address, self._content.size
        return all(0 <= buffer.address - begin < size for buffer in buffers)

    def some(self, numbers: list[int]) -> Iterator[Any]:
        """Several batches. The next one of a remote file is fetched while one is in use."""
        following: Future[Any] | None = None
        for place, number in enumerate(numbers):
            batch = self[number] if following is None else following.result()
            if self._is_remote and place + 1 < len(numbers):
                following = fetching().ahead(partial(self.__getitem__, numbers[place + 1]))
            yield batch


def open_batch_stream(raw: RawFile) -> tuple[Any, Any]:
    """An Arrow file in the stream format: a reader, and the file that it reads from beginning to end."""
    file = arrow_file(raw)
    source = file if raw.path is None else pa.BufferReader(file.read_buffer())
    return pa.ipc.open_stream(source), source
