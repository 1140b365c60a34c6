"""The tests of what has changed, in about a minute.

    python -m tests.quick                  since the branch left main, and what is not committed
    python -m tests.quick --since HEAD~3

A module's tests are those of its name: src/headrace/load/state.py has tests/load/test_state*.py. Then come, if they
are few, the tests that import the changed module, and those of modules that import it.
"""

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.outcomes import NO_TESTS, ORDINARY

ROOT = Path(__file__).parents[1]
CORE = [
    "tests/test_package.py",
    "tests/test_suite.py",
    "tests/format/test_shard.py",
    "tests/dataset/test_dataset.py",
    "tests/order/test_stream.py",
    "tests/load/test_state.py",
]
"""For changes that have no tests of their own, such as those of pyproject.toml."""

FEW = 10
"""More files of neighbours than this take longer than people wait."""

ENOUGH_SECONDS = 30
"""If a module's own tests took longer, its neighbours' are left out."""


@dataclass(frozen=True)
class Project:
    """The names of all files, and of each Python file those that it imports."""

    files: frozenset[str]
    imports: Mapping[str, frozenset[str]]

    def tests_in(self, folder: PurePosixPath) -> set[str]:
        return {file for file in self.files if is_test(file) and PurePosixPath(file).parent == folder}

    def importers_of(self, file: str) -> set[str]:
        return {importer for importer, imported in self.imports.items() if file in imported}


def is_test(file: str) -> bool:
    path = PurePosixPath(file)
    return path.parts[0] == "tests" and path.name.startswith("test_") and path.suffix == ".py"


def own_tests(changed: str, project: Project) -> set[str]:
    """The tests that belong to a file, none if there is no telling."""
    path = PurePosixPath(changed)
    if is_test(changed):
        return {changed} & project.files
    if path.parts[:2] == ("src", "headrace"):
        return _tests_of_module(path, project)
    if path.parts[0] == "tests":
        return _tests_of_helper(path, project)
    if path.parts[0] in ("benchmarks", "examples"):
        return project.tests_in(PurePosixPath("tests") / path.parts[0])
    if path.suffix == ".md":
        return {"tests/test_docs.py"} & project.files
    return set()


def _tests_of_module(path: PurePosixPath, project: Project) -> set[str]:
    named = _tests_by_name(path, project)
    if named or path.name == "__init__.py":
        return named
    room = _tests_of_room(_test_folder(path), project)
    return neighbours(str(path), project) & room or room


def _tests_by_name(path: PurePosixPath, project: Project) -> set[str]:
    name = f"test_{path.stem}"
    stems = {test: PurePosixPath(test).stem for test in project.tests_in(_test_folder(path))}
    return {test for test, stem in stems.items() if stem == name or stem.startswith(f"{name}_")}


def _test_folder(path: PurePosixPath) -> PurePosixPath:
    return PurePosixPath("tests", *path.parent.parts[2:])


def _tests_of_helper(path: PurePosixPath, project: Project) -> set[str]:
    importers = {file for file in project.importers_of(str(path)) if is_test(file)}
    return importers or _tests_of_room(path.parent, project)


def _tests_of_room(folder: PurePosixPath, project: Project) -> set[str]:
    """All tests of a folder; those beside the rooms are about the whole and belong to no module."""
    return set() if folder == PurePosixPath("tests") else project.tests_in(folder)


def neighbours(changed: str, project: Project) -> set[str]:
    """The tests that import a file, and those of the modules that do."""
    tests: set[str] = set()
    for importer in project.importers_of(changed):
        if is_test(importer):
            tests.add(importer)
        elif importer.startswith("src/"):
            tests |= _tests_by_name(PurePosixPath(importer), project)
    return tests


def read_project() -> Project:
    files = frozenset(_git("ls-files", "--cached", "--others", "--exclude-standard"))
    present = frozenset(file for file in files if (ROOT / file).exists())
    python = [file for file in present if file.startswith(("src/", "tests/")) and file.endswith(".py")]
    return Project(present, {file: imported_files((ROOT / file).read_text(), present) for file in python})


def imported_files(source: str, files: Iterable[str]) -> frozenset[str]:
    """The files of the project that a module imports, anywhere in it."""
    names: set[str] = set()
    try:
        tree = ast.parse(source)
    except SyntaxError:
        # pytest says it better.
        return frozenset()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    places = {"headrace": "src/", "tests": ""}
    wanted = {places.get(name.split(".")[0], "?") + name.replace(".", "/") + ".py" for name in names}
    return frozenset(wanted & set(files))


def changed_files(since: str | None) -> list[str]:
    """What differs from a commit, in commits or not."""
    base = since or _where_the_branch_left_main()
    known = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    if known.returncode:
        sys.exit(f"{base}: no such commit; give --since or QUICK_SINCE one that `git log` shows")
    differing = _git("diff", "--name-only", base)
    return sorted({*differing, *_git("ls-files", "--others", "--exclude-standard")})


def _where_the_branch_left_main() -> str:
    command = ["git", "merge-base", "HEAD", "main"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "HEAD"


def _git(*words: str) -> list[str]:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).splitlines()


def _pytest(tests: Iterable[str]) -> int:
    chosen = sorted(tests)
    print("Running", *chosen, sep="\n  ", flush=True)
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *ORDINARY, *chosen], cwd=ROOT
    ).returncode
    return 0 if code == NO_TESTS else code


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.quick",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--since",
        default=os.environ.get("QUICK_SINCE"),
        help="a commit; the environment's QUICK_SINCE says it too",
    )
    changed = changed_files(parser.parse_args().since)
    project = read_project()
    own = {test for file in changed for test in own_tests(file, project)}
    near = {test for file in changed for test in neighbours(file, project)} - own
    if not own and len(near) <= FEW:
        own, near = near, set()
    if not own:
        print(f"{len(changed)} changed files, and none of them has tests: a few of the core's instead.")
        return _pytest(CORE)
    started = time.monotonic()
    code = _pytest(own)
    if code or not near:
        return code
    if len(near) > FEW or time.monotonic() - started > ENOUGH_SECONDS:
        print(f"Left to `make test`: {len(near)} files of tests that import what has changed.")
        return 0
    return _pytest(near)


if __name__ == "__main__":
    sys.exit(main())
