"""Copies to an accelerator that the step waits for, found in its source code.

def step(batch):
    x = batch["x"].to("cuda")                          # found: line 2
    y = batch["y"].to("cuda", non_blocking=True)       # fine
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from headrace.observe.facts import Facts
from headrace.observe.findings import Finding, Level, NotLooked, Outcome, Rule

_SHOWN = 4
_DTYPES = ("float", "bfloat", "int", "uint", "bool", "half", "double", "long", "complex")
"""Names of types, without their numbers of bits."""


def look(facts: Facts) -> Outcome | None:
    if facts.step is None:
        return None
    try:
        return blocking_copies(facts.step)
    except Exception as error:
        return NotLooked(f"{type(error).__name__}: {error}")


RULE = Rule("blocking-copies", "the step does not wait for its copies", look)


def blocking_copies(function: Callable[..., Any]) -> Outcome:
    """Looks for `.to(device)` and `.cuda()` in the function itself, not in what it calls."""
    plain = inspect.unwrap(function)
    if not inspect.isroutine(plain):
        plain = vars(type(plain)).get("__call__", plain)
    try:
        lines, first = inspect.getsourcelines(plain)
        file = inspect.getsourcefile(plain) or "?"
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return NotLooked("the source code of the step is not available")
    found = sorted((call.lineno, text) for call, text in _blocking(tree))
    if not found:
        return []
    # Line numbers in the tree count from the beginning of the function.
    where = [f"{file}:{first + max(0, number - 1)}: {text}" for number, text in found]
    more = f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else ""
    return [
        Finding(
            "blocking-copies",
            Level.WARNING,
            f"The step waits for its copies: {'; '.join(where[:_SHOWN])}{more}",
            "Give non_blocking=True, with batches in page-locked memory (pin_memory=True), or let "
            "headrace.torch.Loader(device=...) copy ahead of the step",
        )
    ]


def _blocking(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """The calls that copy and wait, each with its text without what it is called on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            if _copies_and_waits(node, method):
                arguments = [ast.unparse(each) for each in [*node.args, *node.keywords]]
                yield node, f".{method}({', '.join(arguments)})"


def _copies_and_waits(call: ast.Call, method: str) -> bool:
    keywords = {each.arg: each.value for each in call.keywords}
    # `**options` has no name, and may hold non_blocking.
    if None in keywords or _is_true(keywords.get("non_blocking")):
        return False
    return method == "cuda" or (method == "to" and _names_device(call, keywords))


def _names_device(call: ast.Call, keywords: dict[str | None, ast.expr]) -> bool:
    """`.to(torch.float16)` moves nothing, and `.to("cpu")` must be waited for."""
    if len(call.args) > 2 and _is_true(call.args[2]):
        return False
    device = keywords.get("device", call.args[0] if call.args else None)
    if device is None or (isinstance(device, ast.Constant) and device.value == "cpu"):
        return False
    return not _is_dtype(device)


def _is_dtype(value: ast.expr) -> bool:
    if isinstance(value, ast.Attribute):
        name = value.attr
    elif isinstance(value, ast.Name):
        name = value.id
    else:
        return False
    return "dtype" in name or name.rstrip("0123456789") in _DTYPES


def _is_true(value: ast.expr | None) -> bool:
    """Whether it is written as True, or may be: anything but a constant gets the benefit of the doubt."""
    return value is not None and (not isinstance(value, ast.Constant) or bool(value.value))
