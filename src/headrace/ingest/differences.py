"""How the settings of two builds differ, in words. A dataset is extended only by builds with the same settings.

{"split": "file"} and {"split": "line"}            split was "file", is now "line"
{"fields": {"a": "int64"}} and {"fields": {}}      column 'a' is no longer kept
{"text_field": None} and {"text_field": "text"}    the same: this is the default
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

DEFAULT_TEXT_FIELD = "text"
_NAMES = {"shuffle_seed": "the seed of shuffle="}
_TOKENIZER_NAMES = {"eos_id": "the token of eos=", "bos_id": "the token of bos="}
"""How settings are called that are not arguments of `headrace.build`."""

Settings = Mapping[str, Any]


def differences(old: Settings, new: Settings) -> list[str]:
    """One phrase for each difference; an empty list if there is none."""
    if old.get("ingest_version") != new.get("ingest_version"):
        return ["another version of Headrace, which makes other shards from the same inputs"]
    old, new = _with_defaults(old), _with_defaults(new)
    if (old.get("tokenizer") is None) != (new.get("tokenizer") is None):
        return [_with_and_without_tokenizer(old.get("tokenizer"), new.get("tokenizer"))]
    fields = list(_differences_of_fields(old.get("fields") or {}, new.get("fields") or {}))
    names = [name for name in {**old, **new} if name not in ("fields", "tokenizer", "columns")]
    others = [_difference(_NAMES.get(name, name), old.get(name), new.get(name)) for name in names]
    tokenizers = _differences_of_tokenizers(old.get("tokenizer") or {}, new.get("tokenizer") or {})
    # Other columns are mostly other fields, which say more.
    columns = [] if fields else [_difference_of_columns(old.get("columns"), new.get("columns"))]
    return [each for each in [*fields, *columns, *others, *tokenizers] if each]


def _with_defaults(settings: Settings) -> dict[str, Any]:
    return {**settings, "text_field": settings.get("text_field") or DEFAULT_TEXT_FIELD}


def _difference(name: str, old: Any, new: Any) -> str:
    return "" if old == new else f"{name} was {_shown(old)}, is now {_shown(new)}"


def _with_and_without_tokenizer(old: Settings | None, new: Settings | None) -> str:
    if old is None and new is not None:
        return f"it has no tokenizer, and now there is one ({new.get('kind')})"
    return f"it has a tokenizer ({(old or {}).get('kind')}), and now there is none"


def _differences_of_fields(old: Settings, new: Settings) -> Iterator[str]:
    for name in {**old, **new}:
        if name not in new:
            yield f"column {name!r} is no longer kept"
        elif name not in old:
            yield f"column {name!r} is new"
        elif old[name] != new[name]:
            yield f"column {name!r} was {old[name]}, is now {new[name]}"


def _differences_of_tokenizers(old: Settings, new: Settings) -> list[str]:
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    # Any difference changes the fingerprint, which says nothing to people; so it is named only if nothing else is.
    telling = [name for name in names if name != "fingerprint"] or names
    return [
        _difference(_TOKENIZER_NAMES.get(name, f"tokenizer.{name}"), old.get(name), new.get(name))
        for name in telling
    ]


def _difference_of_columns(old: Settings | None, new: Settings | None) -> str:
    """The columns that were chosen; None stands for all columns. Their order does not matter."""
    return "" if old == new else f"the chosen columns were {_columns(old)}, and are now {_columns(new)}"


def _columns(chosen: Settings | None) -> str:
    """{'a': None, 'b': 'float32'} -> 'a,b=float32', as on the command line."""
    if chosen is None:
        return "all that there are"
    return ",".join(f"{name}={notation}" if notation else name for name, notation in chosen.items())


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
