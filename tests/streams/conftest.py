from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    """Write a file anew: property tests do so hundreds of times."""
    folder = tmp_path_factory.mktemp("files")

    def write_file(name: str, content: bytes) -> Path:
        path = folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        return path

    return write_file
