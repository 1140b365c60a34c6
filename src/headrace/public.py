"""For functions that users call: what they did wrong is told in a few lines, ending next to their own."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from headrace.errors import BuildError, HeadraceError, StageError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def public(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Leave our own frames out of the traceback of an error that speaks for itself.

    Not of a failure inside a stage or a build, where it may matter how it came about.
    """

    @functools.wraps(function)
    def called(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return function(*arguments, **options)
        except (StageError, BuildError):
            raise
        except HeadraceError as error:
            raise error.with_traceback(None) from error.__cause__

    return called
