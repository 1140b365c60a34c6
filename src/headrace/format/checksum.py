"""One hash for everything that is stored: XXH3 with 128 bits for files and 64 for headers, as lower-case hex."""

from typing import Any

import xxhash


def checksum(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def header_checksum(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def hasher() -> Any:
    """An incremental `checksum`: `update(bytes)`, then `hexdigest()`."""
    return xxhash.xxh3_128()
