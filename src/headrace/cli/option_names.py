"""Messages of Python functions in the words of the command line.

max_bad_records=-1: must be at least 0     --max-bad-records=-1: must be at least 0
choose it with text_field=NAME             choose it with --text-field NAME
use rebuild=True                           use --rebuild
columns={'a': None, 'b': 'float32'}        --columns a,b=float32
"""

import re
import shlex

import click

_OTHER_NAMES = {"shard_bytes": "shard_size", "format": "input_format"}
"""Arguments of Python functions whose option has another name."""
_OTHER_VALUES = {"eos=False": "--no-eos", "bos=True": "--bos auto"}
_COLUMNS = re.compile(r"columns=\{([^{}]*)\}")
_COLUMN = re.compile(r"'(?P<name>(?:[^'\\]|\\.)*)': (?:None|'(?P<type>[^']*)')|(?P<others>\.\.\.)")
_AFTER_WORD = r"(?![\w'\"(./-])"
_BEFORE_WORD = r"(?<![\w'\"./-])"


def with_option_names(message: str, command: click.Command | None) -> str:
    """The message with settings as they are typed for this command."""
    if command is None:
        return message
    options = {each.name: each for each in command.params if isinstance(each, click.Option) and each.name}
    if "columns" in options:
        message = _COLUMNS.sub(_typed_columns, message)
    for written, typed in _OTHER_VALUES.items():
        if written.partition("=")[0] in options:
            message = re.sub(rf"{_BEFORE_WORD}{written}\b", typed, message)
    for name, option in options.items():
        message = _with_option(message, name, option)
    for name, other in _OTHER_NAMES.items():
        if other in options:
            message = _with_option(message, name, options[other])
    return message


def _with_option(message: str, name: str, option: click.Option) -> str:
    flag = next((each for each in option.opts if each.startswith("--")), None)
    if flag is None:
        return message
    begins = _BEFORE_WORD + re.escape(name)
    if option.is_flag:
        message = re.sub(rf"{begins}=True\b", flag, message)
    message = re.sub(rf"{begins}=(?=[A-Z]+\b)", f"{flag} ", message)
    message = re.sub(rf"{begins}=(?=[\s,;:.)]|$)", flag, message)
    # A name with an underscore is a setting wherever it stands; any other only if a value follows.
    follows = _AFTER_WORD if "_" in name else "(?==)"
    return re.sub(begins + follows, flag, message)


def _typed_columns(match: re.Match[str]) -> str:
    typed = []
    for column in _COLUMN.finditer(match[1]):
        chosen = column["others"] or column["name"]
        typed.append(f"{chosen}={column['type']}" if column["type"] else chosen)
    return f"--columns {shlex.quote(','.join(typed))}"
