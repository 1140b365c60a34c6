"""Rows of tokens: every token once, with the fields of a Loader's rows, and the very rows where both pack alike."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import headrace
from headrace.errors import SettingsError, StageError
from headrace.streams import pack
from headrace.streams.bad import StreamBadRecords
from tests.properties import examples
from tests.streams import files

FIELDS = ["tokens", "labels", "position_ids", "segment_ids", "loss_mask"]


class Documents:
    """A cursor over token arrays."""

    def __init__(self, documents: list[Any], place: int | None) -> None:
        self._documents, self._place = documents, place or 0

    def __iter__(self) -> "Documents":
        return self

    def __next__(self) -> dict[str, Any]:
        if self._place >= len(self._documents):
            raise StopIteration
        self._place += 1
        return {"tokens": self._documents[self._place - 1]}

    def state(self) -> int:
        return self._place


def documents_of(lengths: list[int]) -> list[Any]:
    """No two tokens of all are equal."""
    ends = 1 + np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype=np.uint16) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def rows_of(
    documents: list[Any], seq_len: int, packing: str, buffer: int = 1024, **options: Any
) -> list[Any]:
    operation = pack.make_pack(buffer, {"seq_len": seq_len, "packing": packing, **options})
    cursor = operation.open(lambda state: Documents(documents, state), None, StreamBadRecords(0))
    return [{name: value.copy() for name, value in row.items()} for row in cursor]


def loader_rows(documents: list[Any], seq_len: int, packing: str, **options: Any) -> list[Any]:
    data = headrace.from_arrays({"tokens": documents})
    loader = headrace.Loader(
        data,
        seq_len=seq_len,
        batch_size=1,
        packing=packing,
        shuffle=False,
        drop_last=False,
        fields=FIELDS,
        **options,
    )
    return [{name: batch[name][0].copy() for name in batch} for batch in loader]


LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=40).filter(any)


@examples(25)
@given(
    lengths=LENGTHS,
    seq_len=st.integers(2, 12),
    packing=st.sampled_from(["best-fit", "windows", "pad"]),
    labels=st.sampled_from(["shifted", "unshifted"]),
)
def test_rows_are_those_of_a_loader(lengths: list[int], seq_len: int, packing: str, labels: str) -> None:
    """If the buffer holds all documents: windows in the same order, packed rows in another."""
    assume(sum(lengths) >= seq_len)  # a Loader refuses less
    documents = documents_of(lengths)
    found = rows_of(documents, seq_len, packing, labels=labels)
    wanted = loader_rows(documents, seq_len, packing, labels=labels)
    assert [list(row) for row in found] == [FIELDS] * len(found)
    if packing == "windows":
        assert files.plain(found) == files.plain(wanted)
    else:
        assert files.as_bag(found) == files.as_bag(wanted)


@examples(40)
@given(
    lengths=LENGTHS,
    seq_len=st.integers(2, 12),
    packing=st.sampled_from(["best-fit", "windows", "pad"]),
    buffer=st.integers(1, 50),
    at_once=st.integers(1, 5),
)
def test_every_token_is_in_one_row_and_each_row_can_be_resumed(
    lengths: list[int], seq_len: int, packing: str, buffer: int, at_once: int
) -> None:
    documents = documents_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_WINDOWS_AT_ONCE", at_once)
        operation = pack.make_pack(buffer, {"seq_len": seq_len, "packing": packing})

        def opened(state: Any) -> Any:
            return operation.open(lambda below: Documents(documents, below), state, StreamBadRecords(0))

        cursor, states, rows = opened(None), [], []
        states.append(cursor.state())
        for row in cursor:
            rows.append(files.plain(row))
            states.append(json.loads(json.dumps(cursor.state())))
        tokens = [token for row in rows for token in row["tokens"][1] if token]
        assert sorted(tokens) == list(range(1, sum(lengths) + 1))
        if packing == "windows":
            assert tokens == sorted(tokens)
            assert len(rows) == -(-sum(lengths) // seq_len)
        for step, state in enumerate(states):
            assert files.copies(opened(state)) == rows[step:]


def test_conventions(tmp_path: Path) -> None:
    (row,) = rows_of([np.array([5, 6, 7], np.uint32), [8, 9]], 8, "windows", pad_id=1, ignore_index=-1)
    assert row["tokens"].tolist() == [5, 6, 7, 8, 9, 1, 1, 1]
    assert row["labels"].tolist() == [6, 7, -1, 9, -1, -1, -1, -1]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert row["loss_mask"].tolist() == [True, True, False, True, False, False, False, False]
    dtypes = {name: str(value.dtype) for name, value in row.items()}
    assert dtypes == {
        "tokens": "int64",
        "labels": "int64",
        "position_ids": "int64",
        "segment_ids": "int32",
        "loss_mask": "bool",
    }
    (row,) = rows_of([[5, 6]], 4, "best-fit", dtype="int32", fields=["tokens"])
    assert row["tokens"].dtype == np.int32
    assert list(row) == ["tokens"]


def test_long_documents_are_split_truncated_or_dropped() -> None:
    documents = documents_of([25, 3])
    split = rows_of(documents, 10, "best-fit")
    assert sorted(int((row["tokens"] > 0).sum()) for row in split) == [8, 10, 10]
    truncated = rows_of(documents, 10, "best-fit", overlong="truncate")
    assert sorted(int((row["tokens"] > 0).sum()) for row in truncated) == [3, 10]
    dropped = rows_of(documents, 10, "best-fit", overlong="drop")
    assert [row["tokens"][:3].tolist() for row in dropped] == [[26, 27, 28]]
    assert rows_of(documents_of([25]), 10, "best-fit", overlong="drop") == []


def test_packed_rows_are_full_and_not_sorted_by_length(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000).tolist()
    rows = rows_of(documents_of(lengths), 128, "best-fit", buffer=500)
    used = sum(lengths) / (len(rows) * 128)
    assert used > 0.98
    counts = [int(row["segment_ids"].max()) for row in rows]
    assert abs(np.corrcoef(counts, np.arange(len(counts)))[0, 1]) < 0.3


def test_what_cannot_be_packed_is_told(tmp_path: Path) -> None:
    files.write_lines(tmp_path / "a.txt", 3)
    stream = headrace.stream(tmp_path)
    with pytest.raises(
        StageError, match=r"records whose 'tokens' holds integers, but got \{'text'.*tokenize"
    ):
        list(stream.pack(8))
    with pytest.raises(StageError, match="integers"):
        list(stream.map(lambda record: {"tokens": [0.5]}).pack(8))
    for options, message in [
        ({"seq_len": 1}, "seq_len=1: must be at least 2"),
        (
            {"seq_len": 8, "packing": "best_fit"},
            "packing='best_fit': must be one of 'best-fit', 'windows', 'pad'",
        ),
        ({"seq_len": 8, "buffer": 0}, "buffer=0"),
        ({"seq_len": 8, "fields": ["cu_seqlens"]}, "must be some of tokens, labels"),
        ({"seq_len": None}, "give the number of tokens in a row"),
    ]:
        with pytest.raises(SettingsError, match=message):
            stream.tokenize("bytes").pack(**options)  # type: ignore[arg-type]
