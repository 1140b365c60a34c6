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


def look(facts: Facts) -> Outcome | None:
    if facts.step is None:
        return None
    try:
        return blocking_copies(facts.step)
    except Exception as error:
        return NotLooked(f"{type(error).__name__}: {error}")


RULE = Rule("blocking-copies", "the step does not wait for its copies", look)


def blocking_copies(function: Callable[..., Any]) -> Outcome:
    """What `.to(device)` and `.cuda()` in the function itself say; what it calls is not looked into."""
    plain = inspect.unwrap(function)
    if not inspect.isroutine(plain):
        plain = vars(type(plain)).get("__call__", plain)
    try:
        lines, first = inspect.getsourcelines(plain)
        file = inspect.getsourcefile(plain) or "?"
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return NotLooked("the step's source code is not to be had")
    found = sorted((call.lineno, text) for call, text in _blocking(tree))
    if not found:
        return []
    # The lines of a function count from where it stands in its file.
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
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        keywords = {each.arg: each.value for each in node.keywords}
        if None in keywords or _is_true(keywords.get("non_blocking")):
            continue
        moves = node.func.attr == "cuda" or (node.func.attr == "to" and _names_device(node, keywords))
        if moves:
            yield (
                node,
                f".{node.func.attr}({', '.join(ast.unparse(each) for each in [*node.args, *node.keywords])})",
            )


def _names_device(call: ast.Call, keywords: dict[str | None, ast.expr]) -> bool:
    """`.to(torch.float16)` moves nothing, and `.to("cpu")` must be waited for."""
    if len(call.args) > 2 and _is_true(call.args[2]):
        return False
    device = keywords.get("device", call.args[0] if call.args else None)
    if device is None or (isinstance(device, ast.Constant) and device.value == "cpu"):
        return False
    return not _is_dtype(device)


def _is_dtype(value: ast.expr) -> bool:
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    whole = name.rstrip("0123456789")
    return "dtype" in name or whole in (
        "float",
        "bfloat",
        "int",
        "uint",
        "bool",
        "half",
        "double",
        "long",
        "complex",
    )


def _is_true(value: ast.expr | None) -> bool:
    """Written as True; a variable may be, and is given the benefit."""
    return value is not None and (not isinstance(value, ast.Constant) or bool(value.value))
