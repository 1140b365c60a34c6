"""What follows the head of an HTTP answer: so many bytes, or chunks, or everything until the connection ends."""

import re
from collections.abc import Mapping

from headrace.store.buffers import Buffers

_READ_AT_ONCE = 1 << 18
_MOST_LINE_BYTES = 1 << 12
_DECIMAL = re.compile(r"[0-9]{1,18}")
_HEXADECIMAL = re.compile(rb"[0-9a-fA-F]{1,12}")
_buffers = Buffers()


class Body:
    """What follows the head of an answer, if its length is known."""

    ends_with_connection = False
    has_more = False
    """Whether something came after the end, where nothing should."""

    def __init__(self, length: int, most_bytes: int) -> None:
        self.length = length
        self.is_too_long = length > most_bytes
        self._memory = _buffers.take(0 if self.is_too_long else length).data
        self._count = 0
        self.is_complete = length == 0

    @property
    def missing(self) -> int:
        return len(self._memory) - self._count

    def space(self) -> memoryview:
        """Where to put what comes next."""
        return self._memory[self._count :]

    def add(self, count: int) -> None:
        self._count += count
        self.is_complete = self._count == len(self._memory)

    def take(self, came: bytes) -> None:
        if not self.is_too_long:
            self.has_more = len(came) > len(self._memory)
            came = came[: len(self._memory)]
            self._memory[: len(came)] = came
            self.add(len(came))

    def content(self) -> memoryview:
        return self._memory


class GrowingBody:
    """What follows the head, if its length is not known: until the connection ends, or in chunks."""

    missing = 1
    length = 0
    """It is not known."""

    def __init__(self, most_bytes: int, is_chunked: bool) -> None:
        self.ends_with_connection = not is_chunked
        self.is_complete = self.is_too_long = self.has_more = False
        self._most_bytes, self._is_chunked = most_bytes, is_chunked
        self._raw, self._content = bytearray(), bytearray()
        self._space = bytearray(_READ_AT_ONCE)

    def space(self) -> memoryview:
        return memoryview(self._space)

    def add(self, count: int) -> None:
        self.take(bytes(self._space[:count]))

    def take(self, came: bytes) -> None:
        if self._is_chunked:
            self._raw += came
            while not self.is_complete and self._take_chunk():
                pass
        else:
            self._content += came
        self.is_too_long |= len(self._content) > self._most_bytes

    def _take_chunk(self) -> bool:
        """Take one chunk, if it is there."""
        end = self._raw.find(b"\r\n")
        if end < 0:
            self.is_too_long = len(self._raw) > _MOST_LINE_BYTES
            return False
        digits = bytes(self._raw[:end]).partition(b";")[0].strip()
        if not _HEXADECIMAL.fullmatch(digits):
            self.is_too_long = True  # nothing that can be read
            return False
        size, begin = int(digits, 16), end + 2
        if len(self._content) + size > self._most_bytes:
            self.is_too_long = True
            return False
        if size == 0:
            # Lines may follow, up to an empty one.
            last = self._raw.find(b"\r\n\r\n", end)
            self.is_complete = last >= 0
            self.is_too_long = not self.is_complete and len(self._raw) > _MOST_LINE_BYTES
            self.has_more = self.is_complete and last + 4 < len(self._raw)
            return False
        if len(self._raw) < begin + size + 2:
            return False
        self._content += self._raw[begin : begin + size]
        del self._raw[: begin + size + 2]
        return True

    def content(self) -> memoryview:
        return memoryview(b"" if self.is_too_long else bytes(self._content))


def body_for(headers: Mapping[str, str], most_bytes: int, has_none: bool) -> Body | GrowingBody:
    length = headers.get("content-length", "")
    is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
    if has_none:
        return Body(0, 0)
    if _DECIMAL.fullmatch(length) and not is_chunked:
        return Body(int(length), most_bytes)
    return GrowingBody(most_bytes, is_chunked)
