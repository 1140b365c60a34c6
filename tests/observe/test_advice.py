"""What is said while training: each finding where it must be said, where it must not, and once."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError
from headrace.observe import advice, host
from headrace.observe.advice import advise, advise_loader, silence
from headrace.observe.data_in_memory import DataKind, DataPiece, data_in_memory
from headrace.observe.facts import Sent
from headrace.observe.findings import Finding, Level
from headrace.observe.rules import (
    batch_size,
    copied_data,
    cpu_use,
    in_ram,
    padding,
    pickled_maps,
    streamed,
    waiting,
    workers,
)

GB = 10**9
NOTICE = Finding("batch-size", Level.WARNING, "Batches of 30", "Give 32")


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A process that has said nothing yet, on a machine of 4 cores and 64 GB without an accelerator."""
    for name in (advice.VARIABLE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(advice, "_said", advice._Said())
    monkeypatch.setattr(advice, "watch_cpu", advice.WatchCpu())
    monkeypatch.setattr(logging.getLogger("headrace.advice"), "disabled", False)
    monkeypatch.setattr(host, "accelerator_available", lambda: False)
    monkeypatch.setattr(host, "useful_cores", lambda: 4.0)
    monkeypatch.setattr(host, "memory_bytes", lambda: 64 * GB)
    monkeypatch.setattr(host, "available_bytes", lambda: 40 * GB)
    caplog.set_level(logging.INFO, "headrace.advice")
    return caplog


@pytest.fixture(scope="module")
def directory(write_dataset: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advice") / "data"
    write_dataset(path, {"tokens": "uint16[*]"}, [[{"tokens": np.arange(20)} for _ in range(100)]])
    return path


def test_a_finding_is_logged_once_with_its_remedy_and_how_to_silence_it(said: Any) -> None:
    advise(NOTICE)
    advise(NOTICE)
    (record,) = said.records
    assert (record.name, record.levelno) == ("headrace.advice", logging.WARNING)
    assert record.message == (
        'Batches of 30. Give 32. (To silence: headrace.silence("batch-size") or HEADRACE_SILENCE=batch-size)'
    )


def test_a_note_is_for_those_who_listen(said: Any) -> None:
    advise(Finding("streamed", Level.NOTE, "Files are read", "Build"))
    assert [record.levelno for record in said.records] == [logging.INFO]


@pytest.mark.parametrize("names", [("batch-size",), ("all",), ("workers", "batch-size")])
def test_what_is_silenced_by_name_is_not_said(said: Any, names: tuple[str, ...]) -> None:
    silence(*names)
    advise(NOTICE)
    assert not said.records


@pytest.mark.parametrize("names", ["batch-size", "all", " workers, batch-size "])
def test_the_environment_can_silence(said: Any, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv(advice.VARIABLE, names)
    advise(NOTICE)
    assert not said.records


def test_silencing_one_leaves_the_others(said: Any) -> None:
    silence("workers")
    advise(NOTICE)
    assert len(said.records) == 1


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"silence\('batchsize'\).*batch-size, workers.*all"):
        silence("batchsize")


def test_an_unknown_name_in_the_environment_is_said_and_stops_nothing(
    said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(advice.VARIABLE, "batchsize")
    advise(NOTICE)
    advise(Finding("workers", Level.WARNING, "12 workers", "Give 4"))
    assert "names batchsize: there is no such finding" in said.records[0].message
    assert len(said.records) == 3


def test_one_rank_of_a_machine_speaks_for_all(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    advise(NOTICE)
    assert not said.records


@pytest.mark.parametrize(
    ("size", "row", "level"),
    [
        (32, 1, None),
        (8, 1, None),
        (30, 1, "warning"),
        (4, 1, "note"),
        (30, 2048, "note"),
        (9, 1023, "warning"),
    ],
)
def test_batch_size(size: int, row: int, level: str | None) -> None:
    found = batch_size.batch_size(size, row)
    assert (found and str(found.level)) == level


def test_waiting() -> None:
    assert waiting.waiting(0.05) is None
    found = waiting.waiting(0.4, "read")
    assert found is not None
    assert "40% of its time; the busiest stage is 'read'" in found.found
    assert "headrace tune" in found.remedy


def test_batch_size_names_what_is_near() -> None:
    assert "batch_size=24 or 32" in str(batch_size.batch_size(30))
    assert "batch_size=8," in str(batch_size.batch_size(5))


@pytest.mark.parametrize(
    ("count", "ranks", "most"), [(4, 1, None), (5, 1, 4), (2, 2, None), (3, 2, 2), (1, 8, None)]
)
def test_workers(count: int, ranks: int, most: int | None) -> None:
    found = workers.workers(count, 4.0, ranks)
    assert (found is None) if most is None else (found is not None and f"workers={most} " in found.remedy)


@pytest.mark.parametrize(("share", "level"), [(0.4, None), (0.41, "note"), (0.75, "note"), (0.76, "alarm")])
def test_cpu_use(share: float, level: str | None) -> None:
    found = cpu_use.cpu_use(share)
    assert (found and str(found.level)) == level


def test_padding() -> None:
    assert padding.padding(0.10) is None
    assert "best-fit" in str(padding.padding(0.11, "pad"))
    assert "windows" in str(padding.padding(0.11, "best-fit"))
    assert "11%" in str(padding.padding(0.11))


MAP = DataPiece("pixels", 12 * GB, DataKind.MAP)
ARRAY = DataPiece("table", GB, DataKind.ARRAY)
OBJECTS = DataPiece("names", GB, DataKind.OBJECTS)


def test_pickled_maps() -> None:
    each = pickled_maps.pickled_maps([MAP, ARRAY], 3, Sent.EACH)
    assert each is not None
    assert (each.level, "pixels: 12,000 MB" in each.found, "each of 3" in each.found) == (
        "warning",
        True,
        True,
    )
    assert (
        str(getattr(pickled_maps.pickled_maps([MAP], 4, Sent.EACH), "level", None)) == "alarm"
    )  # 48 of 40 GB
    assert "once" in str(pickled_maps.pickled_maps([MAP], 4, Sent.ONCE))
    assert pickled_maps.pickled_maps([MAP], 4, Sent.FORK) is None
    assert pickled_maps.pickled_maps([ARRAY, DataPiece("small", 4096, DataKind.MAP)], 4, Sent.EACH) is None


def test_copied_data() -> None:
    assert "table: 1,000 MB" in str(copied_data.copied_data([ARRAY, MAP], 4, Sent.EACH))
    assert copied_data.copied_data([ARRAY], 4, Sent.ONCE) is None
    assert copied_data.copied_data([ARRAY], 4, Sent.FORK) is None
    assert "as references are counted" in str(copied_data.copied_data([OBJECTS], 4, Sent.FORK))
    assert copied_data.copied_data([DataPiece("few", 10**6, DataKind.OBJECTS), MAP], 4, Sent.EACH) is None


def test_in_ram() -> None:
    assert in_ram.in_ram(30 * GB, 1) is None
    assert str(getattr(in_ram.in_ram(33 * GB, 1), "level", None)) == "warning"
    assert str(getattr(in_ram.in_ram(30 * GB, 4), "level", None)) == "alarm"


def test_streamed() -> None:
    assert streamed.streamed(9 * GB, 1) is not None
    assert streamed.streamed(9 * GB, 2) is None
    assert streamed.streamed(0, 1) is None


class Own:
    def __init__(self, file: Path) -> None:
        self.mapped = np.memmap(file, dtype=np.uint8, mode="r")
        self.view = np.asarray(self.mapped[: len(self.mapped) // 2])
        self.table = np.zeros(5_000_000, dtype=np.float32)
        self.words = [f"word {number}" for number in range(20_000)]
        self.inside = {"more": (np.zeros(1_000_000),), "self": self}
        self.path, self.count = "somewhere", 7

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return {"x": self.table[:4]}


class Reopens(Own):
    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bytes.bin"
    path.write_bytes(bytes(30_000_000))
    return path


def test_arrays_maps_and_lists_are_found_by_name(file: Path) -> None:
    held = {each.name: each for each in data_in_memory(Own(file), least_bytes=100_000)}
    assert held["mapped"] == DataPiece("mapped", 30_000_000, DataKind.MAP)
    assert held["view"].kind is DataKind.MAP
    assert held["table"] == DataPiece("table", 20_000_000, DataKind.ARRAY)
    assert held["inside['more'][0]"].bytes == 8_000_000
    assert held["words"].kind is DataKind.OBJECTS
    assert 1_000_000 < held["words"].bytes < 3_000_000


def test_what_pickles_itself_is_not_looked_into(file: Path, directory: Path) -> None:
    assert data_in_memory(Reopens(file)) == []
    assert data_in_memory(headrace.open(directory)) == []
    assert [each.bytes for each in data_in_memory(headrace.from_arrays({"x": np.zeros(1000)}))] == [8000]


def test_a_large_dataset_is_looked_at_in_no_time() -> None:
    class Endless:
        def __init__(self) -> None:
            self.items = [{"a": np.zeros(8), "b": [1, 2]}] * 3_000_000
            self.deep = [[[[[number] * 30] * 30] * 30] for number in range(30)]

    (items, *_) = data_in_memory(Endless())
    assert items.name == "items"


def names_said(said: Any) -> list[str]:
    return [record.message.partition('silence("')[2].partition('"')[0] for record in said.records]


def test_a_loader_that_is_well_says_nothing(said: Any, directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(host, "accelerator_available", lambda: True)
    for _ in headrace.Loader(directory, batch_size=8, seq_len=20):
        pass
    assert names_said(said) == []


def test_a_loader_says_what_is_wrong_when_it_begins_and_only_once(
    said: Any, directory: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(host, "accelerator_available", lambda: True)
    loader = headrace.Loader(directory, batch_size=9, seq_len=31, packing="pad", workers=5)
    for _ in range(2):
        list(loader)
    next(iter(headrace.Loader(directory, batch_size=9, seq_len=31, packing="pad", workers=5)))
    assert names_said(said) == ["batch-size", "workers", "padding"]


def test_threads_beyond_the_cores_are_a_note_and_processes_a_warning(said: Any, directory: Path) -> None:
    loader = headrace.Loader(directory, batch_size=8, seq_len=20, workers=5)
    advise_loader(loader)
    (thread,) = said.records
    assert thread.levelno == logging.INFO
    assert str(getattr(workers.workers(5, 4.0, 1), "level", None)) == "warning"


def test_batch_sizes_and_padding_are_for_accelerators(said: Any, directory: Path) -> None:
    next(iter(headrace.Loader(directory, batch_size=9, seq_len=31, packing="pad")))
    assert names_said(said) == []


def test_the_default_workers_are_no_news_on_one_core(said: Any, directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(host, "useful_cores", lambda: 1.0)
    next(iter(headrace.Loader(directory, batch_size=8, seq_len=20)))
    assert names_said(said) == []


def test_maps_and_data_that_worker_processes_are_sent(said: Any, file: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(copied_data, "LARGE_BYTES", 10_000_000)
    loader = headrace.Loader(Own(file), batch_size=1).map(_same, processes=2)
    advise_loader(loader)
    assert names_said(said) == ["pickled-maps", "copied-data"]


def _same(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_dataset_that_is_loaded_whole(
    said: Any, directory: Path, monkeypatch: Any, in_memory: bool
) -> None:
    monkeypatch.setattr(in_ram, "LARGE_BYTES", 100)
    monkeypatch.setattr(host, "memory_bytes", lambda: 5000)
    data = headrace.open(directory, in_memory=in_memory)
    advise_loader(headrace.Loader(data, batch_size=8, seq_len=20))
    assert names_said(said) == (["in-ram"] if in_memory else [])


def test_a_rule_that_fails_stops_nothing(said: Any, directory: Path, monkeypatch: Any) -> None:
    asked = []

    def fail(*_: Any) -> None:
        asked.append(1)
        raise OSError("no such file")

    monkeypatch.setattr(advice, "examine", fail)
    assert next(iter(headrace.Loader(directory, batch_size=8, seq_len=20))).tokens.shape == (8, 20)
    assert asked == [1]


class Clock:
    def __init__(self, monkeypatch: Any, share: float) -> None:
        self.time, self.reads = 100.0, 0
        self._share = share
        monkeypatch.setattr(host, "read_time", lambda: self.time)
        monkeypatch.setattr(host, "read_cpu_clock", self.read)

    def read(self) -> host.CpuClock:
        self.reads += 1
        return host.CpuClock(self.time, self._share * 4 * self.time, 4.0)


@pytest.mark.parametrize(("share", "levels"), [(0.3, []), (0.5, [logging.INFO]), (0.9, [logging.WARNING])])
def test_cpu_use_is_looked_at_once(said: Any, monkeypatch: Any, share: float, levels: list[int]) -> None:
    monkeypatch.setattr(host, "accelerator_available", lambda: True)
    clock, watch = Clock(monkeypatch, share), advice.WatchCpu()
    watch.begin()
    for _ in range(200):
        clock.time += 1
        watch.look()
    assert [record.levelno for record in said.records] == levels
    assert clock.reads == 2


def test_cpu_use_is_of_no_interest_without_an_accelerator(said: Any, monkeypatch: Any) -> None:
    clock, watch = Clock(monkeypatch, 1.0), advice.WatchCpu()
    watch.begin()
    clock.time += 1000
    watch.look()
    watch.begin()
    assert (clock.reads, said.records) == (0, [])


def test_a_loader_lets_the_processor_be_looked_at(directory: Path, monkeypatch: Any) -> None:
    looked = []
    monkeypatch.setattr(advice.WatchCpu, "look", lambda self: looked.append(1))
    for number, _ in enumerate(headrace.Loader(directory, batch_size=1, seq_len=20, epochs=None)):
        if number == 2 * advice.LOOK_EVERY:
            break
    assert len(looked) == 1 + 2  # When the loop begins, and twice during it.


def test_the_real_machine_has_something() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _ASK],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LOCAL_WORLD_SIZE": "3"},
    )
    cores, allowed, memory, available, ranks, accelerator, share = json.loads(told.stdout)
    assert 0 < cores <= allowed
    assert 0 < available <= memory
    assert (ranks, accelerator) == (3, False)
    assert share > 0


_ASK = """
import json, sys
from headrace.observe import host
before = later = host.read_cpu_clock()
while later.busy_seconds <= before.busy_seconds:
    sum(range(100_000))
    later = host.read_cpu_clock()
share = later.share_since(before)
assert "torch" not in sys.modules
print(json.dumps([host.useful_cores(), host.allowed_cores(), host.memory_bytes(), host.available_bytes(),
                  host.local_ranks(), host.accelerator_available(), share]))
"""


def test_a_quota_of_the_control_group_counts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(host, "_folders", lambda controller: iter([tmp_path]))
    monkeypatch.setattr(host, "allowed_cores", lambda: 64)
    host.useful_cores.cache_clear()
    try:
        (tmp_path / "cpu.max").write_text("250000 100000\n")
        (tmp_path / "memory.max").write_text("1000000\n")
        assert host.useful_cores() == 2.5
        assert host.memory_bytes() == 1_000_000
        host.useful_cores.cache_clear()
        (tmp_path / "cpu.max").write_text("max 100000\n")
        (tmp_path / "memory.max").write_text("max\n")
        assert host.useful_cores() == 64.0
        assert host.memory_bytes() > 1_000_000
    finally:
        host.useful_cores.cache_clear()
