"""What to do about a column that cannot be kept as it is, in the words of `headrace.build`."""

from headrace.readers.reader import ReadOptions

_MOST_CHARACTERS = 200


def columns_with(options: ReadOptions, name: str, notation: str) -> str:
    """The setting that keeps all columns of a build but gives one of them another type.

    >>> columns_with(ReadOptions(fields={"a": INT64, "n": INT64}, inferred=("a", "n")), "n", "float64")
    "columns={'a': None, 'n': 'float64'}"
    """
    chosen: dict[str, str | None] = {
        column: None if column in options.inferred else field.notation
        for column, field in options.fields.items()
    }
    chosen[name] = notation
    setting = f"columns={chosen}"
    return setting if len(setting) <= _MOST_CHARACTERS else f"columns={{..., {name!r}: {notation!r}}}"


def remedy_for_missing(options: ReadOptions, name: str) -> str:
    """What to do if a value is missing: only a float can be missing, as NaN."""
    field = options.fields.get(name)
    if field is None:
        return ""  # a text that is to be tokenized
    if field.numpy_dtype.kind in "iu" and not field.variable and not field.shape:
        return f"; only a float can be missing, as NaN, so choose {columns_with(options, name, 'float64')}"
    return "; fill it in, or leave the column out by naming the columns to keep with columns="


def remedy_for_large_integer(options: ReadOptions, name: str, value: int) -> str:
    """What to do about an integer that neither int64 nor float64 holds exactly."""
    rounded = f"{columns_with(options, name, 'float64')} rounds it"
    if 0 <= value < 2**64:
        exact = columns_with(options, name, "uint64")
        return (
            f"; {exact} holds it exactly if all values are such integers and none is negative, and {rounded}"
        )
    return f"; write it as a string in the file to keep every digit, or accept that {rounded}"
