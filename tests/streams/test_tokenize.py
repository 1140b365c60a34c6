"""Tokens on the fly are those that a build stores, and texts that cannot be encoded are bad records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import BadRecordsError, SettingsError
from headrace.streams import tokenize
from tests import samples
from tests.streams import files


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples.documents(50), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    "options",
    [{}, {"eos": False}, {"bos": True}, {"allow_special": True}, {"eos": "<s>"}],
    ids=lambda options: str(options),
)
def test_tokens_are_those_of_a_build(tmp_path: Path, trained: Path, options: dict[str, Any]) -> None:
    texts = [*samples.documents(300), "", "<|endoftext|> forged <s>"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in texts))
    headrace.build(path, tmp_path / "data", tokenizer=trained, text_field="body", workers=1, **options)
    stored = [record["tokens"] for record in headrace.open(tmp_path / "data")]
    found = list(headrace.stream(path).tokenize(trained, text_field="body", **options))
    assert [set(item) for item in found] == [{"tokens"}] * len(texts)
    assert files.plain([item["tokens"] for item in found]) == files.plain(stored)


def test_texts_are_encoded_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_lines(tmp_path / "a.txt", 1000)
    sizes = []
    original = tokenize.tokenize

    def counted(texts: Any, *arguments: Any) -> Any:
        sizes.append(len(texts))
        return original(texts, *arguments)

    monkeypatch.setattr(tokenize, "tokenize", counted)
    assert len(list(headrace.stream(tmp_path).tokenize("bytes"))) == 1000
    assert sizes == [256, 256, 256, 232]
    sizes.clear()
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 200)
    assert len(list(headrace.stream(tmp_path).tokenize("bytes"))) == 1000
    assert max(sizes) < 20


def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hi\n")
    (item,) = headrace.stream(tmp_path).tokenize("bytes")
    assert item["tokens"].dtype == np.uint16
    assert item["tokens"].tolist() == [104, 105, 256]


def test_records_without_a_text_are_bad(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '{"text": null}', '{"other": "b"}', '{"text": "c"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(BadRecordsError, match=r"\{'text': None\}: 'text' is of type NoneType, not text"):
        list(headrace.stream(tmp_path).tokenize("bytes"))
    stream = headrace.stream(tmp_path, max_bad_records=1).tokenize("bytes")
    with pytest.raises(
        BadRecordsError,
        match=r"2 records could .*no field 'text'; the fields are 'other'\. Name the field .* text_field=NAME",
    ):
        list(stream)
    kept = headrace.stream(tmp_path, max_bad_records=2).tokenize("bytes", eos=False)
    for _ in range(3):  # each epoch may have as many
        assert [bytes(item["tokens"].tolist()) for item in kept] == [b"a", b"c"]
    with pytest.raises(BadRecordsError, match="is of type str, but tokenize"):
        list(headrace.stream(tmp_path, fields="text", max_bad_records=1).map(str).tokenize("bytes"))


def test_bad_records_are_counted_on_after_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three bad lines and two bad texts, allowed or not wherever the stream is resumed."""
    lines = [json.dumps({"text": f"t{number}" if number % 6 else None}) for number in range(1, 15)]
    for place in (2, 7, 11):
        lines.insert(place, "broken")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(tokenize, "_TEXTS_AT_ONCE", 2)

    def make(allowed: int) -> Any:
        return headrace.stream(tmp_path, block_bytes=40, max_bad_records=allowed).tokenize("bytes")

    files.resumes_at_every_step(lambda: make(5))
    for step in range(8):
        stream = make(5)
        items = iter(stream)
        for _ in range(step):
            next(items)
        fewer = make(4)
        fewer.load_state_dict(stream.state_dict())
        with pytest.raises(BadRecordsError, match="5 records could not be read"):
            list(fewer)


def test_a_tokenizer_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hi\n")
    with pytest.raises(SettingsError, match="no such file"):
        headrace.stream(tmp_path).tokenize("no/such/tokenizer.json")
    with pytest.raises(SettingsError, match="text_field=3"):
        headrace.stream(tmp_path).tokenize("bytes", text_field=3)  # type: ignore[arg-type]


def test_a_lone_surrogate_is_a_bad_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        '{"text": "ok"}',
        '{"text": "\\ud800 bad"}',
        '{"text": "é"}',
        '{"text": "x", "other": "\\udc00"}',
    ]
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    stream = headrace.stream(tmp_path / "s.jsonl", max_bad_records=1)
    assert len(list(stream.tokenize("bytes", eos=False))) == 3
    assert "holds a lone surrogate" in caplog.text
    with pytest.raises(BadRecordsError, match="'text' holds a lone surrogate"):
        list(headrace.stream(tmp_path / "s.jsonl").tokenize("bytes"))
