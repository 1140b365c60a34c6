"""The compiled loops that find, copy and permute against the same in NumPy, and what they refuse."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import SettingsError
from headrace.order import permutation
from headrace.rows import kernel, reference
from tests.properties import examples
from tests.rows.compiled import compiled_kernel

compiled: Any = compiled_kernel()


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array = array.copy()
    array.setflags(write=False)
    return array


# Where documents lie


class Tables:
    """Parts of documents of given lengths, as `bounds` and `search` want them."""

    def __init__(self, parts: list[list[int]]) -> None:
        self.memory = [np.concatenate([[0], np.cumsum(each)]).astype(np.uint64) for each in parts]
        self.first_record = np.concatenate([[0], np.cumsum([len(each) for each in parts])]).astype(np.int64)
        self.offsets = np.array([each.ctypes.data for each in self.memory], dtype=np.uint64)
        self.elements = np.array([sum(each) for each in parts], dtype=np.int64)

    def part_of(self, record: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.first_record, record, side="right") - 1


PARTS = st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=5)


@examples(60)
@given(PARTS, st.data())
def test_documents_are_found_as_numpy_finds_them(parts: list[list[int]], data: st.DataObject) -> None:
    tables = Tables(parts)
    count = int(tables.first_record[-1])
    record = np.array(
        data.draw(st.lists(st.integers(0, max(count - 1, 0)), max_size=9 if count else 0)), np.int64
    )
    part = tables.part_of(record)
    answers = []
    for loops in (compiled, reference):
        begin, end = np.full(len(record), -1), np.full(len(record), -1)
        arguments = (record, part, tables.first_record, tables.offsets, tables.elements)
        assert loops.bounds(*arguments, begin, end) == -1
        answers.append((begin.tolist(), end.tolist()))
    flat = [(sum(each[:i]), sum(each[: i + 1])) for each in parts for i in range(len(each))]
    assert answers[0] == answers[1]
    assert list(zip(*answers[0], strict=True)) == [flat[number] for number in record.tolist()]


@examples(60)
@given(PARTS.filter(lambda parts: sum(map(sum, parts)) > 0), st.data())
def test_the_document_of_an_element_is_found_as_numpy_finds_it(
    parts: list[list[int]], data: st.DataObject
) -> None:
    tables = Tables(parts)
    places = [(p, e) for p, each in enumerate(parts) for e in range(sum(each))]
    asked = data.draw(st.lists(st.sampled_from(places), max_size=9))
    part = np.array([p for p, _ in asked], dtype=np.int64)
    element = np.array([e for _, e in asked], dtype=np.int64)
    answers = []
    for loops in (compiled, reference):
        out = np.full(len(asked), -1)
        assert loops.search(element, part, tables.first_record, tables.offsets, out) == -1
        answers.append(out.tolist())
    owners = [[i for i, n in enumerate(each) for _ in range(n)] for each in parts]
    assert answers[0] == answers[1] == [owners[p][e] for p, e in asked]


@pytest.mark.parametrize("loops", [compiled, reference], ids=["compiled", "numpy"])
@pytest.mark.parametrize(
    ("offsets", "bad"),
    [
        ([0, 5, 3, 8], 1),
        ([0, 3, 9, 8], 1),
        ([0, 3, 5, 9], 2),
        ([2**63, 3, 5, 8], 0),
        ([0, 2**64 - 1, 5, 8], 0),
    ],
)
def test_damaged_offsets_are_pointed_out(loops: Any, offsets: list[int], bad: int) -> None:
    tables = Tables([[3, 2, 3]])
    tables.memory[0][:] = np.array(offsets, dtype=np.uint64)
    record, begin, end = np.arange(3), np.zeros(3, np.int64), np.zeros(3, np.int64)
    part = np.zeros(3, np.int64)
    arguments = (record, part, tables.first_record, tables.offsets, tables.elements, begin, end)
    assert loops.bounds(*arguments) == bad


@pytest.mark.parametrize(("record", "part"), [(0, -1), (0, 2), (-1, 0), (3, 0), (2, 1), (5, 1), (3, 2**62)])
def test_records_and_parts_that_do_not_exist_are_pointed_out(record: int, part: int) -> None:
    tables = Tables([[1, 2, 3], [4, 5]])
    begin, end = np.zeros(1, np.int64), np.zeros(1, np.int64)
    asked = np.array([record]), np.array([part]), tables.first_record, tables.offsets
    assert compiled.bounds(*asked, tables.elements, begin, end) == 0
    if part not in (0, 1):
        assert compiled.search(*asked, begin) == 0


def test_a_part_that_is_not_loaded_or_has_no_documents_is_pointed_out() -> None:
    tables = Tables([[1], [], [2]])
    tables.offsets[2] = 0
    out = np.zeros(2, np.int64)
    element = np.zeros(2, np.int64)
    for part in (1, 2):
        parts = np.array([0, part])
        assert compiled.search(element, parts, tables.first_record, tables.offsets, out) == 1
    record = np.array([0, 1])
    arguments = record, np.array([0, 2]), tables.first_record, tables.offsets, tables.elements
    assert compiled.bounds(*arguments, out, out.copy()) == 1


def test_tables_of_another_length_or_type_are_refused() -> None:
    tables = Tables([[1, 2, 3], [4, 5]])
    record, part = np.arange(2), np.zeros(2, np.int64)
    out = np.zeros(2, np.int64)
    right: list[Any] = [record, part, tables.first_record, tables.offsets, tables.elements, out, out.copy()]
    assert compiled.bounds(*right) == -1
    for number in range(7):
        for wrong in (
            right[number][:-1],
            right[number].astype(np.int32),
            None,
            np.repeat(right[number], 2)[::2],
        ):
            with pytest.raises(ValueError):
                compiled.bounds(*right[:number], wrong, *right[number + 1 :])
    searched: list[Any] = [*right[:4], out]
    assert compiled.search(*searched) == -1
    for number in range(5):
        for wrong in (right[number][:-1], searched[number].astype(np.int32)):
            with pytest.raises(ValueError):
                compiled.search(*searched[:number], wrong, *searched[number + 1 :])
    with pytest.raises(ValueError):
        compiled.search(*searched[:4], _read_only(out))
    with pytest.raises(TypeError):
        compiled.search("element", *searched[1:])


# Pieces of documents


class Located:
    """Arguments of `locate` for pieces of documents in parts; some parts may not be loaded."""

    def __init__(self, parts: list[list[int]], record: list[int], unloaded: Iterable[int] = ()) -> None:
        self.tables = Tables(parts)
        self.values = np.arange(1000, 1000 + 5000 * len(parts), 5000, dtype=np.uint64)
        lengths = np.array([length for part in parts for length in part], dtype=np.int64)
        self.record = np.array(record, dtype=np.int64)
        known = np.clip(self.record, 0, max(len(lengths) - 1, 0))
        self.whole = lengths[known] if len(lengths) else np.zeros_like(self.record)
        self.start, self.length = np.zeros_like(self.record), self.whole.copy()
        for number in unloaded:
            self.tables.offsets[number] = 0

    def arguments(self) -> list[Any]:
        tables = self.tables
        pieces = [self.record, self.start, self.length, self.whole]
        return [*pieces, tables.first_record, tables.offsets, self.values, tables.elements, 2]

    def call(self, loops: Any) -> tuple[int, list[int], list[bool]]:
        address, more = np.zeros(len(self.record), np.uint64), np.zeros(len(self.record), bool)
        bad = loops.locate(*self.arguments(), address, more)
        return bad, address.tolist(), more.tolist()


@examples(80)
@given(PARTS, st.data())
def test_pieces_are_located_as_numpy_locates_them(parts: list[list[int]], data: st.DataObject) -> None:
    records = sum(map(len, parts))
    asked = data.draw(st.lists(st.integers(-1, records), max_size=6))
    if data.draw(st.booleans()):
        asked = [record for record in asked if 0 <= record < records]
    case = Located(parts, asked, data.draw(st.sets(st.integers(0, len(parts) - 1), max_size=1)))
    for number, whole in enumerate(case.whole.tolist()):
        case.start[number] = data.draw(st.integers(0, whole))
        case.length[number] = data.draw(st.integers(0, whole - int(case.start[number])))
    if asked and data.draw(st.integers(0, 3)) == 0:
        column = data.draw(st.sampled_from([case.start, case.length, case.whole]))
        column[data.draw(st.integers(0, len(asked) - 1))] += data.draw(st.integers(-12, 12))
    found = case.call(compiled)
    assert found[0] == case.call(reference)[0]
    if found[0] < 0:
        assert found == case.call(reference)
        flat = [(p, sum(each[:i])) for p, each in enumerate(parts) for i in range(len(each))]
        starts = [1000 + 5000 * flat[record][0] + 2 * flat[record][1] for record in asked]
        assert found[1] == [at + 2 * start for at, start in zip(starts, case.start.tolist(), strict=True)]
        assert found[2] == (case.start + case.length < case.whole).tolist()


@pytest.mark.parametrize(
    ("start", "length", "whole"),
    [
        (0, 6, 5),
        (0, 5, 6),
        (-1, 3, 5),
        (0, -1, 5),
        (6, 0, 5),
        (2**62, 2**62, 5),
        (5, 2**63 - 1, 5),
        (0, 0, -5),
    ],
)
def test_pieces_that_are_not_of_their_document_are_pointed_out(start: int, length: int, whole: int) -> None:
    case = Located([[5], [5]], [0, 1])
    assert case.call(compiled)[0] == -1
    case.start[1], case.length[1], case.whole[1] = start, length, whole
    assert case.call(compiled)[0] == 1


def test_no_parts_and_records_beyond_them_are_pointed_out() -> None:
    case = Located([[5]], [0])
    for record in (-1, 1, 2**62, -(2**63)):
        case.record[0] = record
        assert case.call(compiled)[0] == 0
        assert case.call(reference)[0] == 0
    nothing = case.arguments()
    nothing[4:8] = [np.zeros(1, np.int64), *(each[:0] for each in nothing[5:8])]
    assert compiled.locate(*nothing, np.zeros(1, np.uint64), np.zeros(1, bool)) == 0


def test_arrays_of_pieces_that_do_not_fit_are_refused() -> None:
    case = Located([[5], [4, 3]], [0, 2])
    right = [*case.arguments(), np.zeros(2, np.uint64), np.zeros(2, bool)]
    assert compiled.locate(*right) == -1
    for number, array in enumerate(right):
        if number == 8:
            continue
        for wrong in (array[:-1], array.astype(np.int32), None, np.repeat(array, 2)[::2]):
            with pytest.raises((ValueError, TypeError)):
                compiled.locate(*right[:number], wrong, *right[number + 1 :])
    for number in (9, 10):
        with pytest.raises(ValueError):
            compiled.locate(*right[:number], _read_only(right[number]), *right[number + 1 :])


# Copies


@given(st.lists(st.binary(max_size=9), max_size=8))
def test_bytes_are_copied_end_to_end(items: list[bytes]) -> None:
    memory = [np.frombuffer(item + b"!", dtype=np.uint8) for item in items]
    address = np.array([each.ctypes.data for each in memory], dtype=np.uint64)
    sizes = np.array([len(item) for item in items], dtype=np.int64)
    for loops in (compiled, reference):
        out = np.full(int(sizes.sum()) + 4, 99, dtype=np.uint8)
        loops.copy(address, sizes, out)
        assert out.tobytes() == b"".join(items) + b"cccc"


@pytest.mark.parametrize("sizes", [[5, 4], [-1, 3], [2**62, 2**62], [2**63 - 1, 2], [9, 0]])
def test_copies_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    memory, out = np.arange(8, dtype=np.uint8), np.full(8, 99, dtype=np.uint8)
    address = np.full(2, memory.ctypes.data, dtype=np.uint64)
    with pytest.raises(ValueError, match="too small"):
        compiled.copy(address, np.array(sizes), out)
    assert (out == 99).all()
    for wrong in (out.astype(np.int64), _read_only(out), out[::2]):
        with pytest.raises(ValueError):
            compiled.copy(address, np.array([1, 1]), wrong)
    with pytest.raises(ValueError, match="differ in length"):
        compiled.copy(address, np.array([1]), out)


# Permutations

SIZES = st.one_of(st.integers(1, 70), st.integers(1, 2**48))


@examples(60)
@given(st.lists(st.tuples(SIZES, st.integers(0, 2**64 - 1), st.floats(0, 1)), max_size=12))
def test_permutations_are_those_of_the_order(asked: list[tuple[int, int, float]]) -> None:
    size = np.array([n for n, _, _ in asked], dtype=np.int64)
    key = np.array([k for _, k, _ in asked], dtype=np.uint64)
    position = np.minimum((size * np.array([f for _, _, f in asked])).astype(np.int64), size - 1)
    expected = [
        int(permutation.permute(p, int(n), int(k))) for p, n, k in zip(position, size, key, strict=True)
    ]
    for loops in (compiled, reference):
        out = np.full(len(asked), -1)
        assert loops.permute(position, size, key, out) == -1
        assert out.tolist() == expected
    assert kernel.permute(position, size, key).tolist() == expected


@examples(50)
@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_one_size_and_key_serve_all_positions(size: int, key: int) -> None:
    found = kernel.permute(np.arange(size), size, np.uint64(key))
    assert found.tolist() == permutation.permute(np.arange(size), size, key).tolist()
    assert sorted(found.tolist()) == list(range(size))


@pytest.mark.parametrize("loops", [compiled, reference], ids=["compiled", "numpy"])
def test_positions_outside_their_permutation_are_pointed_out(loops: Any) -> None:
    out, keys = np.zeros(3, np.int64), np.zeros(3, np.uint64)
    assert loops.permute(np.array([0, 5, 9]), np.array([1, 5, 5]), keys, out) == 1
    assert loops.permute(np.array([0, -1, 0]), np.array([1, 5, 5]), keys, out) == 1
    assert loops.permute(np.array([0, 0, 0]), np.array([1, 5, 0]), keys, out) == 2
    assert loops.permute(np.array([0, 0, 0]), np.array([1, 5, -4]), keys, out) == 2
    with pytest.raises(SettingsError, match="inside their permutation"):
        kernel.permute([7], 7, 0)


def test_arrays_of_permutations_that_differ_in_length_are_refused() -> None:
    right: list[Any] = [np.zeros(3, np.int64), np.full(3, 9), np.zeros(3, np.uint64), np.zeros(3, np.int64)]
    for number in range(4):
        for wrong in (right[number][:2], right[number].astype(np.int32), None):
            if number == 3 and wrong is None:
                continue
            with pytest.raises(ValueError):
                compiled.permute(*right[:number], wrong, *right[number + 1 :])
    with pytest.raises(ValueError):
        compiled.permute(*right[:3], None)
