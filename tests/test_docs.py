"""Docs run: every Python example in README and docs, as it stands, in an empty directory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from tests.raw_files import put
from tests.scripts import scripts_with, skip_without

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LONG = ("import pytorch_lightning", "from transformers")
"""Libraries that take many seconds to import; the adapters to them have tests of their own."""
EXAMPLES = [
    pytest.param(
        page.name,
        code,
        id=f"{page.name}-{number}",
        marks=[pytest.mark.soak] if any(each in code for each in LONG) else [],
    )
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_the_example_runs(page: str, code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    # A search for settings takes all the time that it is given.
    code = code.replace("budget_seconds=15", "budget_seconds=4")
    if page == "remote.md" or "s3://bucket" in code:
        _run_remotely(code, request.getfixturevalue("s3_place"), tmp_path)
        return
    if "RemoteLoader(" in code:
        _run_with_server(code, tmp_path)
        return
    modules = []
    if re.search(r"^(?:import|from) .*\btorch\b", code, re.MULTILINE):
        skip_without("torch")
        modules.append("torch")
    if "from transformers" in code:
        skip_without("transformers")
    if "import pytorch_lightning" in code:
        skip_without("pytorch_lightning")
        modules.append("torch")
    if page == "README.md":
        # It is meant for a clone of the repository.
        (tmp_path / "docs").symlink_to(ROOT / "docs")
    done = scripts_with(*modules).run(code=code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def _run_remotely(code: str, place: str, folder: Path) -> None:
    """In a process of its own, whose environment names the test's server. There are a dataset, `data`, unless the
    example builds it, and texts in the bucket."""
    if "headrace.build(" not in code:
        headrace.build(ROOT / "docs" / "remote.md", out=folder / "data", tokenizer="bytes")
    for name in "ab":
        put(f"{place}/texts", f"{name}.jsonl", '{"text": "Water falls."}\n' * 50)
    code = code.replace("s3://bucket", place)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr


def _run_with_server(code: str, folder: Path) -> None:
    """With a server of what docs/serve.md serves."""
    data, augmented, *_ = BLOCK.findall((ROOT / "docs" / "serve.md").read_text())
    assert scripts_with().run(code=data, folder=folder).returncode == 0
    (folder / "augmented.py").write_text(augmented)
    address = folder / "s"
    command = [sys.executable, "-m", "headrace", "serve", "augmented:make_loader", "--socket", str(address)]
    with subprocess.Popen([*command, "--workers", "1"], cwd=folder, stdout=subprocess.DEVNULL) as server:
        try:
            code = code.replace("grpc://127.0.0.1:9000", f"unix://{address}")
            done = scripts_with().run(code=code, folder=folder)
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr


def test_an_example_that_fails_is_seen(tmp_path: Path) -> None:
    failed = scripts_with().run(code="import headrace\nheadrace.open('nowhere')\n", folder=tmp_path)
    assert failed.returncode == 1
    assert "nowhere: no such dataset" in failed.stderr
    named = scripts_with().run(code="print(__name__, 'json' in globals())", folder=tmp_path)
    assert (named.returncode, named.stdout, named.stderr) == (0, "__main__ False\n", "")


def test_every_page_that_the_readme_names_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
