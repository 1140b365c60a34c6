from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.store.local import LocalStore
from headrace.tokenizers.decoding import decoder_for

TEXT = "Über die Brücke, 水 flows 🌊 — quietly.\n\tEnd"


@pytest.mark.parametrize(
    "which", ["bytes", "trained", pytest.param("deepseek", marks=pytest.mark.soak), "tiktoken"]
)
def test_a_dataset_decodes_with_what_is_stored_in_it(
    which: str, tmp_path: Path, tokenizer_called: Callable[[str], Any]
) -> None:
    tokenizer = tokenizer_called(which)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    headrace.build(tmp_path / "a.txt", tmp_path / "out", tokenizer=tokenizer)
    (tmp_path / "out").rename(tmp_path / "moved")
    dataset = headrace.open(tmp_path / "moved")
    assert dataset.manifest is not None
    assert dataset.manifest.tokenizer is not None
    decode = decoder_for(LocalStore(tmp_path / "moved"), dataset.manifest.tokenizer)
    decoded = decode(dataset[0]["tokens"])
    assert decoded.startswith(TEXT)
    end = {"bytes": "<|endoftext|>", "trained": "<|endoftext|>", "tiktoken": "<|endoftext|>"}
    assert decoded == TEXT + end.get(which, "<｜end▁of▁sentence｜>")
