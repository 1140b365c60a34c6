"""The names of files as text that can be stored and printed, although a file's name may be any bytes.

A name that is UTF-8 stands for itself. Any other name is written as Python writes bytes:

    notes/a.txt                    notes/a.txt
    the bytes of notes/\\xff.txt    b'notes/\\xff.txt'
"""

import ast
import os
from pathlib import Path

_BYTES_PREFIXES = ("b'", 'b"')


def to_name(path: str) -> str:
    # A path that looks like bytes is written as bytes, so that every name stands for one path only.
    if _is_utf8(path) and not path.startswith(_BYTES_PREFIXES):
        return path
    return repr(os.fsencode(path))


def to_path(name: str) -> Path:
    if not name.startswith(_BYTES_PREFIXES):
        return Path(name)
    return Path(os.fsdecode(ast.literal_eval(name)))


def without_bucket(name: str) -> str:
    """The name of an input without the bucket that it is in: `notes/a.txt` for `s3://bucket/notes/a.txt`."""
    _, is_address, place = name.partition("://")
    return place.partition("/")[2] if is_address else name


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
