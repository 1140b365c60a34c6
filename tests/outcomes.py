"""One run of pytest by a script: what passed, failed and was skipped, read from the file that pytest writes."""

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ORDINARY = ["-n", "2", "-m", "not soak"]
"""What `make test` gives to pytest."""

NO_TESTS = 5
"""Pytest's exit code when everything was skipped or deselected."""


@dataclass
class Outcome:
    seconds: float
    exit_code: int
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Tests and why."""

    output: str = ""
    """Only if it was to be kept instead of shown."""

    def __str__(self) -> str:
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        return f"{self.seconds:.0f} s, {counts}"


def environment_of_its_own() -> dict[str, str]:
    """The environment without what would lead Python to other sources, or pytest to other options, and as in make."""
    misleading = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in misleading}


def run_pytest(python: Path, directory: Path, arguments: list[str], *, keep_output: bool = False) -> Outcome:
    """Run pytest in a directory with an interpreter; its output is shown as it comes, or kept."""
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        # Its temporary directories are in this one: their names differ from run to run, and tests must not mind.
        temporary = Path(reports) / "tests"
        fixed = ["-q", f"--junit-xml={report}", f"--basetemp={temporary}"]
        command = [str(python), "-m", "pytest", *fixed, *arguments]
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment_of_its_own(),
            stdout=subprocess.PIPE if keep_output else None,
            stderr=subprocess.STDOUT if keep_output else None,
            text=True,
            errors="replace",
        )
        outcome = Outcome(time.monotonic() - started, done.returncode, output=done.stdout or "")
        if report.exists():
            read_report(report.read_text(), outcome)
    if outcome.exit_code not in (0, NO_TESTS) and not outcome.failed:
        # Pytest died, or never came to the tests: no single one of them can be named.
        outcome.failed.append(f"pytest itself, with exit code {outcome.exit_code}")
    return outcome


def read_report(xml: str, outcome: Outcome) -> None:
    """Sort the tests of a JUnit report into an outcome. One that fails and cannot be torn down stands there twice."""
    passed, failed = dict[str, None](), dict[str, None]()
    for case in ElementTree.fromstring(xml).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed[name] = None
        elif skipped is not None:
            outcome.skipped[name] = skipped.get("message", "")
        else:
            passed[name] = None
    outcome.failed += failed
    outcome.passed += [name for name in passed if name not in failed]
