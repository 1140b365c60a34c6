"""Where records lie in memory: found part by part, mapped when they are first asked for."""

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import CorruptError, FieldError
from headrace.format.ragged import Ragged
from headrace.rows.kernel import loops
from headrace.rows.parts import PartTable
from headrace.rows.reference import TYPES
from tests.properties import examples
from tests.rows.parts_in_ram import in_parts, tokens_at

LENGTHS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=6)


@examples(60)
@given(LENGTHS, st.sampled_from(TYPES), st.data())
def test_every_record_is_found_where_it_lies(
    lengths: list[list[int]], dtype: str, data: st.DataObject
) -> None:
    if dtype.endswith("int8"):
        lengths = [part[:2] for part in lengths]
    dataset, documents = in_parts(lengths, dtype)
    table = PartTable(dataset, "tokens")
    assert (table.records, table.elements) == (len(documents), sum(map(len, documents)))
    most = max(len(documents) - 1, 0)
    asked = data.draw(st.lists(st.integers(0, most), max_size=8 if documents else 0))
    records = np.array(asked, dtype=np.int64)
    parts = table.parts_of(records)
    owners = [number for number, part in enumerate(lengths) for _ in part]
    assert parts.tolist() == [owners[record] for record in asked]
    begin, end = table.extents(records, parts)
    addresses = table.addresses(begin, parts)
    for record, address, length in zip(asked, addresses.tolist(), (end - begin).tolist(), strict=True):
        assert tokens_at(address, table.token_type, length) == documents[record]


@examples(60)
@given(LENGTHS)
def test_every_element_is_found_in_its_document(lengths: list[list[int]]) -> None:
    dataset, documents = in_parts(lengths)
    table = PartTable(dataset, "tokens")
    places = np.arange(table.elements)
    parts = table.parts_at(places)
    records = table.documents_at(places - table.first_element[parts], parts)
    assert records.tolist() == [number for number, document in enumerate(documents) for _ in document]


@examples(60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.sampled_from(["int32", "int64", "uint64"]),
    st.integers(0, 5),
    st.integers(1, 3),
)
def test_arrays_in_ram_may_be_a_stretch_of_longer_ones_and_lie_apart(
    lengths: list[int], offset_dtype: str, before: int, step: int
) -> None:
    total = sum(lengths)
    values = np.arange((before + total + 3) * step, dtype=np.int32)[::step]
    offsets = (before + np.cumsum([0, *lengths])).astype(offset_dtype)
    data = headrace.from_arrays({"tokens": Ragged(values, offsets)})
    table = PartTable(data, "tokens")
    records = np.arange(len(lengths))
    parts = table.parts_of(records)
    begin, end = table.extents(records, parts)
    assert table.elements == total
    for number, address in enumerate(table.addresses(begin, parts).tolist()):
        held = tokens_at(address, table.token_type, int(end[number] - begin[number]))
        assert held == data[number]["tokens"].tolist()


def test_only_the_parts_that_are_asked_for_are_mapped() -> None:
    dataset, _ = in_parts([[2, 2], [2], [2, 2]])
    loaded: list[int] = []
    load: Callable[[int], Any] = dataset.source.load_part

    def noted(number: int) -> Any:
        loaded.append(number)
        return load(number)

    dataset.source.load_part = noted  # type: ignore[method-assign]
    table = PartTable(dataset, "tokens")
    assert loaded == []
    table.parts_of(np.array([4, 3]))
    table.parts_of(np.array([3]))
    assert loaded == [2]
    table.parts_at(np.array([0, 9]))
    assert loaded == [2, 0]


def test_threads_that_ask_at_the_same_time_find_the_same() -> None:
    dataset, documents = in_parts([[3]] * 60)
    for _ in range(10):
        table = PartTable(dataset, "tokens")
        gate = threading.Barrier(4)
        wrong: list[int] = []

        def look(table: PartTable = table, gate: Any = gate, wrong: list[int] = wrong) -> None:
            gate.wait()
            for record in range(60):
                numbers = np.array([record])
                parts = table.parts_of(numbers)
                begin, _ = table.extents(numbers, parts)
                address = int(table.addresses(begin, parts)[0])
                if tokens_at(address, table.token_type, 3) != documents[record]:
                    wrong.append(record)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class _Interrupted(np.ndarray[Any, Any]):
    """An array that lets another thread have its turn after each change."""

    turn: Callable[[], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if self.turn is not None:
            self.turn()


@pytest.mark.parametrize("interrupted", ["_offsets", "_values", "_loaded"])
def test_a_part_that_is_being_loaded_is_not_used_before_it_is_whole(interrupted: str) -> None:
    dataset, documents = in_parts([[3], [4]])
    table = PartTable(dataset, "tokens")
    tables: Any = table
    setattr(tables, interrupted, getattr(tables, interrupted).view(_Interrupted))
    seen: list[int] = []

    def look() -> None:
        address, more = np.zeros(1, np.uint64), np.zeros(1, bool)
        pieces = np.array([0]), np.array([0]), np.array([3]), np.array([3])
        addresses = table.first_record, tables._offsets.view(np.ndarray), tables._values.view(np.ndarray)
        if loops.locate(*pieces, *addresses, tables._elements, table.item_bytes, address, more) < 0:
            seen.append(int(address[0]))

    getattr(tables, interrupted).turn = look
    parts = table.parts_of(np.array([0]))
    begin, _ = table.extents(np.array([0]), parts)
    right = int(table.addresses(begin, parts)[0])
    assert tokens_at(right, table.token_type, 3) == documents[0]
    assert set(seen) <= {right}


@examples(60)
@given(LENGTHS, st.data())
def test_pieces_are_located_in_memory(lengths: list[list[int]], data: st.DataObject) -> None:
    dataset, documents = in_parts(lengths)
    table = PartTable(dataset, "tokens")
    most = max(len(documents) - 1, 0)
    records = data.draw(st.lists(st.integers(0, most), max_size=6 if documents else 0))
    starts = [data.draw(st.integers(0, len(documents[record]))) for record in records]
    counts = [
        data.draw(st.integers(0, len(documents[record]) - start))
        for record, start in zip(records, starts, strict=True)
    ]
    columns = (records, starts, counts, [len(documents[record]) for record in records])
    address, more = table.locate(*(np.array(column, dtype=np.int64) for column in columns))
    for number, record in enumerate(records):
        start, end = starts[number], starts[number] + counts[number]
        held = tokens_at(int(address[number]), table.token_type, counts[number])
        assert held == documents[record][start:end]
        assert more[number] == (end < len(documents[record]))


def test_a_record_of_another_length_than_expected_is_damage() -> None:
    dataset, _ = in_parts([[3, 4], [5]])
    table = PartTable(dataset, "tokens")
    with pytest.raises(CorruptError, match=r"record 2 does not have the 4 elements .* run `headrace verify`"):
        table.locate(np.array([1, 2]), np.zeros(2, np.int64), np.array([4, 4]), np.array([4, 4]))


@pytest.mark.parametrize("offsets", [[0, 9, 7, 12], [0, 3, 13, 12], [0, 3, 2**63, 12]])
def test_damaged_offsets_name_the_record_and_the_remedy(offsets: list[int]) -> None:
    dataset, _ = in_parts([[3, 4, 5]])
    column: Any = dataset.part(0)["tokens"]
    column.offsets[:] = np.array(offsets, dtype=np.uint64).view(np.int64)
    table = PartTable(dataset, "tokens")
    records = np.arange(3)
    with pytest.raises(CorruptError, match=r"the offsets of record 1 are damaged; run `headrace verify`"):
        table.extents(records, table.parts_of(records))


def test_fields_of_a_fixed_shape_have_a_record_at_each_place() -> None:
    data = headrace.from_arrays({"x": np.arange(12, dtype=np.int32).reshape(4, 3), "y": np.arange(4.0)})
    table = PartTable(data, "x")
    assert (table.records, table.elements, table.item_bytes) == (4, 4, 12)
    parts = table.parts_of(np.arange(4))
    for number, address in enumerate(table.addresses(np.arange(4), parts).tolist()):
        assert tokens_at(address, TYPES.index("int32"), 3) == [3 * number, 3 * number + 1, 3 * number + 2]


@pytest.mark.parametrize("values", [np.zeros(4, np.float32), np.zeros((4, 2), np.int32), np.zeros(4, bool)])
def test_only_whole_numbers_are_tokens(values: Any) -> None:
    data = headrace.from_arrays({"x": Ragged(values, np.array([0, 4]))})
    with pytest.raises(FieldError, match="tokens must be whole numbers"):
        _ = PartTable(data, "x").token_type


def test_a_table_that_travels_finds_its_own_memory(tmp_path: Path) -> None:
    with headrace.Writer(tmp_path / "data", {"tokens": "uint16[*]"}, shard_bytes=64) as writer:
        for number in range(9):
            writer.write({"tokens": np.full(number, number, dtype=np.uint16)})
    table = PartTable(headrace.open(tmp_path / "data"), "tokens")
    records = np.arange(9)
    table.parts_of(records)
    copy = pickle.loads(pickle.dumps(table))
    parts = copy.parts_of(records)
    begin, end = copy.extents(records, parts)
    for number, address in enumerate(copy.addresses(begin, parts).tolist()):
        assert tokens_at(address, copy.token_type, int(end[number] - begin[number])) == [number] * number
