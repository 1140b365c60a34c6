"""Which texts contain characters that libraries may classify differently.

Encoders split a text by the classes of its characters (letter, digit, ...), according to the tables of the Unicode
version that they were compiled with. A character that is newer than one of the tables is a letter to one library and
unassigned to another:

    U+323B0 ":" "A"     tables of 2024: nothing, ":", "A"       tables of 2025: a letter, ":A"

So texts with such characters are left to the reference encoder. These characters are those that Python's own tables do
not contain, and those that were added in version 17, which some of the libraries know and others do not.
"""

import functools
import sys
import unicodedata

import numpy as np
from numpy.typing import NDArray

from headrace.readers.columns import Texts

_UNICODE_17 = (
    *((0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0x20C1, 0x20C1)),
    *((0x2B96, 0x2B96), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4), (0xA7F1, 0xA7F1)),
    *((0xFBC3, 0xFBD2), (0xFD90, 0xFD91), (0xFDC8, 0xFDCE), (0x10940, 0x10959), (0x10EC5, 0x10EC7)),
    *((0x10ED0, 0x10ED8), (0x10EFA, 0x10EFB), (0x11B60, 0x11B67), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9)),
    *((0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E)),
    *((0x18D80, 0x18DF2), (0x1CCFA, 0x1CCFC), (0x1CEBA, 0x1CED0), (0x1CEE0, 0x1CEF0), (0x1E6C0, 0x1E6FF)),
    *((0x1F6D8, 0x1F6D8), (0x1F777, 0x1F77A), (0x1F8D0, 0x1F8D8), (0x1FA54, 0x1FA57), (0x1FA8A, 0x1FA8A)),
    *((0x1FA8E, 0x1FA8E), (0x1FAC8, 0x1FAC8), (0x1FACD, 0x1FACD), (0x1FAEA, 0x1FAEA), (0x1FAEF, 0x1FAEF)),
    *((0x1FBFA, 0x1FBFA), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479)),
)
_PLANES_IN_USE = ((0, 0x40000), (0xE0000, 0xE0200))
_PRIVATE_USE = ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
"""Nothing else is assigned, in any version. To look up only these takes a fifth of the time."""

_FIRST_OF_THREE = 0xE0
"""Characters whose UTF-8 has three bytes or more begin with this byte or a higher one."""
_CHUNK_BYTES = 2**17
"""Small enough for everything that is computed about one chunk to stay in the processor's cache."""


def find_disputed(texts: Texts) -> NDArray[np.intp]:
    """The numbers of the texts (which are valid UTF-8) that contain such a character."""
    data = texts.data
    chunks = [_found(data, start) for start in range(0, len(data), _CHUNK_BYTES)]
    found = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.intp)
    if not len(found):
        return found
    before_start = np.searchsorted(found, texts.starts)
    before_stop = np.searchsorted(found, texts.stops)
    return np.flatnonzero(before_stop > before_start)


def _found(data: NDArray[np.uint8], start: int) -> NDArray[np.intp]:
    """Where such characters begin in one chunk. No character of one or two bytes is disputed, and most others can be
    excluded by their first two bytes."""
    chunk = data[start : start + _CHUNK_BYTES]
    leads = np.flatnonzero(chunk >= _FIRST_OF_THREE) + start
    if len(leads):
        pairs = data[leads].astype(np.uint16) << 8
        pairs |= data[np.minimum(leads + 1, len(data) - 1)]
        leads = leads[_suspect_pairs()[pairs]]
    if len(leads):
        leads = leads[_table()[_code_points(data, leads)]]
    return leads


def _code_points(data: NDArray[np.uint8], leads: NDArray[np.intp]) -> NDArray[np.uint32]:
    last = len(data) - 1
    lead, second, third, fourth = (data[np.minimum(leads + i, last)].astype(np.uint32) for i in range(4))
    short = (lead & 0x0F) << 12 | (second & 0x3F) << 6 | third & 0x3F
    long = (lead & 0x07) << 18 | (second & 0x3F) << 12 | (third & 0x3F) << 6 | fourth & 0x3F
    # Bytes between the texts may be anything.
    return np.minimum(np.where(lead < 0xF0, short, long), sys.maxunicode).astype(np.uint32)


@functools.cache
def _table() -> NDArray[np.bool_]:
    table = np.ones(sys.maxunicode + 1, dtype=np.bool_)
    for first, stop in _PLANES_IN_USE:
        categories = map(unicodedata.category, map(chr, range(first, stop)))
        table[first:stop] = np.frombuffer(bytes(map("Cn".__eq__, categories)), dtype=np.bool_)
    for first, stop in _PRIVATE_USE:
        table[first:stop] = False
    for first, last in _UNICODE_17:
        table[first : last + 1] = True
    return table


@functools.cache
def _suspect_pairs() -> NDArray[np.bool_]:
    """The first two bytes of the UTF-8 of any such character, as one number."""
    points = np.flatnonzero(_table()).astype(np.uint32)
    points = points[points >= 0x800]
    short = (0xE0 | points >> 12) << 8 | 0x80 | points >> 6 & 0x3F
    long = (0xF0 | points >> 18) << 8 | 0x80 | points >> 12 & 0x3F
    suspect = np.zeros(2**16, dtype=np.bool_)
    suspect[np.where(points < 0x10000, short, long)] = True
    return suspect
