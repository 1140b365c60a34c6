"""Fingerprints of functions: equal for equal code, and another one for anything that changes what a function does."""

import functools
import importlib.util
import json
import linecache
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.serve.code import describe_code, differences

MODULE = '''
import numpy as np
from functools import partial

SIZE = 224
MEANS = np.array([0.1, 0.2])

def crop(image, size):
    """Cuts."""
    return image[:size]

class Flip:
    chance = 0.5
    def __init__(self, axis):
        self.axis = axis
    def __call__(self, sample):
        return {"x": np.flip(crop(sample["x"], SIZE), self.axis)}

def augment(sample, rng, strength=1.0):
    # A comment.
    return {"x": crop(sample["x"], SIZE) - MEANS * strength}

def made(scale):
    def inner(sample):
        return {"x": sample["x"] * scale}
    return inner

closed = made(3)
partly = partial(augment, strength=2.0)
flip = Flip(axis=1)
small = lambda sample: {"x": sample["x"] + 1}
'''
NAMES = ["augment", "closed", "partly", "flip", "small"]


def described(folder: Path, source: str) -> dict[str, dict[str, str]]:
    folder.mkdir(exist_ok=True)
    path = folder / "transforms.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("transforms", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["transforms"] = module
    try:
        spec.loader.exec_module(module)
        linecache.clearcache()
        return {name: describe_code(getattr(module, name)) for name in NAMES}
    finally:
        del sys.modules["transforms"]


def test_equal_code_is_equal_wherever_it_is(tmp_path: Path) -> None:
    again = MODULE.replace("    # A comment.\n", "\n    # Another one,\n    # of two lines\n")
    assert described(tmp_path / "a", MODULE) == described(tmp_path / "b", again)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("SIZE = 224", "SIZE = 256", {"augment", "partly", "flip"}),
        ("[0.1, 0.2]", "[0.1, 0.3]", {"augment", "partly"}),
        ("image[:size]", "image[1:size]", {"augment", "partly", "flip"}),
        ("strength=1.0", "strength=1.5", {"augment", "partly"}),
        ("strength=2.0", "strength=2.5", {"partly"}),
        ("made(3)", "made(4)", {"closed"}),
        ("* scale", "* scale * 2", {"closed"}),
        ("axis=1", "axis=0", {"flip"}),
        ("chance = 0.5", "chance = 0.6", {"flip"}),
        ('["x"] + 1', '["x"] + 2', {"small"}),
        ("import numpy as np", "import numpy as np\nUNUSED = 1", set()),
    ],
)
def test_whatever_changes_what_a_function_does(
    tmp_path: Path, before: str, after: str, changed: set[str]
) -> None:
    one, other = described(tmp_path / "a", MODULE), described(tmp_path / "b", MODULE.replace(before, after))
    assert {name for name in NAMES if one[name] != other[name]} == changed


def test_differences_are_named(tmp_path: Path) -> None:
    one = described(tmp_path / "a", MODULE)["augment"]
    other = described(tmp_path / "b", MODULE.replace("SIZE = 224", "SIZE = 256"))["augment"]
    assert differences(one, other) == ["augment > SIZE is another"]
    assert differences({"f": "1", "f > a": "2"}, {"f": "1", "f > b": "2"}) == [
        "f > a is missing",
        "f > b is new",
    ]


def test_functions_of_libraries_are_known_by_name() -> None:
    assert describe_code(np.flip) == {"flip": "numpy: flip"}
    assert describe_code(len) == {"len": "builtins: len"}
    assert describe_code(functools.partial(json.dumps, indent=2))["dumps > indent"] == "2"


def test_what_refers_to_itself_ends() -> None:
    held: list[Any] = [1]
    held.append(held)

    def function(sample: Any) -> Any:
        return held, function

    assert describe_code(function)


def test_python_versions_agree(tmp_path: Path) -> None:
    """Also those that this test does not run on; their interpreters need no packages for it."""
    others = [found for minor in range(11, 15) if (found := shutil.which(f"python3.{minor}"))]
    program = tmp_path / "describe.py"
    program.write_text(
        textwrap.dedent("""
            import json, sys, transforms
            from headrace.serve.code import describe_code
            print(json.dumps(describe_code(transforms.small), sort_keys=True))
        """)
    )
    (tmp_path / "transforms.py").write_text('def small(sample):\n    return {"x": f"{sample[\'x\']}!"}\n')
    source = Path(sys.modules["headrace"].__file__ or "").parents[1]
    outputs: set[str] = set()
    for interpreter in [sys.executable, *others]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(tmp_path)])}
        ran = subprocess.run(
            [interpreter, str(program)], capture_output=True, text=True, env=environment, check=False
        )
        if ran.returncode == 0:
            outputs.add(ran.stdout)
    assert len(outputs) == 1
