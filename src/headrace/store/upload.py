"""What is about to be uploaded: kept in memory while it is small, and in a temporary file when it is not."""

import re
import tempfile
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from headrace.store.files import no_space

PART_BYTES = 16 << 20
"""What is larger is uploaded in parts of this size."""
_CONTENT_NAME = re.compile(r"-[0-9a-f]{16,32}\.\w+$|^[0-9a-f]{32}\.\w+$")


def is_content_name(name: str) -> bool:
    """Whether a name contains the checksum of the file: there is only one content for such a name."""
    return _CONTENT_NAME.search(name) is not None


class Spool:
    """A file to write to, whose content is uploaded afterwards."""

    def __init__(self) -> None:
        self._file: Any = tempfile.SpooledTemporaryFile(max_size=PART_BYTES)  # noqa: SIM115

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def file(self) -> BinaryIO:
        return cast(BinaryIO, _Guarded(self._file))

    @property
    def size(self) -> int:
        return int(self._file.seek(0, 2))

    def content(self) -> bytes:
        """All of it, in memory."""
        self._file.seek(0)
        return bytes(self._file.read())

    def rewound(self) -> IO[bytes]:
        self._file.seek(0)
        return cast("IO[bytes]", self._file)


class _Guarded:
    """A file whose disk may be full."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: Any) -> int:
        with no_space(Path(tempfile.gettempdir())):
            return int(self._file.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
