from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_texts(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder of text files and gives its path."""

    def write(texts: list[str], name: str = "texts") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
        return folder

    return write
