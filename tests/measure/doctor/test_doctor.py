"""The rules that only `headrace doctor` asks: where each must speak and where it must not; and what becomes of them."""

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.measure.doctor import doctor, examined, reads
from headrace.measure.doctor.loaders import facts_of
from headrace.measure.doctor.reads import measure_reads
from headrace.measure.running.page_cache import UNPROVED
from headrace.measure.running.run import Run
from headrace.measure.running.steps import Step
from headrace.observe import advice, host
from headrace.observe.facts import Facts, Reads
from headrace.observe.findings import Finding, Level, NotLooked
from headrace.observe.rules import RULES
from headrace.observe.rules.blocking_copies import blocking_copies
from headrace.observe.rules.random_reads import random_reads
from tests.measure.held_clock import TICK_SECONDS, HeldClock

GB = 10**9

pytestmark = pytest.mark.usefixtures("machine")


# Copies in the step's source


def waits(batch: Any, device: str = "cuda") -> Any:
    x = batch["x"].to(device)
    return x, batch["y"].cuda(), batch["z"].to(device="cuda", non_blocking=False)


def flows(batch: Any, torch: Any, device: str = "cuda", **options: Any) -> Any:
    x = batch["x"].to(device, non_blocking=True).to(torch.bfloat16).to("cpu")
    return x, batch["y"].cuda(non_blocking=True), batch["z"].to(device, **options), x.to(dtype=torch.half)


def outcome(name: str, run: Run | None, step: Step, **known: Any) -> Any:
    """What a rule says of a run."""
    facts = Facts(**known)
    seen = "the loop was not run" if run is None else doctor._run_facts(run, step, facts)
    return RULES[name].look(replace(facts, run=seen))


def test_copies_that_the_step_waits_for_are_named_by_file_and_line() -> None:
    (finding,) = blocking_copies(waits)
    line = waits.__code__.co_firstlineno
    assert finding.name == "blocking-copies"
    assert f"test_doctor.py:{line + 1}: .to(device)" in finding.found
    assert f"test_doctor.py:{line + 2}: .cuda()" in finding.found
    assert finding.found.count("test_doctor.py") == 3


def test_copies_that_nobody_waits_for_are_fine() -> None:
    assert blocking_copies(flows) == []


def test_steps_without_source() -> None:
    assert isinstance(blocking_copies(len), NotLooked)
    assert isinstance(blocking_copies(functools.partial(waits, device="cuda")), NotLooked)


class Stepper:
    def __call__(self, batch: Any) -> Any:
        return batch.cuda()


def test_a_step_that_is_an_object_and_a_method() -> None:
    assert len(blocking_copies(Stepper())) == 1
    assert len(blocking_copies(Stepper().__call__)) == 1


# Storage


def slow(data_bytes: int) -> Reads:
    return Reads(
        50, small_ms=8.0, random_mb_per_second=7.0, sequential_mb_per_second=150.0, data_bytes=data_bytes
    )


@pytest.mark.parametrize(
    ("data_bytes", "level", "remedy"),
    [
        (100 * GB, "warning", "shuffle='block'"),
        (30 * GB, "note", "once in order"),
        (GB, "note", "in_memory=True"),
    ],
)
def test_slow_random_reads(data_bytes: int, level: str, remedy: str) -> None:
    finding = random_reads(slow(data_bytes))
    assert finding is not None
    assert (finding.level, remedy in finding.remedy) == (level, True)
    assert (
        "8.0 ms for 4 KB, 7.0 MB/s for 64 KB at a time, 150 MB/s in order (50 reads, cold)" in finding.found
    )


def test_random_reads_that_are_fast_or_no_slower_than_others() -> None:
    assert random_reads(Reads(400, 0.1, 600.0, 2000.0, 100 * GB)) is None
    assert random_reads(Reads(400, 8.0, 7.0, 20.0, 100 * GB)) is None


def test_reads_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: HeldClock) -> None:
    """On a clock that the test holds: every look at it takes a microsecond, and a read is two looks apart."""
    monkeypatch.setattr(reads, "LEAST_BYTES", 1_000_000)
    monkeypatch.setattr(reads, "drop_files", lambda files: None)
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(bytes(2_000_000))
    measured = measure_reads(files)
    assert isinstance(measured, Reads)
    assert measured.data_bytes == 4_000_000
    assert measured.reads == 400
    assert measured.small_ms == pytest.approx(1e3 * TICK_SECONDS)
    assert measured.random_mb_per_second == pytest.approx(reads.LARGE_BYTES / TICK_SECONDS / 1e6)
    assert measured.sequential_mb_per_second > 0


def test_a_slow_storage_is_given_up_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: HeldClock
) -> None:
    monkeypatch.setattr(reads, "LEAST_BYTES", 1_000_000)
    monkeypatch.setattr(reads, "drop_files", lambda files: None)
    (tmp_path / "a").write_bytes(bytes(4_000_000))
    read = os.pread

    def slow_read(*given: Any) -> bytes:
        held.sleep(0.1)
        return read(*given)

    monkeypatch.setattr(os, "pread", slow_read)
    measured = measure_reads([tmp_path / "a"], seconds=1.5)
    assert isinstance(measured, Reads)
    # A second for reads from anywhere; the first one after it is the last.
    assert measured.reads in (10, 11)
    assert measured.small_ms == pytest.approx(100, rel=0.01)


def test_reads_that_cannot_be_measured_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    assert measure_reads([]) == "the files that are read are unknown"
    assert "too small" in str(measure_reads([tmp_path / "a"]))
    monkeypatch.setattr(reads, "LEAST_BYTES", 1)
    monkeypatch.setattr(reads, "drop_files", lambda files: "they are mapped")
    assert measure_reads([tmp_path / "a"]) == "the page cache could not be dropped: they are mapped"


def test_reads_are_measured_even_if_it_is_uncertain_whether_files_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LEAST_BYTES", 1)
    monkeypatch.setattr(reads, "drop_files", lambda files: f"{UNPROVED} the files were dropped")
    (tmp_path / "a").write_bytes(bytes(2_000_000))
    assert isinstance(measure_reads([tmp_path / "a"]), Reads)


# Which rules apply


@pytest.fixture(scope="module")
def directory(write_dataset: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "data"
    write_dataset(path, {"tokens": "uint16[*]"}, [[{"tokens": np.arange(20)} for _ in range(100)]])
    return path


def test_without_an_accelerator_batch_sizes_are_a_note(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = headrace.Loader(directory, batch_size=9, seq_len=31)
    (finding,) = examined.look_at(facts_of(loader))["batch-size"]
    assert finding.level == "note"
    monkeypatch.setattr(host, "accelerator_available", lambda: True)
    (finding,) = examined.look_at(facts_of(loader))["batch-size"]
    assert finding.level == "warning"


def test_facts_of_a_loader(directory: Path) -> None:
    scattered = facts_of(headrace.Loader(directory, batch_size=8, seq_len=20, shuffle="none"))
    assert (scattered.random_order, scattered.packing) == (True, "best-fit")
    assert sorted(scattered.files) == sorted(str(each) for each in directory.iterdir())
    windows = facts_of(
        headrace.Loader(directory, batch_size=8, seq_len=20, shuffle="none", packing="windows")
    )
    assert not windows.random_order
    loaded = headrace.Loader(headrace.open(directory, in_memory=True), batch_size=8, seq_len=20)
    assert not facts_of(loaded).files
    assert facts_of([1, 2]) == Facts(loaded_bytes=0)


def test_a_stream_by_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 9)
    assert [
        each.name
        for each in examined.look_at(facts_of(headrace.stream(str(tmp_path / "a.jsonl"))))["streamed"]
    ] == ["streamed"]


def test_anything_to_iterate_over() -> None:
    assert examined.look_at(facts_of([1, 2])) == {"in-ram": []}


# What is made of a measurement


@pytest.mark.parametrize(("cores", "levels"), [(1.0, []), (2.0, ["note"]), (3.5, ["alarm"])])
def test_cpu_use_by_what_was_measured(cores: float, levels: list[str]) -> None:
    found = outcome("cpu-use", Run(cpu_cores=cores), Step(compute_ms=5), accelerator=False)
    assert [str(each.level) for each in found] == levels


def test_cpu_use_counts_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    (finding,) = outcome("cpu-use", Run(cpu_cores=0.9), Step(compute_ms=5), accelerator=False)
    assert "90% busy" in finding.found


def test_cpu_use_means_nothing_without_a_step_or_on_the_processor() -> None:
    step = Step(function=waits)
    assert isinstance(outcome("cpu-use", Run(cpu_cores=4.0), Step(), accelerator=True), NotLooked)
    assert isinstance(outcome("cpu-use", Run(cpu_cores=4.0), step, accelerator=False), NotLooked)
    assert len(outcome("cpu-use", Run(cpu_cores=4.0), step, accelerator=True)) == 1
    assert isinstance(outcome("cpu-use", None, step, accelerator=True), NotLooked)


def test_waiting_by_what_was_measured() -> None:
    run = Run(wait_share=0.5, stats={"busiest": "read"})
    (finding,) = outcome("waiting", run, Step(compute_ms=5))  # type: ignore[misc]
    assert "50%" in finding.found
    assert "'read'" in finding.found
    assert outcome("waiting", Run(wait_share=0.01), Step(compute_ms=5)) == []
    assert isinstance(outcome("waiting", run, Step()), NotLooked)


@pytest.mark.parametrize(
    ("threads", "workers", "ranks", "busy_cores", "found"),
    [
        (4, 0, 1, 4.0, False),  # one thread for each core
        (4, 3, 1, 4.0, True),
        (4, 3, 1, 2.0, False),  # they had room beside each other
        (1, 3, 1, 4.0, False),
        (2, 0, 4, 1.0, True),
        (1, 0, 4, 1.0, False),
    ],
)
def test_torch_threads_by_what_was_measured(
    threads: int, workers: int, ranks: int, busy_cores: float, found: bool
) -> None:
    """On a machine of four cores."""
    step = Step(function=waits)
    known = {"torch_threads": threads, "worker_processes": workers, "ranks": ranks, "accelerator": False}
    findings = outcome("torch-threads", Run(cpu_cores=busy_cores), step, **known)
    assert len(findings) == found
    if found:
        assert f"with {threads} threads" in findings[0].found
        assert f"torch.set_num_threads({max(1, 4 // ranks - workers)})" in findings[0].remedy


def test_torch_threads_on_a_machine_that_others_keep_busy() -> None:
    """There, the loop's own use of the processor is no proof that its threads had room."""
    step = Step(function=waits)
    known = {"torch_threads": 4, "worker_processes": 2, "accelerator": False}
    for share, found in ((0.2, 0), (0.95, 1)):
        run = Run(cpu_cores=0.5, machine_cpu_share=share)
        assert len(outcome("torch-threads", run, step, **known)) == found
    alone = {**known, "worker_processes": 0}
    assert outcome("torch-threads", Run(cpu_cores=0.5, machine_cpu_share=0.95), step, **alone) == []


def test_torch_threads_need_a_step_that_computes_here() -> None:
    run, known = Run(cpu_cores=4.0), {"torch_threads": 4, "worker_processes": 4}
    assert outcome("torch-threads", run, Step(compute_ms=5), **known) is None
    assert outcome("torch-threads", run, Step(function=waits), accelerator=True, **known) is None
    assert isinstance(outcome("torch-threads", None, Step(function=waits), **known), NotLooked)
    assert outcome("torch-threads", run, Step(function=waits)) is None, "the program does not use PyTorch"


def test_padding_by_what_was_measured() -> None:
    assert len(outcome("padding", Run(padding=0.3), Step())) == 1
    assert outcome("padding", Run(padding=0.05), Step()) == []
    assert isinstance(outcome("padding", Run(), Step()), NotLooked)
    assert outcome("padding", Run(), Step(), padding=0.0) == []


def test_findings_are_told_the_worst_first_and_silenced_ones_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def finding(name: str, level: Level) -> list[Finding]:
        return [Finding(name, level, "Found", "Do")]

    monkeypatch.setenv(advice.VARIABLE, "padding")
    found = doctor._summed_up(
        {
            "batch-size": finding("batch-size", Level.NOTE),
            "cpu-use": finding("cpu-use", Level.ALARM),
            "padding": finding("padding", Level.ALARM),
            "workers": [],
            "in-ram": NotLooked("nobody knows"),
        }
    )
    assert [each.name for each in found.findings] == ["cpu-use", "batch-size"]
    assert (found.fine, found.not_looked, found.silenced) == (
        ["workers"],
        {"in-ram": "nobody knows"},
        ["padding"],
    )
    assert found.alarms == 1


def test_outcomes_survive_the_way_from_the_child() -> None:
    outcomes = {
        "workers": [Finding("workers", Level.ALARM, "a", "b")],
        "padding": [],
        "in-ram": NotLooked("c"),
    }
    assert examined.outcomes_from_json(examined.outcomes_to_json(outcomes)) == outcomes


def test_every_finding_has_its_section_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    assert [name for name in RULES if f"\n## {name}\n" not in page] == []
