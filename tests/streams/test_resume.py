"""Every kind of stream resumes at every step, and a state that belongs to another stream is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import StateError
from headrace.streams import tokenize
from headrace.streams.stream import Stream
from tests.properties import examples
from tests.streams import files
from tests.streams.formats.test_csv import written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    files.write_lines(path / "a.txt", 25)
    files.write_jsonl(path / "a.jsonl", 20)
    files.write_jsonl(path / "b.jsonl", 9, "other")
    rows = [(n, f'text "{n}"\nmore' * (n % 3), n / 2) for n in range(25)]
    (path / "a.csv").write_bytes(written([("n", "text", "x"), *rows]))
    files.write_parquet(path / "a.parquet", 30, group=7)
    return path


Make = Callable[[Path], Stream]
SHUFFLED: dict[str, Any] = {"seed": 5, "buffer": 7, "block_bytes": 300}
STREAMS: dict[str, Make] = {
    "text": lambda path: headrace.stream(path / "a.txt", block_bytes=100),
    "text, shuffled": lambda path: headrace.stream(path / "a.txt", **SHUFFLED),
    "files as records": lambda path: headrace.stream(
        [path / "a.txt", *path.glob("*.jsonl")], split="file", format="text"
    ),
    "JSON lines": lambda path: headrace.stream(path / "*.jsonl", block_bytes=200),
    "JSON lines, shuffled": lambda path: headrace.stream(path / "*.jsonl", **SHUFFLED),
    "CSV": lambda path: headrace.stream(path / "a.csv", block_bytes=90),
    "CSV, shuffled": lambda path: headrace.stream(path / "a.csv", types={"n": int}, **SHUFFLED),
    "Parquet": lambda path: headrace.stream(path / "a.parquet", block_bytes=400),
    "Parquet, shuffled": lambda path: headrace.stream(path / "a.parquet", fields=["n"], **SHUFFLED),
    "one of two ranks": lambda path: headrace.stream(path / "*.jsonl", rank=1, world_size=2, **SHUFFLED),
    "map": lambda path: headrace.stream(path / "*.jsonl", **SHUFFLED).map(files.text_of),
    "filter": lambda path: headrace.stream(path / "*.jsonl", **SHUFFLED).filter(files.has_even_number),
    "batch": lambda path: headrace.stream(path / "*.jsonl", **SHUFFLED).batch(4),
    "batch, the last dropped": lambda path: headrace.stream(path / "*.jsonl").batch(4, drop_last=True),
    "map, filter, batch, map": lambda path: (
        headrace.stream(path / "*.jsonl", **SHUFFLED)
        .map(files.numbered)
        .filter(files.has_even_number)
        .batch(2)
        .map(len)
    ),
    "tokens": lambda path: headrace.stream(path / "*.jsonl", **SHUFFLED).tokenize("bytes"),
    "packed": lambda path: headrace.stream(path / "*.jsonl", **SHUFFLED).tokenize("bytes").pack(40, buffer=6),
    "windows": lambda path: (
        headrace.stream(path / "*.jsonl", **SHUFFLED).tokenize("bytes").pack(30, packing="windows")
    ),
    "padded": lambda path: (
        headrace.stream(path / "a.txt").tokenize("bytes").pack(16, packing="pad", buffer=5)
    ),
    "everything": lambda path: (
        headrace.stream(path / "*.jsonl", **SHUFFLED)
        .filter(files.has_even_number)
        .tokenize("bytes")
        .pack(32, buffer=5)
        .batch(2)
    ),
    "windows in batches": lambda path: (
        headrace.stream(path / "*.jsonl").tokenize("bytes").pack(16, packing="windows").batch(3)
    ),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_TEXTS_AT_ONCE", 5)


@pytest.mark.parametrize("name", STREAMS)
def test_it_resumes_at_every_step(folder: Path, name: str) -> None:
    files.resumes_at_every_step(lambda: STREAMS[name](folder))


@pytest.mark.parametrize("packing", ["best-fit", "windows"])
def test_an_endless_stream_resumes_at_every_step(folder: Path, packing: str) -> None:
    def make() -> Stream:
        stream = headrace.stream(folder / "*.jsonl", repeat=True, **SHUFFLED)
        return stream.tokenize("bytes").pack(64, packing=packing, buffer=6).batch(3)

    files.resumes_at_every_step(make, steps=20)


def test_an_endless_stream_of_records_resumes_at_every_step_of_two_epochs(folder: Path) -> None:
    files.resumes_at_every_step(lambda: headrace.stream(folder / "a.txt", repeat=True, **SHUFFLED), steps=55)


@examples(15)
@given(
    seed=st.integers(0, 99),
    block_bytes=st.integers(20, 2000),
    buffer=st.integers(1, 40),
    steps=st.lists(st.integers(0, 9), max_size=6),
)
def test_any_number_of_stops_changes_nothing(
    folder: Path, seed: int, block_bytes: int, buffer: int, steps: list[int]
) -> None:
    options = {"seed": seed, "block_bytes": block_bytes, "buffer": buffer}

    def make() -> Stream:
        return headrace.stream(folder / "*.jsonl", **options).tokenize("bytes").pack(24, buffer=4)

    uncut = make()
    wanted, found = files.copies(uncut) + files.copies(uncut), []
    state = make().state_dict()
    for count in (*steps, None, None):  # also across the end of the epoch
        stream = make()
        stream.load_state_dict(state)
        found += files.copies(stream, count)
        state = files.through_json(stream.state_dict())
    assert found[: len(wanted)] == wanted


def test_a_state_after_the_end_begins_the_next_epoch(folder: Path) -> None:
    stream = headrace.stream(folder / "a.jsonl", **SHUFFLED)
    first, second = list(stream), list(stream)
    assert first != second
    other = headrace.stream(folder / "a.jsonl", **SHUFFLED)
    items = list(other)
    assert items == first
    resumed = headrace.stream(folder / "a.jsonl", **SHUFFLED)
    resumed.load_state_dict(files.through_json(other.state_dict()))
    assert resumed.epoch == 1
    assert list(resumed) == second
    iterator: Any = iter(other)
    assert list(iterator) == second
    assert iterator.state_dict() == other.state_dict()


def test_a_state_before_the_end_but_after_the_last_record_leaves_nothing_of_the_epoch(folder: Path) -> None:
    stream = headrace.stream(folder / "a.jsonl", **SHUFFLED)
    items = iter(stream)
    for _ in range(20):
        next(items)
    resumed = headrace.stream(folder / "a.jsonl", **SHUFFLED)
    resumed.load_state_dict(stream.state_dict())
    assert list(resumed) == []
    assert resumed.epoch == 1
    assert len(list(resumed)) == 20


def test_making_a_state_takes_no_time_and_reads_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = STREAMS["everything"](folder)
    items = iter(stream)
    next(items)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a state reads nothing")

    monkeypatch.setattr("builtins.open", refuse)
    assert json.dumps(stream.state_dict())


def test_resuming_reads_one_block_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_lines(tmp_path / "a.txt", 3000)
    stream = headrace.stream(tmp_path, block_bytes=2000)
    items = iter(stream)
    for _ in range(2500):
        next(items)
    state = stream.state_dict()
    resumed = headrace.stream(tmp_path, block_bytes=2000)
    resumed.load_state_dict(state)
    read = 0
    from headrace.readers.raw_file import FileBytes

    original = FileBytes.__getitem__

    def counted(self: FileBytes, where: slice) -> Any:
        nonlocal read
        content = original(self, where)
        read += len(content)
        return content

    monkeypatch.setattr(FileBytes, "__getitem__", counted)
    assert next(iter(resumed)) == next(items)
    assert read < 40_000


# States of others


OTHERS: dict[str, tuple[Make, str]] = {
    "another seed": (
        lambda path: headrace.stream(path / "a.jsonl", seed=6),
        "seed is 6 here and 5 in the state",
    ),
    "no shuffle": (
        lambda path: headrace.stream(path / "a.jsonl"),
        "shuffle is not set here and True in the state",
    ),
    "another buffer": (
        lambda path: headrace.stream(path / "a.jsonl", seed=5, buffer=9),
        "buffer is 9 here and 4096 in the state",
    ),
    "other blocks": (
        lambda path: headrace.stream(path / "a.jsonl", seed=5, block_bytes=10),
        "block_bytes is 10 here and 65536 in the state",
    ),
    "other files": (
        lambda path: headrace.stream(path / "*.jsonl", seed=5),
        "inputs is '2 files, .*' here and '1 files, .*' in the state",
    ),
    "other fields": (
        lambda path: headrace.stream(path / "a.jsonl", seed=5, fields=["n"]),
        r"fields is \['n'\] here and not set in the state",
    ),
    "another operation": (
        lambda path: headrace.stream(path / "a.jsonl", seed=5).batch(2),
        r"operations is 'batch\(2\)' here and not set in the state",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_stream_is_refused(folder: Path, name: str) -> None:
    state = headrace.stream(folder / "a.jsonl", seed=5).state_dict()
    make, difference = OTHERS[name]
    with pytest.raises(StateError, match=f"saved by another stream.*{difference}"):
        make(folder).load_state_dict(state)
    iterator: Any = iter(make(folder))
    with pytest.raises(StateError, match="saved by another stream"):
        iterator.load_state_dict(state)


def test_a_state_of_a_file_that_has_grown_since_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    state = headrace.stream(path).state_dict()
    path.write_text("one\ntwo\nthree\n")
    with pytest.raises(StateError, match="inputs is '1 files, 14 bytes, .*' here and '1 files, 8 bytes, "):
        headrace.stream(path).load_state_dict(state)


def test_a_state_is_that_of_one_consumer(folder: Path) -> None:
    def share(rank: int, world_size: int) -> Stream:
        return headrace.stream(folder / "a.jsonl", rank=rank, world_size=world_size, block_bytes=100)

    stream = share(1, 3)
    for other in (share(0, 3), share(1, 2)):  # nothing is read yet: all stand at the beginning
        other.load_state_dict(stream.state_dict())
        list(other)
    next(iter(stream))
    for other in (share(0, 3), share(1, 2), share(0, 1)):
        other.load_state_dict(stream.state_dict())
        with pytest.raises(StateError, match="saved by consumer 1 of 3 .* this is consumer"):
            list(other)
        iterator: Any = iter(share(0, 1))
        with pytest.raises(StateError, match="each consumer must resume from its own state"):
            iterator.load_state_dict(stream.state_dict())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "state of type NoneType: not what a stream's"),
        ({"headrace": 1}, "state of type dict: not what a stream's"),
        ({"headrace_stream": 2}, "state of version 2: this Headrace reads version 1"),
    ],
)
def test_what_is_no_state_is_refused(folder: Path, state: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        headrace.stream(folder / "a.jsonl").load_state_dict(state)


def test_a_damaged_state_is_refused(folder: Path) -> None:
    stream = headrace.stream(folder / "a.jsonl")
    with pytest.raises(StateError, match="the state is damaged: -1 is not a place"):
        stream.load_state_dict(stream.state_dict() | {"epoch": -1})
    stream.load_state_dict(stream.state_dict() | {"place": [0, [0, 500, 0]], "consumer": [0, 1]})
    with pytest.raises(
        StateError, match=r"a\.jsonl, from byte 0: 480 fewer records than when the state was saved"
    ):
        list(stream)


def test_states_stay_small_whatever_the_settings(tmp_path: Path) -> None:
    fields = [f"a_long_name_of_a_column_{number}" for number in range(200)]
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(fields, 1)))
    stream = headrace.stream(tmp_path, fields=fields)
    for _ in range(30):
        stream = stream.map(files.plain)
    assert next(iter(stream)) == dict.fromkeys(fields, 1)
    files.through_json(stream.state_dict())
    other = headrace.stream(tmp_path, fields=fields[:-1])
    with pytest.raises(StateError, match="fields is"):
        other.load_state_dict(headrace.stream(tmp_path, fields=fields).state_dict())
