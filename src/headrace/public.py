"""For functions that users call: tracebacks of their mistakes are short and end at their own code."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from headrace.errors import BuildError, HeadraceError, StageError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def public(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Leave our own frames out of the traceback of an error that explains itself.

    Failures inside a stage or a build keep theirs, because there the path to the failure may matter.
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
