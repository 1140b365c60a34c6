"""What a user's function does, as a fingerprint: of its source, and of everything that the source refers to.

Two machines give the same rows only if they run the same functions. A function is described by parts, so that a
difference can be named:

    {"augment": "9f0c...", "augment > crop": "51ab...", "augment > SIZE": "224"}

The parts are the source of the function (without comments and blank lines), its defaults and the variables that it
closes over, and the functions, classes and constants of the user's own modules that it names. Nothing depends on the
version of Python, as bytecode would. What belongs to installed packages, or has no source, such as a function typed
into a terminal, is described by its name alone.
"""

import functools
import inspect
import io
import sysconfig
import textwrap
import tokenize
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np

from headrace.format.checksum import checksum

_MOST_DEPTH = 12
_SHORT = 60
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def describe_code(function: Callable[..., Any]) -> dict[str, str]:
    """The parts of a function by their names, each with its value or a checksum."""
    description = _Description()
    description.add(name_of(function), function)
    return description.parts


def name_of(function: Any) -> str:
    """How people call a function: without the place where it was defined."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


class _Description:
    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        """So that nothing gets the number of something else that is gone."""

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        if isinstance(value, types.ModuleType):
            self.parts[name] = f"module {value.__name__}"
        elif isinstance(value, _PLAIN) or _is_builtin(value):
            self.parts[name] = _shortened(_text(value))
        elif id(value) in self._seen or depth > _MOST_DEPTH:
            return
        else:
            self._seen.add(id(value))
            self._kept.append(value)
            self._add_composed(name, value, depth)

    def _add_composed(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, functools.partial):
            self.add(name, value.func, depth + 1)
            self._add_all(name, {str(i): each for i, each in enumerate(value.args)} | value.keywords, depth)
        elif isinstance(value, types.MethodType):
            self.add(name, value.__func__, depth + 1)
            self.add(f"{name} > self", value.__self__, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._add_function(name, value, depth)
        elif isinstance(value, type):
            self._add_class(name, value, depth)
        elif isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
            content = "objects" if array.dtype.hasobject else checksum(array.reshape(-1).view(np.uint8))
            self.parts[name] = f"{array.dtype.str}{list(array.shape)} {content}"
        elif isinstance(value, Mapping):
            self.parts[name] = f"{type(value).__name__} of {len(value)}"
            self._add_all(name, {_text(key): each for key, each in value.items()}, depth)
        elif isinstance(value, list | tuple):
            self.parts[name] = f"{type(value).__name__} of {len(value)}"
            self._add_all(name, {str(number): each for number, each in enumerate(value)}, depth)
        elif hasattr(value, "__wrapped__"):
            self.add(name, value.__wrapped__, depth + 1)
        elif callable(value) and hasattr(value, "__qualname__"):
            self.parts[name] = _qualified(value)
        elif isinstance(value, set | frozenset):
            self.parts[name] = checksum(" ".join(sorted(map(_text, value))).encode())
        else:
            self._add_object(name, value, depth)

    def _add_all(self, name: str, values: Mapping[str, Any], depth: int) -> None:
        for key, each in values.items():
            self.add(f"{name} > {key}", each, depth + 1)

    def _add_function(self, name: str, function: types.FunctionType, depth: int) -> None:
        if not _is_users_own(function):
            self.parts[name] = _qualified(function)
            return
        self.parts[name] = _source(function)
        defaults = {
            parameter.name: parameter.default
            for parameter in _parameters(function)
            if parameter.default is not parameter.empty
        }
        self._add_all(name, defaults | _closed_over(function), depth)
        self._add_all(name, _globals_of(function), depth)

    def _add_class(self, name: str, kind: type, depth: int) -> None:
        if not _is_users_own(kind):
            self.parts[name] = _qualified(kind)
            return
        self.parts[name] = _source(kind)
        for base in kind.__bases__:
            if base is not object:
                self.add(f"{name} > {base.__qualname__}", base, depth + 1)
        for member in vars(kind).values():
            function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
            if isinstance(function, types.FunctionType):
                self._add_all(name, _closed_over(function) | _globals_of(function), depth)

    def _add_object(self, name: str, value: Any, depth: int) -> None:
        """An object with a state: what it is, and what it holds."""
        self.add(name, type(value), depth + 1)
        # The class may have been described before, under another name.
        self.parts.setdefault(name, _qualified(type(value)))
        self._add_all(name, _state_of(value), depth)


def _state_of(value: Any) -> dict[str, Any]:
    held = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                held.setdefault(slot, getattr(value, slot))
    return {name: each for name, each in held.items() if not name.startswith("__")}


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _closed_over(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not set yet
    return found


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """What the function names of its module, in the order of the names: bytecode has them in another one."""
    named = sorted(set(_names_in(function.__code__)))
    return {name: function.__globals__[name] for name in named if name in function.__globals__}


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _source(value: Any) -> str:
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):
        return f"{_qualified(value)}, whose source is not known"
    return checksum(_plain(textwrap.dedent(source)).encode())


def _plain(source: str) -> str:
    """Source without comments, blank lines and spaces at the ends of lines."""
    lines = source.splitlines()
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    except (tokenize.TokenError, SyntaxError, IndentationError):
        pass  # a part of a statement, such as a lambda in the middle of a call
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _is_users_own(value: Any) -> bool:
    """Whether it was defined by the user, and not in Python's or an installed package's files."""
    try:
        file = inspect.getsourcefile(value)
    except TypeError:
        return False
    if file is None:
        return True
    return not file.startswith(_library_folders()) and "site-packages" not in PurePath(file).parts


def _is_builtin(value: Any) -> bool:
    return isinstance(
        value, types.BuiltinFunctionType | np.dtype | np.generic | np.ufunc | Enum | PurePath | range
    )


def _text(value: Any) -> str:
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return _qualified(value)
    if isinstance(value, np.generic):
        return f"{value.dtype.str} {value.item()!r}"
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    return repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[: _SHORT // 2]}... {checksum(text.encode())}"


def _qualified(value: Any) -> str:
    """The package and the name; where it is in the package may change with every version."""
    package = (getattr(value, "__module__", None) or "builtins").partition(".")[0]
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    return f"{package}: {name}"


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """What is not the same, in words."""
    found = [f"{name} is another" for name in here if name in there and here[name] != there[name]]
    found += [f"{name} is missing" for name in here if name not in there]
    found += [f"{name} is new" for name in there if name not in here]
    return found
