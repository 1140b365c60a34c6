"""What holds for all tests: files that can be read at once, and that run alone and anywhere."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src"
FILES = sorted(TESTS.rglob("*.py"))
NAMES = [str(file.relative_to(TESTS)) for file in FILES]
MOST_LINES = 450
IMPORTED_WHEN_USED = {"headrace.torch", "headrace.jax"}
"""By the package itself."""


def test_no_file_is_too_long_to_read() -> None:
    lengths = {name: len(file.read_text().splitlines()) for name, file in zip(NAMES, FILES, strict=True)}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_no_folder_of_tests_hides_a_library() -> None:
    """Folders are called as the rooms of the source: torch, jax. They are `tests.torch`, and never just `torch`."""
    on_path = [Path(entry).resolve() for entry in sys.path]
    assert [entry for entry in on_path if entry.is_relative_to(TESTS)] == []
    for file in (*TESTS.iterdir(), *TESTS.glob("*/*")):
        name = file.stem
        found = importlib.util.find_spec(name) if name.isidentifier() and name != "tests" else None
        if found and found.origin:
            assert not Path(found.origin).is_relative_to(TESTS), f"import {name} gives {found.origin}"


def test_every_file_imports_the_modules_that_it_uses() -> None:
    """`headrace.readers.csv.plan` works if someone has imported that module; a file that runs alone must."""
    missing: dict[str, set[str]] = {}
    for name, file in zip(NAMES, FILES, strict=True):
        tree = ast.parse(file.read_text())
        used = {module for chain in _attribute_chains(tree) if (module := _module_in(chain))}
        missing[name] = used - set(_imported(tree)) - IMPORTED_WHEN_USED
    assert {name: modules for name, modules in missing.items() if modules} == {}


def _imported(tree: ast.AST) -> Iterator[str]:
    """The modules that are loaded when a file is, with the packages around them."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _attribute_chains(tree: ast.AST) -> Iterator[list[str]]:
    """['headrace', 'open'] for `headrace.open(...)`."""
    for node in ast.walk(tree):
        chain: list[str] = []
        while isinstance(node, ast.Attribute):
            chain.insert(0, node.attr)
            node = node.value
        if chain and isinstance(node, ast.Name):
            yield [node.id, *chain]


def _module_in(chain: list[str]) -> str | None:
    """The longest beginning of a chain that is a module of ours, if it is not the package itself."""
    if chain[0] != "headrace":
        return None
    for count in range(len(chain), 1, -1):
        place = SOURCES.joinpath(*chain[:count])
        if place.is_dir() or place.with_suffix(".py").is_file():
            return ".".join(chain[:count])
    return None
