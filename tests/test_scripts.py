"""The scripts behind `make quick`, `make test-flaky` and `make test-pythons`, as far as they only think."""

import sys
from pathlib import Path

import pytest

from tests import pythons
from tests.outcomes import Outcome, read_report
from tests.quick import CORE, ROOT, Project, imported_files, neighbours, own_tests

FILES = frozenset(
    {
        "src/headrace/errors.py",
        "src/headrace/workers/__init__.py",
        "src/headrace/workers/crew.py",
        "src/headrace/workers/crew_worker.py",
        "src/headrace/workers/kernel.c",
        "src/headrace/workers/wire.py",
        "src/headrace/torch/loader.py",
        "tests/conftest.py",
        "tests/test_docs.py",
        "tests/workers/jobs.py",
        "tests/workers/conftest.py",
        "tests/workers/test_crew.py",
        "tests/workers/test_crew_deaths.py",
        "tests/workers/test_crews.py",
        "tests/workers/test_kernel.py",
        "tests/torch/test_loader.py",
        "tests/examples/test_classroom.py",
    }
)
IMPORTS = {
    "src/headrace/workers/crew.py": {"src/headrace/workers/wire.py", "src/headrace/errors.py"},
    "src/headrace/torch/loader.py": {"src/headrace/workers/crew.py"},
    "tests/workers/test_crews.py": {"tests/workers/jobs.py", "src/headrace/workers/crew.py"},
    "tests/workers/test_kernel.py": {"src/headrace/workers/crew_worker.py"},
}
PROJECT = Project(FILES, {file: frozenset(imported) for file, imported in IMPORTS.items()})
CREW = {"tests/workers/test_crew.py", "tests/workers/test_crew_deaths.py"}
LOAD = {*CREW, "tests/workers/test_crews.py", "tests/workers/test_kernel.py"}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("src/headrace/workers/crew.py", CREW),
        ("src/headrace/workers/kernel.c", {"tests/workers/test_kernel.py"}),
        # no tests of its name: those that import it, or those of what imports it, or all of the folder
        ("src/headrace/workers/crew_worker.py", {"tests/workers/test_kernel.py"}),
        ("src/headrace/workers/wire.py", CREW),
        ("src/headrace/workers/deleted.py", LOAD),
        ("src/headrace/workers/__init__.py", set()),
        ("src/headrace/errors.py", set()),
        ("tests/workers/test_crew.py", {"tests/workers/test_crew.py"}),
        ("tests/workers/test_deleted.py", set()),
        ("tests/workers/jobs.py", {"tests/workers/test_crews.py"}),
        ("tests/workers/conftest.py", LOAD),
        ("tests/conftest.py", set()),
        ("examples/demo.py", {"tests/examples/test_classroom.py"}),
        ("docs/log.md", {"tests/test_docs.py"}),
        ("pyproject.toml", set()),
    ],
)
def test_a_changed_file_has_these_tests(changed: str, tests: set[str]) -> None:
    assert own_tests(changed, PROJECT) == tests


def test_neighbours_are_one_import_away() -> None:
    crew = neighbours("src/headrace/workers/crew.py", PROJECT)
    assert crew == {"tests/torch/test_loader.py", "tests/workers/test_crews.py"}
    assert neighbours("src/headrace/workers/wire.py", PROJECT) == CREW


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import headrace.workers.wire\nfrom headrace.workers import crew\n"
    source += "def f():\n    from tests.workers.jobs import g\n"
    source += "import json\nfrom headrace import errors as e\n"
    assert imported_files(source, FILES) == {
        "src/headrace/workers/wire.py",
        "src/headrace/workers/crew.py",
        "src/headrace/errors.py",
        "tests/workers/jobs.py",
    }


def test_the_core_is_there() -> None:
    assert [test for test in CORE if not (ROOT / test).exists()] == []


def test_a_report_is_sorted_and_counts_a_test_once() -> None:
    xml = """<testsuites><testsuite>
    <testcase classname="tests.workers.test_crew" name="test_a[1]"/>
    <testcase classname="tests.workers.test_crew" name="test_b"/>
    <testcase classname="tests.workers.test_crew" name="test_b"><error message="at its end"/></testcase>
    <testcase classname="tests.workers.test_crew" name="test_c"><failure message="no"/></testcase>
    <testcase classname="tests.workers.test_crew" name="test_d"><skipped message="needs torch"/></testcase>
    <testcase classname="" name="tests.jax.test_loader"><error message="cannot be imported"/></testcase>
    </testsuite></testsuites>"""
    outcome = Outcome(seconds=61.7, exit_code=1)
    read_report(xml, outcome)
    assert outcome.passed == ["tests.workers.test_crew::test_a[1]"]
    assert outcome.failed == [
        "tests.workers.test_crew::test_b",
        "tests.workers.test_crew::test_c",
        "tests.jax.test_loader",
    ]
    assert outcome.skipped == {"tests.workers.test_crew::test_d": "needs torch"}
    assert str(outcome) == "62 s, 1 passed, 3 failed, 1 skipped"


def test_a_python_that_does_not_run_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shim of pyenv does not, for a version that is installed and not chosen."""
    version = "{}.{}".format(*sys.version_info)
    for patch, program in ((2, f'exec {sys.executable} "$@"'), (10, "exit 127"), (3, "echo 3.1")):
        python = tmp_path / "versions" / f"{version}.{patch}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert pythons.find_python(version) == tmp_path / "versions" / f"{version}.2" / "bin" / "python"
    monkeypatch.setattr(pythons.shutil, "which", lambda name: None)
    assert pythons.find_python("3.9") is None


def test_buffers_must_be_tested_on_every_python() -> None:
    name = "tests.rows.test_buffers::test_a"
    assert pythons.buffers_left_out(Outcome(1, 0, passed=[name]), ["tests"]) == []
    assert pythons.buffers_left_out(Outcome(1, 0, passed=["tests.x::y"]), ["tests"]) != []
    for reason, problems in (("needs torch", 0), ("CPython 3.11 only", 1)):
        outcome = Outcome(1, 0, passed=[name], skipped={"tests.rows.test_buffers::test_b": reason})
        assert len(pythons.buffers_left_out(outcome, ["tests"])) == problems
