"""Findings about remote data: where each must be said, and where not."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.format import units
from headrace.observe import advice
from headrace.observe.advice import examine_loader
from headrace.observe.facts import Facts, MixingFacts, RemoteFacts, RunFacts
from headrace.observe.findings import NotLooked
from headrace.observe.rules import RULES
from headrace.observe.stats import FetchStats
from tests.uploads import upload

GB = 10**9
FACTS = RemoteFacts(
    data_bytes=640 * GB,
    units=160_000,
    working_set_bytes=GB // 2,
    cache_bytes=700 * GB,
    shuffle="units",
    packs_within_units=True,
    processes=0,
)
RUN = RunFacts(
    wait_share=0.4,
    busiest="fetch",
    cpu_cores=1.0,
    machine_cpu_share=0.5,
    padding=None,
    has_step=True,
    computes_here=False,
    seconds=2.0,
    fetched=FetchStats(requests=100, bytes=10**8, cached_bytes=10**8),
)
MIXING = MixingFacts(shuffle="units", variance=2.0, batch_rows=256)
NAMES = ("remote-shuffle", "remote-packing", "remote-mixing", "remote-cache", "network")


def outcome(name: str, run: RunFacts | str | None = None, **changes: Any) -> Any:
    facts = Facts(batch_size=256, remote=replace(FACTS, **changes), mixing=MIXING, run=run)
    return RULES[name].look(facts)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong_by_default_and_nothing_is_said_of_local_data(name: str) -> None:
    assert outcome(name, replace(RUN, wait_share=0.01)) == []
    assert RULES[name].look(Facts(batch_size=256, run=RUN)) is None


def test_a_global_shuffle_of_remote_data() -> None:
    (finding,) = outcome("remote-shuffle", shuffle="global")
    assert finding.level == "alarm"
    assert "640.0 GB" in finding.found
    assert "256 requests" in finding.found
    assert "shuffle='units'" in finding.remedy
    # So little stays in memory.
    assert outcome("remote-shuffle", shuffle="global", units=100) == []
    assert outcome("remote-shuffle", shuffle="block") == []


def test_packing_over_the_whole_dataset() -> None:
    (finding,) = outcome("remote-packing", packs_within_units=False)
    assert finding.level == "alarm"
    assert "pack_within='units'" in finding.remedy
    assert outcome("remote-packing", packs_within_units=False, units=100) == []


@pytest.mark.parametrize(
    ("mixing", "level", "remedy"),
    [
        (MixingFacts("units", 7.1, 32), "warning", "lanes=128"),
        (MixingFacts("units", 8.0, 1024), "warning", "lanes=512"),
        (MixingFacts("block", 4.9, 256), "warning", "larger window"),
        # Nobody expects that of the order in which rows are stored, but it may still be a mistake.
        (MixingFacts("none", 255.0, 256), "note", "leave shuffle out"),
    ],
    ids=str,
)
def test_batches_that_are_mixed_badly(mixing: MixingFacts, level: str, remedy: str) -> None:
    (finding,) = RULES["remote-mixing"].look(Facts(remote=FACTS, mixing=mixing))
    assert finding.level == level
    assert f"a batch of {mixing.batch_rows:,} rows varies {mixing.variance:.1f} times" in finding.found
    assert remedy in finding.remedy
    # It takes a while to work out, so a Loader that begins does not know it.
    assert RULES["remote-mixing"].look(Facts(remote=FACTS)) is None


@pytest.mark.parametrize(
    ("cache_gb", "processes", "level", "words"),
    [
        (0, 0, "note", ("no cache", "every epoch fetches all of 640.0 GB")),
        (0, 4, "warning", ("no cache", "each of 4 worker processes fetches all of 640.0 GB in every epoch")),
        (0.1, 0, "note", ("0.1 GB, less than the 0.5 GB", "every epoch")),
        (0.1, 4, "warning", ("less than the 0.5 GB", "4 worker processes")),
        (160, 4, "note", ("room for 160.0 GB of 640.0 GB", "25% of what batches need")),
    ],
)
def test_a_cache_that_is_too_small(
    cache_gb: float, processes: int, level: str, words: tuple[str, ...]
) -> None:
    (finding,) = outcome("remote-cache", cache_bytes=int(cache_gb * GB), processes=processes)
    assert finding.level == level
    for each in words:
        assert each in finding.found
    assert "HEADRACE_CACHE" in finding.remedy


def test_a_cache_of_data_that_stays_in_memory() -> None:
    """Such data is fetched when a run begins, and not in every epoch."""
    (finding,) = outcome("remote-cache", cache_bytes=0, units=128)
    assert finding.found.endswith("every run fetches all of 640.0 GB")
    (finding,) = outcome("remote-cache", cache_bytes=0, units=128, processes=4)
    assert finding.found.endswith("each of 4 worker processes fetches all of 640.0 GB when a run begins")
    assert outcome("remote-cache", cache_bytes=160 * GB, units=128) == []


def test_a_loop_that_waits_for_the_network() -> None:
    (finding,) = outcome("network", RUN)
    assert finding.level == "warning"
    for words in ("40%", "50 MB/s", "100 requests of 1,000 KB", "50% from the cache"):
        assert words in finding.found
    assert outcome("network", replace(RUN, busiest="plan")) == []
    assert outcome("network", replace(RUN, fetched=FetchStats(cached_bytes=5))) == []
    assert isinstance(outcome("network", replace(RUN, has_step=False)), NotLooked)
    assert isinstance(outcome("network", "the run failed"), NotLooked)
    assert outcome("network", None) is None


# Real Loaders


@pytest.fixture
def remote(tmp_path: Path, s3_place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """More units than stay in memory."""
    monkeypatch.setattr(units, "UNIT_BYTES", 400)
    with headrace.Writer(tmp_path / "data", {"tokens": "uint16[*]"}) as writer:
        for number in range(300):
            writer.write({"tokens": np.full(100, number)})
    return upload(tmp_path / "data", s3_place)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"seq_len": 512}, []),
        ({"shuffle": "global"}, ["remote-shuffle"]),
        ({"seq_len": 512, "pack_within": "dataset"}, ["remote-packing"]),
        ({"seq_len": 512, "packing": "windows", "pack_within": "dataset"}, []),
        ({"seq_len": 512, "shuffle": "global", "group_shards": 1}, ["remote-shuffle", "remote-packing"]),
    ],
    ids=str,
)
def test_what_is_said_of_a_loader(
    remote: str, tmp_path: Path, options: dict[str, Any], names: list[str]
) -> None:
    data = headrace.open(remote, cache=tmp_path / "cache", cache_bytes=GB)
    outcomes = examine_loader(headrace.Loader(data, batch_size=8, **options))
    assert [name for name in NAMES if outcomes.get(name)] == names


def test_sources_that_each_stay_in_memory_may_be_shuffled_globally(remote: str, tmp_path: Path) -> None:
    """Two of 75 units have more than 128 together, but each of them keeps all of its own."""
    data = headrace.open(remote)
    assert data.source.units.count == 150
    half = headrace.open(upload(_half(tmp_path), f"{remote}-half"))
    assert half.source.units.count == 75
    mixture = headrace.mix({"a": (half, 0.5), "b": (half, 0.5)})
    outcomes = examine_loader(headrace.Loader(mixture, batch_size=8, shuffle="global"))
    assert outcomes["remote-shuffle"] == []


def _half(folder: Path) -> Path:
    with headrace.Writer(folder / "half", {"tokens": "uint16[*]"}) as writer:
        for number in range(150):
            writer.write({"tokens": np.full(100, number)})
    return folder / "half"


def test_it_is_said_when_a_loop_begins(
    remote: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a process that has said nothing yet.
    monkeypatch.delenv(advice.VARIABLE, raising=False)
    monkeypatch.setattr(advice, "_said", advice._Said())
    monkeypatch.setattr(logging.getLogger("headrace.advice"), "disabled", False)
    caplog.set_level(logging.INFO, "headrace.advice")
    loader = headrace.Loader(remote, batch_size=8, shuffle="global")
    next(iter(loader))
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "shuffle='global' reads single rows" in said
    assert "There is no cache of remote data" in said


def test_stats_count_what_worker_processes_fetch(remote: str, tmp_path: Path) -> None:
    data = headrace.open(remote, cache=tmp_path / "cache", cache_bytes=GB)
    loader = headrace.Loader(data, batch_size=50).map(dict, per="batch", processes=1)
    before = loader.stats()
    assert before.fetched == FetchStats()
    assert sum(len(batch["tokens_offsets"]) - 1 for batch in loader) == 300
    fetched = loader.stats().since(before).fetched
    assert fetched.requests > 0
    assert fetched.bytes + fetched.cached_bytes >= 300 * 200
    assert "network: " in str(loader.stats())
    assert loader.stats().to_json()["fetched"]["requests"] == loader.stats().fetched.requests
    # Now everything is in the cache.
    again = headrace.Loader(headrace.open(remote, cache=tmp_path / "cache", cache_bytes=GB), batch_size=50)
    assert sum(1 for _ in again) == 6
    assert again.stats().fetched.cached_bytes > 0
