"""Rows of documents over many parts: every document once, groups that stay among their shards, damage that shows."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import headrace
from headrace.errors import CorruptError
from headrace.format.container import parse_head
from headrace.format.manifest import read_manifest
from headrace.pack.overlong import Overlong
from headrace.pack.packing import Packing
from headrace.rows.parts import PartTable
from headrace.rows.reference import TYPES
from headrace.rows.token_rows import DocumentRows
from headrace.store.local import LocalStore
from tests.properties import examples
from tests.rows.parts_in_ram import in_parts, next_tokens, read

OVERLONG = st.sampled_from(list(Overlong))
PACKINGS = st.sampled_from([Packing.BEST_FIT, Packing.PAD])
LENGTHS = st.lists(st.lists(st.integers(0, 25), max_size=8), min_size=1, max_size=6).filter(
    lambda parts: any(length > 0 for part in parts for length in part)
)


def cut(document: list[int], seq_len: int, overlong: Overlong) -> list[tuple[list[int], int | None]]:
    """The pieces of a document, each with the token that follows it."""
    if len(document) > seq_len and overlong is not Overlong.SPLIT:
        return [(document[:seq_len], None)] if overlong is Overlong.TRUNCATE else []
    pieces = [document[start : start + seq_len] for start in range(0, len(document), seq_len)]
    return [
        (piece, after[0] if after else None) for piece, after in zip(pieces, [*pieces[1:], []], strict=False)
    ]


@examples(60)
@given(
    LENGTHS,
    st.integers(2, 16),
    PACKINGS,
    OVERLONG,
    st.none() | st.integers(1, 7),
    st.none() | st.integers(0, 2**64 - 1),
    st.sampled_from(TYPES),
)
def test_all_rows_hold_every_document_once_in_any_grouping(
    lengths: list[list[int]],
    seq_len: int,
    packing: Packing,
    overlong: Overlong,
    group_shards: int | None,
    key: int | None,
    dtype: str,
) -> None:
    if dtype.endswith("int8"):
        lengths = [[length // 8 for length in part][:4] for part in lengths]
    data, documents = in_parts(lengths, dtype)
    rows = DocumentRows(data, PartTable(data, "tokens"), seq_len, packing, overlong, group_shards)
    if not rows.rows:
        return
    keys = None if key is None else np.full(rows.rows, key, dtype=np.uint64)
    stretches = rows.stretches(np.arange(rows.rows), keys)
    found = read(stretches)
    held = [tuple(piece) for row in sorted(found) for piece in found[row]]
    wanted = [pair for document in documents for pair in cut(document, seq_len, overlong)]
    assert sorted(zip(held, next_tokens(stretches), strict=True)) == sorted(
        (tuple(piece), following) for piece, following in wanted
    )
    assert sorted(found) == list(range(rows.rows))
    assert all(sum(map(len, pieces)) <= seq_len for pieces in found.values())
    for piece, record, start in zip(held, stretches.record.tolist(), stretches.start.tolist(), strict=True):
        assert list(piece) == documents[record][start : start + len(piece)]
    report = rows.report()
    assert report.tokens == sum(map(len, held))
    assert report.tokens + report.cut == sum(map(len, documents))
    assert report.tokens + report.padded == rows.rows * seq_len
    assert (report.rows, report.seq_len) == (rows.rows, seq_len)
    assert report.documents_cut == sum(len(d) > seq_len for d in documents) * (overlong is not Overlong.SPLIT)
    assert report.efficiency == pytest.approx(report.tokens / (rows.rows * seq_len))
    padded = [len(pieces) + (sum(map(len, pieces)) < seq_len) for pieces in found.values()]
    assert rows.segments.most >= max(padded)
    assert rows.segments.rows.sum() == rows.rows


@examples(40)
@given(LENGTHS, st.integers(2, 16), st.none() | st.integers(1, 4), st.none() | st.integers(0, 9), st.data())
def test_rows_in_any_order_are_the_rows_one_by_one(
    lengths: list[list[int]], seq_len: int, group_shards: int | None, key: int | None, data: st.DataObject
) -> None:
    dataset, _ = in_parts(lengths)
    rows = DocumentRows(
        dataset, PartTable(dataset, "tokens"), seq_len, Packing.BEST_FIT, group_shards=group_shards
    )

    def at(numbers: list[int]) -> dict[int, list[list[int]]]:
        keys = None if key is None else np.full(len(numbers), key, dtype=np.uint64)
        stretches = rows.stretches(np.array(numbers, dtype=np.int64), keys)
        assert (np.diff(stretches.row) >= 0).all()
        return read(stretches)

    asked = data.draw(st.lists(st.integers(0, rows.rows - 1), min_size=1, max_size=8))
    together = at(asked)
    assert [together[number] for number in range(len(asked))] == [at([row])[0] for row in asked]


@examples(40)
@given(LENGTHS, st.integers(2, 16), PACKINGS, st.integers(1, 4), st.none() | st.integers(0, 9))
def test_a_row_only_touches_the_shards_of_its_group(
    lengths: list[list[int]], seq_len: int, packing: Packing, group_shards: int, key: int | None
) -> None:
    data, _ = in_parts(lengths)
    table = PartTable(data, "tokens")
    rows = DocumentRows(data, table, seq_len, packing, group_shards=group_shards)
    keys = None if key is None else np.full(rows.rows, key, dtype=np.uint64)
    stretches = rows.stretches(np.arange(rows.rows), keys)
    group = table.parts_of(stretches.record) // group_shards
    of_row: dict[int, set[int]] = defaultdict(set)
    for row, number in zip(stretches.row.tolist(), group.tolist(), strict=True):
        of_row[row].add(number)
    assert all(len(numbers) == 1 for numbers in of_row.values())
    assert [min(of_row[row]) for row in sorted(of_row)] == sorted(min(of_row[row]) for row in of_row)


@pytest.mark.parametrize("packing", [Packing.BEST_FIT, Packing.PAD])
@pytest.mark.parametrize("group_shards", [None, 1])
def test_no_rows_have_no_stretches(packing: Packing, group_shards: int | None) -> None:
    data, _ = in_parts([[3, 4], [5]])
    rows = DocumentRows(data, PartTable(data, "tokens"), 6, packing, group_shards=group_shards)
    for keys in (None, np.empty(0, dtype=np.uint64)):
        assert len(rows.stretches(np.empty(0, dtype=np.int64), keys).row) == 0


def test_groups_are_mixed_differently_and_other_epochs_otherwise() -> None:
    lengths = [[3] * 12, [3] * 12]
    data, _ = in_parts(lengths)
    rows = DocumentRows(data, PartTable(data, "tokens"), 6, Packing.BEST_FIT, group_shards=1)

    def records(key: int | None) -> list[int]:
        keys = None if key is None else np.full(rows.rows, key, dtype=np.uint64)
        return rows.stretches(np.arange(rows.rows), keys).record.tolist()

    mixed = records(1)
    assert sorted(mixed) == list(range(24))
    assert [number - 12 for number in mixed[12:]] != mixed[:12]
    assert len({tuple(records(key)) for key in (None, 1, 2, 3)}) == 4


# On disk


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A dataset of many small shards from the Writer."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("rows") / "data"
    documents = [rng.integers(1, 60_000, n).tolist() for n in rng.integers(0, 30, 200)]
    with headrace.Writer(path, {"tokens": "uint16[*]"}, shard_bytes=700) as writer:
        for document in documents:
            writer.write({"tokens": np.array(document, dtype=np.uint16)})
    return path, documents


@pytest.mark.parametrize("group_shards", [None, 1, 2, 3, 5, 100])
@pytest.mark.parametrize("packing", [Packing.BEST_FIT, Packing.PAD])
def test_a_dataset_of_many_shards_gives_every_document_once(
    written: tuple[Path, list[list[int]]], group_shards: int | None, packing: Packing
) -> None:
    data, documents = headrace.open(written[0]), written[1]
    assert len(data.source.part_records) > 7
    rows = DocumentRows(data, PartTable(data, "tokens"), 16, packing, group_shards=group_shards)
    keys = np.full(rows.rows, 11, dtype=np.uint64)
    held = [piece for pieces in read(rows.stretches(np.arange(rows.rows), keys)).values() for piece in pieces]
    wanted = [piece for document in documents for piece, _ in cut(document, 16, Overlong.SPLIT)]
    assert sorted(held) == sorted(wanted)


# Damage

Reseal = Callable[..., None]


def section(path: Path, name: str) -> tuple[NDArray[Any], Callable[[], None]]:
    """A stored array that can be changed, and how to write it back."""
    content = np.frombuffer(bytearray(path.read_bytes()), dtype=np.uint8)
    header_bytes = 64 + int.from_bytes(content[12:16].tobytes(), "little")
    header = parse_head(content[:header_bytes].tobytes(), len(content), str(path))
    array = header.sections[name].view(content)

    def write() -> None:
        path.write_bytes(content.tobytes())

    return array, write


def damaged(directory: Path, write_dataset: Callable[..., Any], shards: Sequence[Sequence[int]]) -> Path:
    records = [[{"tokens": list(range(length))} for length in shard] for shard in shards]
    write_dataset(directory, {"tokens": "uint16[*]"}, records)
    return directory


def load_all(path: Path, **options: Any) -> list[Mapping[str, Any]]:
    data = headrace.open(path)
    rows = DocumentRows(data, PartTable(data, "tokens"), 8, Packing.BEST_FIT, **options)
    return [read(rows.stretches(np.arange(rows.rows), None))]


@pytest.mark.parametrize(
    "offsets", [[0, 9, 4, 8, 12], [0, 2, 4, 8, 12], [0, 4, 3, 8, 12], [0, 2**63, 4, 8, 12]]
)
def test_damaged_offsets_are_an_error_and_no_garbage(
    tmp_path: Path, write_dataset: Callable[..., Any], reseal: Reseal, offsets: list[int]
) -> None:
    path = damaged(tmp_path / "data", write_dataset, [[3, 1, 4, 4]])
    array, write = section(next(path.glob("shard-*")), "tokens/offsets")
    array[:] = np.array(offsets, dtype=np.uint64)
    write()
    reseal(path)
    with pytest.raises(CorruptError, match="headrace verify"):
        load_all(path)


@pytest.mark.parametrize(
    "order",
    [
        [1, 0, 2, 3],
        [0, 1, 2, 4],
        [0, 1, 2, 2**32 - 1],
    ],
)
def test_an_index_of_other_shards_is_an_error_and_no_garbage(
    tmp_path: Path, write_dataset: Callable[..., Any], reseal: Reseal, order: list[int]
) -> None:
    path = damaged(tmp_path / "data", write_dataset, [[1, 3], [4, 4]])
    array, write = section(next(path.glob("index-*")), "tokens/order")
    array[:] = np.array(order, dtype=np.uint32)
    write()
    reseal(path)
    with pytest.raises(CorruptError, match="headrace verify"):
        load_all(path)


@pytest.mark.parametrize("starts", [[0, 3, 2, 4], [0, 2**63, 2, 4], [0, 2**64 - 1, 2, 4]])
@pytest.mark.parametrize("group_shards", [None, 1])
def test_damaged_starts_of_the_index_are_an_error_and_no_garbage(
    tmp_path: Path,
    write_dataset: Callable[..., Any],
    reseal: Reseal,
    starts: list[int],
    group_shards: int | None,
) -> None:
    path = damaged(tmp_path / "data", write_dataset, [[1, 3], [4, 4]])
    array, write = section(next(path.glob("index-*")), "tokens/starts")
    array[:] = np.array(starts, dtype=np.uint64)
    write()
    reseal(path)
    with pytest.raises(CorruptError, match="headrace verify"):
        load_all(path, group_shards=group_shards)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokens/counts", [1, 3]),
        ("tokens/counts", [1, 1]),
        ("tokens/lengths", [2, 4]),
        ("tokens/lengths", [1, 9]),
    ],
)
def test_a_histogram_that_is_not_that_of_its_shard_is_an_error_and_loses_nothing(
    tmp_path: Path, write_dataset: Callable[..., Any], reseal: Reseal, name: str, values: list[int]
) -> None:
    path = damaged(tmp_path / "data", write_dataset, [[1, 4, 4], [1, 4, 4, 2]])
    shard = path / read_manifest(LocalStore(path)).shards[0].stored.file
    array, write = section(shard, name)
    array[:] = np.array(values, dtype=np.uint32)
    write()
    reseal(path)
    with pytest.raises(CorruptError):
        load_all(path, group_shards=1)
