"""How large the dictionary of a Parquet column is, from the header of its first page.

A header begins with three numbers, as Thrift writes them: the kind of the page (2 for a dictionary), its size, and its
compressed size.
"""

from headrace.readers.raw_file import Content

_DICTIONARY_PAGE = 2
_NEXT_FIELD_IS_INT32 = 0x15
_HEADER_BYTES = 24
_LONGEST_NUMBER = 5


def dictionary_bytes(content: Content, first_page: int) -> int | None:
    """The size of the dictionary page that begins there, decompressed; None if there is no such page."""
    header = bytes(content[first_page : first_page + _HEADER_BYTES])
    kind, place = _number_at(header, 0)
    size, _ = _number_at(header, place)
    return size if kind == _DICTIONARY_PAGE and size is not None and size >= 0 else None


def _number_at(header: bytes, place: int) -> tuple[int | None, int]:
    """The number of the field that begins there, and where the next field begins; None if it is something else."""
    if header[place : place + 1] != bytes([_NEXT_FIELD_IS_INT32]):
        return None, place
    number = 0
    for i, byte in enumerate(header[place + 1 : place + 1 + _LONGEST_NUMBER]):
        # Seven bits in each byte, the lowest first. The last byte is the one below 128.
        number |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return number >> 1 ^ -(number & 1), place + 2 + i
    return None, place
