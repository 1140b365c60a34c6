"""A stream as its users meet it: epochs, loops that are left, copies, and files larger than memory should be."""

import copy
import json
import pickle
import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace
from headrace.errors import SettingsError
from headrace.readers import parquet
from headrace.streams.stream import Stream
from tests.streams import files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    files.write_jsonl(tmp_path / "a.jsonl", 50)
    return tmp_path / "a.jsonl"


def shuffled(path: Path, **options: Any) -> Stream:
    return headrace.stream(path, seed=1, block_bytes=200, buffer=20, **options)


def numbers(stream: Any, count: int | None = None) -> list[int]:
    return [record["n"] for record in islice(stream, count)]


# Epochs


def test_a_loop_is_an_epoch_and_the_next_loop_the_next(path: Path) -> None:
    stream = shuffled(path)
    assert stream.epoch == 0
    epochs = [numbers(stream) for _ in range(3)]
    assert stream.epoch == 3
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert len(set(map(tuple, epochs))) == 3
    for number in (2, 0, 1):
        stream.set_epoch(number)
        assert stream.epoch == number
        assert numbers(stream) == epochs[number]
    with pytest.raises(SettingsError, match="epoch=-1"):
        stream.set_epoch(-1)


def test_a_loop_that_is_left_begins_again_where_it_began(path: Path) -> None:
    stream = shuffled(path)
    first = numbers(stream, 10)
    assert numbers(stream) == numbers(shuffled(path))
    assert first == numbers(shuffled(path), 10)
    assert stream.epoch == 1
    older, newer = iter(stream), iter(stream)
    assert numbers(older, 5) == numbers(newer, 5)
    list(older)
    assert stream.epoch == 1, "an older loop moves the stream"
    list(newer)
    assert stream.epoch == 2


def test_setting_the_epoch_of_a_loaded_state_keeps_its_place(path: Path) -> None:
    stream = shuffled(path)
    list(stream)
    items = iter(stream)
    numbers(items, 7)
    state = stream.state_dict()
    rest = numbers(items)
    for epoch, wanted in ((1, rest), (0, numbers(shuffled(path)))):
        resumed = shuffled(path)
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)  # as trainers do before each epoch, also the first after resuming
        assert numbers(resumed) == wanted
    resumed.load_state_dict(state)
    list(resumed)
    resumed.set_epoch(1)
    assert len(numbers(resumed)) == 50, "a place that was gone on from is used again"


def test_operations_begin_with_the_epoch_of_their_stream(path: Path) -> None:
    stream = shuffled(path)
    stream.set_epoch(3)
    assert numbers(stream.map(files.numbered)) == numbers(stream)


def test_repeat_never_ends_and_has_every_record_once_an_epoch(path: Path) -> None:
    stream = shuffled(path, repeat=True)
    found = numbers(stream, 150)
    plain = shuffled(path)
    assert found == [number for _ in range(3) for number in numbers(plain)]
    batches = shuffled(path, repeat=True).batch(40)
    assert [len(batch["n"]) for batch in islice(batches, 5)] == [40] * 5


def test_repeat_tells_if_nothing_ever_comes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    empty = headrace.stream(tmp_path, repeat=True, rank=1, world_size=2)
    other = headrace.stream(tmp_path, repeat=True, rank=0, world_size=2)
    found = 0
    for stream in (empty, other):
        try:
            found += len(list(islice(stream, 3)))
        except SettingsError as error:
            assert "no record in 100 epochs: there are fewer blocks than ranks times workers" in str(error)
    assert found == 3, "the one block goes to one of the two ranks"
    # Shuffled, it comes round.
    for rank in range(2):
        assert next(iter(headrace.stream(tmp_path, repeat=True, seed=0, rank=rank, world_size=2)))


# What others make of it


def test_it_has_no_length(path: Path) -> None:
    with pytest.raises(TypeError):
        len(headrace.stream(path))  # type: ignore[arg-type]
    assert headrace.stream(path)


def test_it_says_what_it_is(path: Path) -> None:
    stream = headrace.stream(path).map(files.text_of).batch(3)
    assert repr(stream) == f"stream(1 file, {path.stat().st_size:,} bytes).map(text_of).batch(3)"


def test_a_pickle_holds_paths_and_settings_and_its_place(path: Path) -> None:
    stream = shuffled(path)
    numbers(stream)
    items = iter(stream)
    numbers(items, 5)
    content = pickle.dumps(stream)
    assert len(content) < 2000
    assert b"line 7" not in content
    assert numbers(pickle.loads(content)) == numbers(stream)
    other = copy.copy(stream)
    assert numbers(other) == numbers(stream)
    resumed = shuffled(path)
    resumed.load_state_dict(shuffled(path).state_dict())
    assert numbers(pickle.loads(pickle.dumps(resumed.filter(files.has_even_number)))) == [
        number for number in numbers(shuffled(path)) if number % 2 == 0
    ]


def test_ranks_are_those_of_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        stream = headrace.stream(path, block_bytes=200)
        sent = pickle.dumps(stream)
        part = numbers(stream)
        monkeypatch.delenv("RANK")
        assert numbers(pickle.loads(sent)) == part, "a worker that is started anew does not know its rank"
        found += part
    assert sorted(found) == list(range(50))


def test_a_stream_alone_does_not_import_torch(path: Path) -> None:
    program = (
        f"import sys, headrace\nstream = headrace.stream({str(path)!r}, seed=1).tokenize('bytes').pack(32).batch(2)\n"
        "print(len(list(stream)) > 9, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr


# Constant memory


def write_large(path: Path, megabytes: int) -> None:
    text = "water " * 30
    if path.suffix == ".parquet":
        groups = [pa.table({"text": [f"{number} {text}" for number in range(1000)]})] * (megabytes * 5)
        with pq.ParquetWriter(path, groups[0].schema, compression="none") as writer:
            for group in groups:
                writer.write_table(group)
        return
    line = {".txt": text, ".jsonl": json.dumps({"text": text}), ".csv": f'1,"{text}\nand more"'}[
        path.suffix
    ] + "\n"
    with open(path, "w") as file:
        file.write("n,text\n" if path.suffix == ".csv" else "")
        for _ in range(megabytes):
            file.write(line * (2**20 // len(line)))


@pytest.mark.parametrize(
    ("ending", "packed"),
    [("txt", False), ("jsonl", False), ("csv", False), ("parquet", False), ("jsonl", True)],
)
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, ending: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "READ_BYTES", 2**18)
    path = tmp_path / f"a.{ending}"
    write_large(path, 4)
    stream = headrace.stream(path, seed=1, buffer=500, block_bytes=2**18)
    stream = stream.tokenize("bytes").pack(256, buffer=64) if packed else stream
    next(iter(stream))  # what is imported and cached is not counted
    items = iter(stream)
    tracemalloc.start()
    for _ in items:
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
