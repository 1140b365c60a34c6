"""Blocks: every byte of every file in one, and every one dealt to exactly one consumer, in another order each epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile
from headrace.readers.reader import Split
from headrace.streams.blocks import Blocks, Turns
from headrace.streams.consumer import Consumer
from headrace.streams.settings import automatic_block_bytes
from tests.properties import examples


def dealt(blocks: int, consumers: int, epoch: int = 0, seed: int | None = None) -> list[list[int]]:
    """The blocks of each consumer, in its order."""
    parts = []
    for number in range(consumers):
        turns, part = Turns(blocks, Consumer(number, consumers), epoch, seed), []
        while True:
            try:
                part.append(turns[len(part)])
            except IndexError:
                break
        parts.append(part)
    return parts


@examples(40)
@given(st.integers(1, 200), st.integers(1, 30), st.integers(0, 3), st.none() | st.integers(0, 2**64 - 1))
def test_every_block_goes_to_one_consumer(blocks: int, consumers: int, epoch: int, seed: int | None) -> None:
    parts = dealt(blocks, consumers, epoch, seed)
    assert sorted(number for part in parts for number in part) == list(range(blocks))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert dealt(blocks, consumers, epoch, seed) == parts


def test_one_consumer_without_a_seed_takes_them_as_they_are_stored() -> None:
    assert dealt(600, 1) == [list(range(600))]
    for part in dealt(600, 5):
        assert part == sorted(part)


def test_every_epoch_and_seed_has_an_order_of_its_own() -> None:
    orders = [dealt(100, 1, epoch, seed)[0] for epoch in range(5) for seed in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 15
    assert len({tuple(part) for part in dealt(100, 4, 0, 7) + dealt(100, 4, 1, 7)}) == 8


def test_a_turn_can_be_looked_up_without_those_before_it() -> None:
    whole = dealt(5000, 3, 2, 9)[1]
    for turn in (0, 255, 256, 1000, len(whole) - 1):
        assert Turns(5000, Consumer(1, 3), 2, 9)[turn] == whole[turn]


def test_what_stands_in_every_so_manieth_block_is_shared() -> None:
    """As the row groups of a Parquet file do."""
    for consumers in (2, 4, 8):
        for stride in (consumers, 2 * consumers, consumers // 2):
            counts = [sum(number % stride == 0 for number in part) for part in dealt(1600, consumers)]
            assert sum(counts) == 1600 // stride
            assert min(counts) > sum(counts) / consumers / 3


@given(st.lists(st.integers(0, 500), min_size=1, max_size=8), st.integers(1, 200))
def test_the_blocks_of_a_file_follow_each_other_without_a_gap(sizes: list[int], block_bytes: int) -> None:
    files = [InputFile(f"{number}.txt", InputFormat.TEXT, size) for number, size in enumerate(sizes)]
    blocks = Blocks(files, block_bytes)
    found = [blocks[number] for number in range(blocks.count)]
    for file in files:
        own = [block for block in found if block.file == file]
        assert [block.start for block in own] == list(range(0, max(file.bytes, 1), block_bytes))
        assert [block.stop for block in own] == [*(block.start for block in own[1:]), file.bytes]
    assert [block.file.path for block in found] == sorted(block.file.path for block in found)


def test_what_cannot_be_entered_in_the_middle_is_one_block() -> None:
    packed = InputFile("a.csv.gz", InputFormat.CSV, 1000)
    text, table = InputFile("b.txt", InputFormat.TEXT, 1000), InputFile("c.csv", InputFormat.CSV, 1000)
    assert Blocks([packed, text, table], 100).count == 1 + 10 + 10
    assert Blocks([packed, text, table], 100, Split.FILE).count == 1 + 1 + 10


@pytest.mark.parametrize(
    ("total", "wanted"), [(0, 2**16), (2**20, 2**16), (2**30, 2**22), (2**40, 2**24), (3 * 2**27, 2**21)]
)
def test_the_size_of_blocks_is_chosen_by_the_size_of_the_inputs(total: int, wanted: int) -> None:
    assert automatic_block_bytes(total) == wanted


def test_the_example_of_the_module_is_true() -> None:
    parts = dealt(7, 3, 0, 1)
    places = [[Turns(7, Consumer(number, 3), 0, 1).place(turn) for number in range(3)] for turn in range(3)]
    order = [-1] * 9
    for number, part in enumerate(parts):
        for turn, block in enumerate(part):
            order[places[turn][number]] = block
    assert order == [1, 6, 0, 4, 5, 3, 2, -1, -1]
    assert [[place % 3 for place in turn] for turn in places] == [[1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert parts == [[6, 3, 2], [0, 4], [1, 5]]
