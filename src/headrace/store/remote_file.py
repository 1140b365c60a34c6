"""An object as a file, for libraries that want to read one."""

import io
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class _Bytes(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> NDArray[np.uint8]: ...


class RemoteFile(io.RawIOBase):
    """Reads from the content of an object, wherever one seeks to. It needs no buffer, as the content has one."""

    def __init__(self, content: _Bytes) -> None:
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._content) if size is None or size < 0 else self._position + size
        found = self._content[self._position : stop].tobytes()
        self._position += len(found)
        return found

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        found = self._content[self._position : self._position + len(target)]
        target[: len(found)] = found.data
        self._position += len(found)
        return len(found)
