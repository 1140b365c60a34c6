"""Messages of Python functions in the words of a command, and that Python functions do not use a command's words."""

import ast
import importlib
import re
from pathlib import Path

import click
import pytest

import headrace
from headrace.cli.option_names import with_option_names


def _command(name: str) -> click.Command:
    command: click.Command = importlib.import_module(f"headrace.cli.{name}").command
    return command


@pytest.mark.parametrize(
    ("python", "typed"),
    [
        ("max_bad_records=-1: must be", "--max-bad-records=-1: must be"),
        ("max_bad_records is 0", "--max-bad-records is 0"),
        ("use rebuild=True to build", "use --rebuild to build"),
        ("name it with text_field=NAME", "name it with --text-field NAME"),
        ("or name them with columns=, or", "or name them with --columns, or"),
        ("to keep with columns=", "to keep with --columns"),
        ("columns={'a': None, 'b': 'float32[3,4]'} keeps", "--columns 'a,b=float32[3,4]' keeps"),
        ("columns={..., 'b': 'float32'}", "--columns ...,b=float32"),
        ("a smaller shard_bytes= helps", "a smaller --shard-size helps"),
        ("with format='jsonl'", "with --format='jsonl'"),
        ("eos=TOKEN, or use eos=False", "--eos TOKEN, or use --no-eos"),
        ("bos=True: is", "--bos auto: is"),
        ("in 'max_bad_records=1'", "in 'max_bad_records=1'"),
        ("the columns are", "the columns are"),
    ],
)
def test_settings_are_named_as_they_are_typed(python: str, typed: str) -> None:
    assert with_option_names(python, _command("build")) == typed


def test_other_commands_have_other_options() -> None:
    assert with_option_names("columns= and batch_size=3", _command("show")).startswith("columns= and")
    assert with_option_names("overwrite=True", _command("export")) == "--overwrite"
    assert with_option_names("overwrite=True", None) == "overwrite=True"


FOLDERS = ("readers", "ingest", "streams", "tokenizers", "format", "store")
"""What both Python functions and commands use."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_name_no_options(folder: str) -> None:
    place = Path(headrace.__file__).parent / folder
    modules = sorted(place.glob("*.py"))
    assert modules
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value)
                assert not named, f"{module.name}: {node.value!r}"
