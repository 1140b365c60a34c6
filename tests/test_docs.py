"""Docs run: every Python example in README and docs, as it stands, in an empty directory."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVER = Path(__file__).parent / "example_server.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(page.name, code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text()))
]

COMMON = ("numpy", "penstock.load.loader")
"""What most examples import: once for all of them. PyTorch only for those that need it, since it takes long to end."""


class Scripts:
    """Runs scripts in processes of their own, forks of one that has imported some modules already."""

    def __init__(self, said: Path, environment: dict[str, str], *modules: str) -> None:
        self._said = said
        self._server = subprocess.Popen(
            [sys.executable, SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, code: str, folder: Path) -> tuple[int, str]:
        """Its exit code, and what it printed."""
        requests, answers = self._server.stdin, self._server.stdout
        assert requests is not None
        assert answers is not None
        self._said.unlink(missing_ok=True)
        request = {"code": code, "folder": str(folder), "said": str(self._said)}
        print(json.dumps(request), file=requests, flush=True)
        exit_code = int(answers.readline())
        return exit_code, self._said.read_text()

    def end(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory, child_environment: dict[str, str]) -> Iterator[Scripts]:
    found = Scripts(tmp_path_factory.mktemp("said") / "said.txt", child_environment, *COMMON)
    yield found
    found.end()


@pytest.fixture(scope="module")
def torch_scripts(
    tmp_path_factory: pytest.TempPathFactory, child_environment: dict[str, str]
) -> Iterator[Scripts]:
    pytest.importorskip("torch", reason="the example needs torch")
    found = Scripts(tmp_path_factory.mktemp("said") / "said.txt", child_environment, *COMMON, "torch")
    yield found
    found.end()


@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_the_example_runs(page: str, code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs_torch = re.search(r"^(?:import|from) .*\btorch\b", code, re.MULTILINE)
    runner: Scripts = request.getfixturevalue("torch_scripts" if needs_torch else "scripts")
    if page == "README.md":
        (tmp_path / "notes").mkdir()
        for name in "abcd":
            (tmp_path / "notes" / f"{name}.txt").write_text(f"note {name}")
    exit_code, said = runner.run(code, tmp_path)
    assert exit_code == 0, said


def test_an_example_that_fails_is_seen(tmp_path: Path, scripts: Scripts) -> None:
    exit_code, said = scripts.run("import penstock\npenstock.open('nowhere')\n", tmp_path)
    assert exit_code == 1
    assert "nowhere: no such dataset" in said
    assert scripts.run("print(__name__, sorted(globals()).count('json'))", tmp_path) == (0, "__main__ 0\n")


def test_every_page_that_the_readme_names_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
