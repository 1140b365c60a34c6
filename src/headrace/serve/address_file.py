"""A file that lists servers, for clients that read it again when it changes (`file:///path`)."""

from collections.abc import Sequence
from pathlib import Path

from headrace.errors import SettingsError
from headrace.store.files import write_atomic


class AddressFile:
    """Readers see the old list or the new one, and never a part of one."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._listed: list[str] | None = None
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise SettingsError(
                f"addresses_file={str(path)!r}: give the path of a file in a directory that exists"
            )

    def write(self, addresses: Sequence[str]) -> None:
        """List these, unless the file does already."""
        if list(addresses) == self._listed:
            return
        lines = ["# servers of headrace; see headrace serve --help", *addresses, ""]
        write_atomic(self.path, ["\n".join(lines).encode()])
        self._listed = list(addresses)
