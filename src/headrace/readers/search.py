"""Looking for delimiters in content of which only a part should be in memory at a time."""

from headrace.readers.raw_file import Content

_FIRST_BYTES = 2**12
_MOST_BYTES = 2**20


def find(content: Content, delimiter: bytes, start: int, stop: int) -> int:
    """The first occurrence of the delimiter in bytes [start, stop), or -1. Little is read if it is near."""
    step = max(_FIRST_BYTES, 2 * len(delimiter))
    while start < stop:
        end = min(start + step, stop)
        found = content[start:end].tobytes().find(delimiter)
        if found >= 0:
            return start + found
        if end == stop:
            break
        # A delimiter may begin in one part and end in the next.
        start = end - len(delimiter) + 1
        step = min(2 * step, max(_MOST_BYTES, 2 * len(delimiter)))
    return -1


def first_delimiter(
    content: Content, delimiter: bytes, start: int, wanted: int, stop: int | None = None
) -> int:
    """The first delimiter at `wanted` or later that ends by `stop`, as found by reading from `start`, or -1.

    In "x\\n\\n\\ny" two occurrences of "\\n\\n" overlap, and only the first is a delimiter. So go back to where a
    chain of overlapping occurrences begins, and forward from there.
    """
    length = len(delimiter)
    chain = wanted
    while (earlier := _last_before(content, delimiter, start, chain)) >= 0:
        chain = earlier
    end = len(content) if stop is None else stop
    found = find(content, delimiter, chain, end)
    while 0 <= found < wanted:
        found = find(content, delimiter, found + length, end)
    return found


def _last_before(content: Content, delimiter: bytes, start: int, chain: int) -> int:
    """The last occurrence that begins before `chain` and ends after it, or -1."""
    begin = max(start, chain - len(delimiter) + 1)
    found = content[begin : chain + len(delimiter) - 1].tobytes().rfind(delimiter)
    return begin + found if found >= 0 else -1
