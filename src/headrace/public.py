"""For functions that users call: errors about their mistakes are short, and end at their own code."""

import functools
import inspect
import typing
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

from headrace.errors import BuildError, HeadraceError, StageError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def public(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Leave our own frames out of the traceback of an error that explains itself.

    Failures inside a stage or a build keep theirs, because there the path to the failure may matter. If an argument is
    misspelt, the error suggests the right name.
    """

    @functools.wraps(function)
    def called(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return function(*arguments, **options)
        except (StageError, BuildError):
            raise
        except HeadraceError as error:
            raise error.with_traceback(None) from error.__cause__
        except TypeError:
            misspelt = _first_unknown(function, options)
            if misspelt is None:
                raise
            explanation = _unknown_argument(called, misspelt)
        raise TypeError(explanation)

    return called


def public_class(made: type[_Result]) -> type[_Result]:
    """The same for a class whose constructor is made by `dataclass`."""
    made.__init__ = public(made.__init__)  # type: ignore[method-assign]
    return made


def _first_unknown(function: Callable[..., Any], options: Collection[str]) -> str | None:
    known = _names_of_arguments(function)
    return next((name for name in options if known is not None and name not in known), None)


def _unknown_argument(function: Callable[..., Any], name: str) -> str:
    """In Python's own words, with a suggestion."""
    import difflib  # only now: nobody should wait for it who makes no mistake

    near = difflib.get_close_matches(name, _names_of_arguments(function) or (), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint}"


def _names_of_arguments(function: Callable[..., Any]) -> list[str] | None:
    """The names that a function takes; None if it takes any."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(name)
        elif typing.get_origin(parameter.annotation) is typing.Unpack:
            (options,) = typing.get_args(parameter.annotation)
            names += typing.get_type_hints(options)
        else:
            return None
    return names
