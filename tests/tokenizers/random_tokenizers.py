"""Random small `tokenizer.json` files, with every feature that there is, and texts that would show a difference."""

import json
from random import Random
from typing import Any

from headrace.tokenizers.split_patterns import SPLIT_PATTERNS

UNDERSCORE = "\u2581"
LETTERS = (
    "aaabbcABKs'’tdlrvem  \n\n\t\r.,!;-/`{}019²éſ\u212aİßǆ你あ안ا\u0301\u200d\u00a0\u3000\u0085👩ʰªⅫ<0x41>"
    + UNDERSCORE
)
CL100K_PATTERNS = [
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
]


def _byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]


BYTES = _byte_alphabet()


def random_text(random: Random, longest: int = 16) -> str:
    return "".join(random.choice(LETTERS) for _ in range(random.randrange(longest + 1)))


def random_texts(random: Random, tokenizer: Any) -> list[str]:
    """Texts with added tokens in them, also next to and across each other."""
    contents = [token["content"] for token in tokenizer["added_tokens"]] or [""]
    texts = []
    for _ in range(60):
        pieces = [random_text(random, 8)]
        for _ in range(random.randrange(4)):
            content = random.choice(contents)
            pieces += [content[: random.choice([len(content), len(content), 1])], random_text(random, 4)]
        texts.append("".join(pieces))
    return texts


def as_bytes(text: str) -> str:
    return "".join(BYTES[byte] for byte in text.encode())


def random_tokenizer(random: Random) -> dict[str, Any]:
    """Most are plain enough for the fast encoder; each feature that it does not follow is rare."""
    made = _with_byte_fallback(random) if random.random() < 0.3 else _byte_level(random)
    made["added_tokens"] = _added_tokens(random, made["model"]["vocab"])
    if random.random() < 0.4:
        random.choice(_ODD_FEATURES)(random, made)
    return made


def _file(model: dict[str, Any], normalizer: Any, pre_tokenizer: Any) -> dict[str, Any]:
    settings = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": {**settings, **model},
    }


def byte_level(prefix: bool = False, use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def splits(*patterns: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    each = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*each, byte_level(use_regex=False)]}


def _byte_level(random: Random) -> dict[str, Any]:
    numbers = list(range(256))
    if random.random() < 0.5:
        random.shuffle(numbers)
    vocabulary = dict(zip(BYTES, numbers, strict=True))
    merges = _merges(random, vocabulary, [as_bytes(letter)[0] for letter in LETTERS])
    for _ in range(random.randrange(3)):
        # A token that no merge makes.
        vocabulary.setdefault(as_bytes(random_text(random, 4)) or "a", len(vocabulary))
    model = {"vocab": vocabulary, "merges": merges, "ignore_merges": random.random() < 0.3}
    known = sorted(SPLIT_PATTERNS)
    splitter = random.choice([byte_level(), byte_level(prefix=True), *(splits(*each) for each in known)])
    return _file(model, random.choice([None, None, {"type": "NFC"}]), splitter)


def _with_byte_fallback(random: Random) -> dict[str, Any]:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    characters = [UNDERSCORE, *(letter for letter in sorted(set(LETTERS)) if random.random() < 0.4)]
    for character in characters:
        vocabulary.setdefault(character, len(vocabulary))
    merges = _merges(random, vocabulary, characters)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": UNDERSCORE}
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": UNDERSCORE}, replaced]}
    splitter = random.choice([None, _metaspace(random)])
    model = {
        "vocab": vocabulary,
        "merges": merges,
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    return _file(model, random.choice([None, replaced, llama]), splitter)


def _metaspace(random: Random) -> dict[str, Any]:
    return {
        "type": "Metaspace",
        "replacement": UNDERSCORE,
        "prepend_scheme": random.choice(["first", "always", "never"]),
        "split": random.random() < 0.5,
    }


def _merges(random: Random, vocabulary: dict[str, int], tokens: list[str]) -> list[list[str]]:
    merges: list[list[str]] = []
    for _ in range(random.randrange(80)):
        pair = [random.choice(tokens), random.choice(tokens)]
        if pair in merges:
            continue
        merges.append(pair)
        vocabulary.setdefault("".join(pair), len(vocabulary))
        tokens = [*tokens, *["".join(pair)] * (3 if len("".join(pair)) < 9 else 0)]
    if random.random() < 0.3:
        made = sorted({"".join(pair) for pair in merges})
        numbers = [vocabulary[token] for token in made]
        random.shuffle(numbers)
        vocabulary.update(zip(made, numbers, strict=True))
    return merges


def added_token(number: int, content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content, **off, **flags}


def _added_tokens(random: Random, vocabulary: dict[str, int]) -> list[dict[str, Any]]:
    """Numbered as the tokenizers library does it: by the vocabulary, else upwards from its end."""
    added: list[dict[str, Any]] = []
    number = len(vocabulary)
    normalized = random.random() < 0.3
    for _ in range(random.choice([0, 0, 1, 2, 4])):
        content = random_text(random, 5)
        if not content or any(token["content"] == content for token in added):
            continue
        special = random.random() < 0.4
        mixed = random.random() < 0.1
        token = added_token(
            vocabulary.get(content, number), content, special=special, normalized=normalized != mixed
        )
        number += content not in vocabulary
        added.append(token)
    return added


def _flag(random: Random, made: dict[str, Any]) -> None:
    for token in made["added_tokens"]:
        token[random.choice(["single_word", "lstrip", "rstrip", "normalized"])] = True


def _normalizer(random: Random, made: dict[str, Any]) -> None:
    made["normalizer"] = random.choice(
        [
            {"type": "NFKC"},
            {"type": "Lowercase"},
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
            {"type": "Prepend", "prepend": "a"},
        ]
    )


def _pre_tokenizer(random: Random, made: dict[str, Any]) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    known = sorted(SPLIT_PATTERNS)[0]
    made["pre_tokenizer"] = random.choice(
        [
            None,
            {"type": "Whitespace"},
            byte_level(use_regex=False),
            splits(*known, behavior="Removed"),
            splits(*known, behavior="MergedWithNext"),
            splits(*known, invert=True),
            splits(random.choice(CL100K_PATTERNS)),
            splits("a+"),
            {"type": "Sequence", "pretokenizers": [digits, *splits(*known)["pretokenizers"]]},
            {"type": "Sequence", "pretokenizers": splits(*known)["pretokenizers"][:-1]},
            {"type": "Sequence", "pretokenizers": [*splits(*known)["pretokenizers"][:-1], byte_level(prefix=True)]},
        ]
    )  # fmt: skip


def _model_setting(random: Random, made: dict[str, Any]) -> None:
    name = random.choice(["ignore_merges", "end_of_word_suffix", "fuse_unk", "unk_token"])
    made["model"][name] = {"end_of_word_suffix": "</w>", "unk_token": "a"}.get(name, True)


def _vocabulary(random: Random, made: dict[str, Any]) -> None:
    """Tokens that are not written as bytes, merges that are listed twice, a far number, missing bytes."""
    vocabulary, merges = made["model"]["vocab"], made["model"]["merges"]
    end = len(vocabulary) + len(made["added_tokens"])
    choice = random.randrange(4)
    if choice == 0:
        vocabulary[random.choice(["你", "é你", " a", "<0x4>", "<0xzz>"])] = end
    elif choice == 1 and merges:
        merges.append(merges[0])
    elif choice == 2:
        vocabulary["far"] = 2**31
    else:
        vocabulary.pop(random.choice([as_bytes("b"), "<0xC3>"]), None)


_ODD_FEATURES = [_flag, _normalizer, _pre_tokenizer, _model_setting, _vocabulary]


def content_of(tokenizer: dict[str, Any]) -> bytes:
    return json.dumps(tokenizer).encode()
