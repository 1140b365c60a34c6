"""The order of an epoch: the consumer's blocks, mixed in windows; every record once, as seed and epoch say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import headrace
from headrace.order.keys import derive
from headrace.order.permutation import permute
from headrace.readers.formats import InputFormat
from headrace.readers.inputs import InputFile
from headrace.streams.bad import StreamBadRecords
from headrace.streams.blocks import Blocks, Turns
from headrace.streams.consumer import Consumer
from headrace.streams.records import RecordCursor
from headrace.streams.window import _WINDOWS, ShuffleWindows
from tests.properties import examples
from tests.streams import files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("order")
    for name, count in (("a", 90), ("b", 0), ("c", 1), ("d", 150)):
        files.write_lines(path / f"{name}.txt", count, name)
    return path


@examples(20)
@example(block_bytes=1, buffer=7, world=2, seed=1, epoch=1)
@given(
    block_bytes=st.integers(20, 3000),
    buffer=st.integers(1, 300),
    world=st.sampled_from(files.WORLDS),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
)
def test_shuffling_loses_and_doubles_nothing(
    folder: Path, block_bytes: int, buffer: int, world: int, seed: int, epoch: int
) -> None:
    wanted = [
        {"text": text}
        for name, count in (("a", 90), ("c", 1), ("d", 150))
        for text in files.lines(count, name)
    ]
    found: list[Any] = []
    for rank in range(world):
        options = {"seed": seed, "buffer": buffer, "block_bytes": block_bytes}
        stream = headrace.stream(folder, rank=rank, world_size=world, **options)
        stream.set_epoch(epoch)
        found += list(stream)
    assert files.as_bag(found) == files.as_bag(wanted)


class Listed:
    """A reader whose block k holds `sizes[k]` records, in chunks of three."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __getitem__(self, format: InputFormat) -> "Listed":
        return self

    def read(self, block: Any, report_bad: Any) -> Any:
        own = [{"k": block.start, "n": number} for number in range(self._sizes[block.start])]
        yield from (own[first : first + 3] for first in range(0, len(own), 3))


@examples(40)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=15),
    consumers=st.integers(1, 4),
    buffer=st.integers(1, 20),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 3),
)
def test_the_order_is_what_the_pages_say(
    sizes: list[int], consumers: int, buffer: int, seed: int, epoch: int
) -> None:
    """The blocks of the consumer in turn, and in each window of `buffer` records the permutation of its key."""
    blocks = Blocks([InputFile("x.txt", InputFormat.TEXT, len(sizes))], 1)
    for number in range(consumers):
        turns = Turns(len(sizes), Consumer(number, consumers), epoch, seed)
        read = []
        try:
            for turn in range(len(sizes)):
                size = sizes[turns[turn]]
                read += [(turns.place(turn), turn, record, turns[turn]) for record in range(size)]
        except IndexError:
            pass
        wanted = []
        begin = (turns.place(0), 0)
        for first in range(0, len(read), buffer):
            window = read[first : first + buffer]
            key = derive(seed, _WINDOWS, epoch, *begin)
            order = permute(np.arange(len(window)), len(window), key)
            wanted += [{"k": window[place][3], "n": window[place][2]} for place in order]
            begin = (window[-1][0], window[-1][2] + 1)
        records = RecordCursor(blocks, turns, Listed(sizes), StreamBadRecords(0))  # type: ignore[arg-type]
        windows, found = ShuffleWindows(records, buffer, seed, epoch), []
        while len(found) < len(wanted):
            found += windows.make()
        assert found == wanted
        with pytest.raises(StopIteration):
            windows.make()


def test_every_epoch_and_seed_has_its_own_order_and_the_same_again(folder: Path) -> None:
    def epochs(**options: Any) -> list[tuple[str, ...]]:
        stream = headrace.stream(folder, block_bytes=500, buffer=50, **options)
        return [tuple(record["text"] for record in stream) for _ in range(3)]

    assert len(set(epochs(seed=1))) == 3
    assert epochs(seed=1) == epochs(seed=1) == epochs(seed=1, shuffle=True)
    assert len({*epochs(seed=1), *epochs(seed=2), *epochs(shuffle=True)}) == 9
    assert len({*epochs(), *epochs(seed=1, shuffle=False)}) == 1


def test_the_example_of_the_module_is_true(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join("abcdefghij"))
    stream = headrace.stream(tmp_path, seed=3, buffer=4)
    assert "".join(record["text"] for record in stream) == "bacdgehfji"


def test_records_of_far_blocks_meet_in_a_window(folder: Path) -> None:
    """Small blocks and a large window mix well: neighbours of the file are not neighbours any more."""
    order = [record["text"] for record in headrace.stream(folder, seed=3, block_bytes=100, buffer=100)]
    place = {text: number for number, text in enumerate(order)}
    texts = files.lines(150, "d")
    apart = [abs(place[a] - place[b]) for a, b in zip(texts[:-1], texts[1:], strict=True)]
    assert np.median(apart) > 20
