"""Several datasets in exact shares: `headrace.mix({"web": (web, 0.7), "code": (code, 0.3)})`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from headrace.checks import check_boolean
from headrace.dataset.dataset import Dataset
from headrace.errors import SettingsError
from headrace.order.mixture import Stages
from headrace.public import public


class Stop(StrEnum):
    FIRST = "first"
    ALL = "all"


@dataclass(frozen=True)
class Mixture:
    """Sources by name, and their weights by position; made by `mix`."""

    names: tuple[str, ...]
    data: tuple[Any, ...]
    stages: Stages
    stop: Stop
    allow_different_tokenizers: bool = False

    def stage(self, position: int, weights: Mapping[str, float]) -> "Mixture":
        """A mixture with other weights from that row of the stream on."""
        return replace(self, stages=self.stages.then(position, self.listed(weights)))

    def listed(self, weights: Mapping[str, float]) -> list[float]:
        """The weights in the order of the sources."""
        return listed_weights(self.names, weights)


@public
def mix(
    sources: Mapping[str, tuple[Any, float]],
    *,
    stages: Mapping[int, Mapping[str, float]] | None = None,
    stop: str = "first",
    allow_different_tokenizers: bool = False,
) -> Mixture:
    """Mix several datasets in exact shares, for a Loader.

    In every prefix of the stream, each source is less than one row away from its share.

    Args:
        sources: The data and the weight of each source, like {"web": (web, 0.7), "code": (code, 0.3)}. Data is
            anything that a Loader takes. Weights need not sum to 1; they are rounded to 1/65,536.
        stages: Other weights from certain rows of the stream on, like {100_000: {"web": 1, "code": 2}}.
        stop: When an epoch ends: before the first source would repeat a row ("first"), or once every source has given
            all of its rows ("all").
        allow_different_tokenizers: Datasets that were built with different tokenizers are refused, because the same
            token would mean different things. With True they are mixed anyway.

    Returns:
        A `Mixture`, which a Loader takes instead of a dataset.
    """
    _check_sources(sources)
    try:
        how = Stop(stop)
    except ValueError:
        raise SettingsError(f"stop={stop!r}: must be 'first' or 'all'") from None
    names = tuple(map(str, sources))
    try:
        first = Stages.of([weight for _, weight in sources.values()])
    except SettingsError as error:
        raise SettingsError(f"weights of {', '.join(names)}: {error}") from None
    check_boolean("allow_different_tokenizers", allow_different_tokenizers)
    data = tuple(each for each, _ in sources.values())
    mixture = Mixture(names, data, first, how, allow_different_tokenizers)
    later = dict(stages or {})
    for position in later:
        _check_position(position)
    for position, weights in sorted(later.items()):
        mixture = mixture.stage(position, weights)
    return mixture


def _check_sources(sources: Any) -> None:
    if not isinstance(sources, Mapping):
        raise SettingsError(
            f"sources={sources!r}: must be a dict, like {{'web': (web, 0.7), 'code': (code, 0.3)}}"
        )
    if not sources:
        raise SettingsError(
            "sources is empty: give at least one, like {'web': (web, 0.7), 'code': (code, 0.3)}"
        )
    for name, pair in sources.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise SettingsError(f"source {name!r}: must be a pair of data and weight, like (dataset, 0.7)")
    if len(set(map(str, sources))) < len(sources):
        raise SettingsError(
            f"sources {', '.join(map(repr, sources))}: two names are equal as text; give each source its own"
        )


def _check_position(position: Any) -> None:
    if isinstance(position, bool) or not hasattr(position, "__index__") or position < 0:
        raise SettingsError(
            f"stages at {position!r}: must be a row of the stream: a whole number of at least 0"
        )


def check_same_tokenizer(names: Sequence[str], sources: Sequence[Any]) -> None:
    """Refuse datasets that were built with different tokenizers. Of other data, nothing is known."""
    first: tuple[str, Mapping[str, Any]] | None = None
    for name, data in zip(names, sources, strict=True):
        tokenizer = data.manifest.tokenizer if isinstance(data, Dataset) and data.manifest else None
        if tokenizer is None:
            continue
        if first is None:
            first = name, tokenizer
        elif tokenizer.get("fingerprint") != first[1].get("fingerprint"):
            raise SettingsError(
                f"source {name!r} was built with the tokenizer {_tokenizer(tokenizer)}, but {first[0]!r} with "
                f"{_tokenizer(first[1])}: the same token means different things in them. Build them with the same "
                "tokenizer, or give mix(..., allow_different_tokenizers=True)"
            )


def _tokenizer(entry: Mapping[str, Any]) -> str:
    fingerprint = str(entry.get("fingerprint", "unknown"))
    return f"{entry.get('name', 'unknown')} (fingerprint {fingerprint[:8]}, end token {entry.get('eos_id')})"


def listed_weights(names: tuple[str, ...], weights: Mapping[str, float]) -> list[float]:
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        given = sorted(map(str, weights)) if isinstance(weights, Mapping) else type(weights).__name__
        raise SettingsError(f"weights for {given}: must be a dict with a weight for each of {sorted(names)}")
    return [weights[name] for name in names]
