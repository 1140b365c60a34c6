"""From the tokenizer that a user names to a definition. Everything comes from disk or from an installed package."""

import base64
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import MissingExtraError, SettingsError, how_to_install
from headrace.store.address import is_address
from headrace.store.files import read_stretch
from headrace.store.remote_address import redacted
from headrace.tokenizers.definition import BYTES, Definition, huggingface_definition
from headrace.tokenizers.public import PUBLIC_ENCODINGS

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HELP = (
    "give 'bytes', the path of a Hugging Face tokenizer.json (or its folder), the path of a .tiktoken file that "
    "is named after its encoding, or the name of a tiktoken encoding that is on this machine"
)


def find_tokenizer(
    tokenizer: Any,
    *,
    eos: str | bool | None = None,
    bos: str | bool | None = None,
    allow_special: bool = False,
) -> Definition:
    """`tokenizer` is a name or path, a trained `tokenizers.Tokenizer`, or a `tiktoken.Encoding`."""
    definition, guess = _find(tokenizer, allow_special)
    return definition.with_boundaries(eos, bos, guess)


def _find(tokenizer: Any, allow_special: bool) -> tuple[Definition, Mapping[str, str]]:
    """The definition, and what the tokenizer's own files call 'eos' and 'bos'."""
    if tokenizer == "bytes":
        return replace(BYTES, allow_special=allow_special), {}
    if hasattr(tokenizer, "to_str"):
        content = tokenizer.to_str().encode()
        return huggingface_definition("tokenizer", content, allow_special=allow_special), {}
    if hasattr(tokenizer, "_mergeable_ranks"):
        return _tiktoken_definition(tokenizer, allow_special), {}
    if not isinstance(tokenizer, (str, os.PathLike)):
        raise SettingsError(f"tokenizer of type {type(tokenizer).__name__}: {_HELP}")
    return _find_named(tokenizer, allow_special)


def _find_named(
    tokenizer: str | os.PathLike[str], allow_special: bool
) -> tuple[Definition, Mapping[str, str]]:
    """The same for a path, or the name of an installed encoding."""
    if is_address(tokenizer):
        raise SettingsError(
            f"tokenizer {redacted(str(tokenizer))!r}: must be a local file; download it first"
        )
    path = Path(tokenizer)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.suffix == ".tiktoken" and path.is_file():
        return _tiktoken_definition(_from_rank_file(path), allow_special), {}
    if path.is_file():
        guess = _names_in_config(path.parent / "tokenizer_config.json")
        return huggingface_definition(path.name, path.read_bytes(), allow_special=allow_special), guess
    name = str(tokenizer).removeprefix("tiktoken:")
    if path.suffix or os.sep in str(tokenizer):
        raise SettingsError(f"tokenizer {str(tokenizer)!r}: no such file; {_HELP}")
    return _tiktoken_definition(_installed_encoding(name), allow_special), {}


def _names_in_config(path: Path) -> Mapping[str, str]:
    """Which tokens `tokenizer_config.json` calls EOS and BOS."""
    try:
        content, _ = read_stretch(path, 0, None)
    except FileNotFoundError:
        return {}
    try:
        config = msgspec.json.decode(content.removeprefix(_BYTE_ORDER_MARK), type=_Config)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"{path}: names the tokens that end and begin a document, but cannot be read: {error}; correct or remove it"
        ) from None
    tokens = {"eos": config.eos_token, "bos": config.bos_token}
    return {
        which: token.content if isinstance(token, _AddedToken) else token
        for which, token in tokens.items()
        if token
    }


class _AddedToken(msgspec.Struct):
    content: str


class _Config(msgspec.Struct):
    """What is read of a `tokenizer_config.json`."""

    eos_token: str | _AddedToken | None = None
    bos_token: str | _AddedToken | None = None


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError:
        raise MissingExtraError(f"tiktoken is not installed: {how_to_install('tokenizers')}") from None
    return tiktoken


class _Loading(threading.local):
    """The encoding that this thread is loading from this machine only, if any."""

    name: str | None = None


_loading = _Loading()
_patching = threading.Lock()


def _refuse_downloads(tiktoken_load: Any) -> None:
    """Put a check in front of the function with which tiktoken fetches files, once and for good.

    The check concerns only threads that are loading an encoding for Headrace: other threads may use tiktoken at the
    same time, and may let it download.
    """
    with _patching:
        original = tiktoken_load.read_file
        if getattr(original, "checked_by_headrace", False):
            return

        def read_file(location: str) -> bytes:
            if _loading.name is not None and "://" in location:
                raise SettingsError(
                    f"tiktoken encoding {_loading.name!r} is not on this machine, and Headrace does not download it; "
                    "put its file into TIKTOKEN_CACHE_DIR, or give the path of a .tiktoken file"
                )
            content: bytes = original(location)
            return content

        read_file.checked_by_headrace = True  # type: ignore[attr-defined]
        tiktoken_load.read_file = read_file


@contextmanager
def _nothing_fetched(name: str) -> Iterator[None]:
    """tiktoken downloads missing files; a build must not depend on the network, so here that is an error."""
    import tiktoken.load

    _refuse_downloads(tiktoken.load)
    _loading.name = name
    try:
        yield
    finally:
        _loading.name = None


def _installed_encoding(name: str) -> Any:
    tiktoken = _tiktoken()
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise SettingsError(
            f"tokenizer {name!r}: no such file or tiktoken encoding ({', '.join(known)}); {_HELP}"
        )
    with _nothing_fetched(name):
        return tiktoken.get_encoding(name)


def _from_rank_file(path: Path) -> Any:
    """A `.tiktoken` file holds only ranks; the pattern and special tokens are those of the encoding of that name."""
    tiktoken = _tiktoken()
    known = PUBLIC_ENCODINGS.get(path.stem)
    if known is None:
        names = ", ".join(PUBLIC_ENCODINGS)
        raise SettingsError(f"{path}: its pattern is unknown; name the file after its encoding: {names}")
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        return tiktoken.Encoding(
            path.stem,
            pat_str=known.pattern,
            mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
            special_tokens=dict(known.special_tokens),
        )
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{path}: not a tiktoken rank file: {error}") from None


def _tiktoken_definition(encoding: Any, allow_special: bool) -> Definition:
    ranks = {base64.b64encode(token).decode(): rank for token, rank in encoding._mergeable_ranks.items()}
    special = dict(encoding._special_tokens)
    content = {"pattern": encoding._pat_str, "special_tokens": special, "ranks": ranks}
    return Definition(
        kind="tiktoken",
        name=encoding.name,
        vocab_size=1 + max([*encoding._mergeable_ranks.values(), *special.values()]),
        special_tokens=special,
        content=json.dumps(content).encode(),
        allow_special=allow_special,
    )
