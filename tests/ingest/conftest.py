from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a folder of text files and gives its path, from the directory that the test is in from then on: files are
    grouped by their names, and with the test's own directory in these, the groups would differ from run to run."""
    monkeypatch.chdir(tmp_path)

    def write(texts: list[str], name: str = "texts") -> Path:
        folder = Path(name)
        folder.mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            (folder / f"{number:04d}.txt").write_text(text, encoding="utf-8")
        return folder

    return write
