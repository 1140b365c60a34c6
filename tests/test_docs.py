"""Docs run: every Python example in README and docs, as it stands, in an empty directory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    (page.name, number, code) for page in PAGES for number, code in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize(
    ("page", "number", "code"), EXAMPLES, ids=[f"{page}-{number}" for page, number, _ in EXAMPLES]
)
def test_the_example_runs(page: str, number: int, code: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir() if page == "README.md" else None
    if page == "README.md":
        for name in "abcd":
            (tmp_path / "notes" / f"{name}.txt").write_text(f"note {name}")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_page_that_the_readme_names_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
