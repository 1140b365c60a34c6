"""Servers as a target: their addresses are measured, tuned and examined like a dataset, by a RemoteLoader."""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.cli.tune import describe as tune_lines
from headrace.errors import SettingsError, TargetError
from headrace.load.target import names_function
from headrace.measure.doctor import doctor
from headrace.measure.doctor.examined import make_examined, read_report
from headrace.measure.reporting.table import table
from headrace.measure.running.bench import BenchSettings, bench
from headrace.measure.running.knobs import knobs_of
from headrace.measure.running.run import Plan, measure
from headrace.measure.running.servers import count_servers, names_servers, parse_servers
from headrace.measure.running.steps import Step
from headrace.measure.running.targets import find_target
from headrace.measure.tuning.search import Trial, Tuning
from headrace.measure.tuning.servers import served_trial, servers_needed
from headrace.measure.watching.monitor import Sampler
from headrace.measure.watching.prometheus import exposition
from headrace.observe.rules import RULES
from headrace.serve.worker import Served
from tests.serve import served
from tests.serve.servers import ThreadServer, thread_server

NEVER_SECONDS = 600.0
STEP = Step(compute_ms=1)
PLAN = Plan(batches=10, warmup=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    """One that makes a batch in 10 ms, with two addresses."""
    with thread_server(Served(loader=served.slow()), tmp_path_factory.mktemp("served")) as started:
        yield started


@pytest.mark.parametrize(
    ("name", "addresses"),
    [
        ("grpc://cpu-1:9000", ["grpc://cpu-1:9000"]),
        ("grpc+tls://cpu-1:9000, unix:///run/a.sock", ["grpc+tls://cpu-1:9000", "unix:///run/a.sock"]),
        ("unix:///run/a,b.sock,unix:///run/c", ["unix:///run/a,b.sock", "unix:///run/c"]),
        ("file:///shared/servers", ["file:///shared/servers"]),
        ("ray:headrace", ["ray:headrace"]),
    ],
)
def test_addresses_of_servers_are_a_target(name: str, addresses: list[str]) -> None:
    target = find_target(name, {})
    assert target.is_served
    assert not target.is_dataset
    assert target.files() == []
    assert parse_servers(name) == addresses


@pytest.mark.parametrize(
    "name", ["train:make_loader", "unix:make", "file:make", "s3://bucket/data", "rays:x", "data", "data/a:b"]
)
def test_nothing_else_is_taken_for_servers(name: str) -> None:
    assert not names_servers(name)


def test_a_file_of_that_name_is_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ray:data").mkdir()
    assert not names_servers("ray:data")
    assert not names_function("ray:data")
    assert find_target("ray:data", {}).is_dataset


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("grpc://cpu-1", "must be grpc://host:port"),
        ("grpc:/cpu-1:9000", "must be grpc://host:port"),
        ("unix://run/a.sock", "give an absolute path"),
        ("grpc://cpu-1:9000,cpu-2:9000", "grpc://127.0.0.1:9000"),
    ],
)
def test_addresses_that_are_wrong_are_told_at_once(name: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        find_target(name, {})


def test_a_target_that_is_nothing_says_what_could_be_given() -> None:
    with pytest.raises(TargetError, match="the addresses of servers"):
        find_target("no/such/data", {})


def test_the_first_servers_are_used(server: ThreadServer, tmp_path: Path) -> None:
    (tmp_path / "servers").write_text(f"{server.unix}  # first\n\n{server.grpc}\n")
    name = f"file://{tmp_path}/servers"
    assert count_servers(name) == 2
    loader = find_target(name, {"servers": 1, "prefetch_factor": 3}).make()
    assert isinstance(loader, headrace.RemoteLoader)
    assert list(loader.stats().servers) == [server.unix]
    assert loader.settings.prefetch == 3
    both = find_target(f"{server.grpc},{server.unix}", {}).make()
    assert set(both.stats().servers) == {server.grpc, server.unix}
    for count, said in ((3, "servers=3: the target has 2; give the addresses of more"), (0, "at least 1")):
        with pytest.raises(SettingsError, match=said):
            find_target(name, {"servers": count}).make()
    loader.close()
    both.close()
    with pytest.raises(SettingsError, match=r"file:///no/such/file: cannot be read"):
        count_servers("file:///no/such/file")


def test_settings_of_servers_are_theirs(server: ThreadServer) -> None:
    for settings, said in (
        ({"batch_size": 5}, "the Loader of the servers has 4"),
        ({"num_workers": 2}, "workers: batches are made by the servers"),
        ({"cache": "off"}, "the servers open the data"),
        ({"btach_size": 4}, "btach_size: a Loader has no such setting; did you mean batch_size"),
    ):
        with pytest.raises(SettingsError, match=said):
            find_target(server.unix, settings).make()


def test_a_device_gives_tensors(server: ThreadServer) -> None:
    torch = pytest.importorskip("torch", reason="a device needs PyTorch")
    loader = find_target(server.unix, {"device": "cpu"}).make()
    assert isinstance(next(iter(loader))["x"], torch.Tensor)
    loader.close()


def test_what_is_measured_was_not_made_before(server: ThreadServer) -> None:
    """Servers keep what they have made: a second measurement of the same batches would be that of their memory."""
    places = set()
    for _ in range(2):
        loader = find_target(server.unix, {}).make()
        places.add(loader.state_dict()["position"])
        assert loader.state_dict()["position"] % loader.rows_per_epoch == 0
        loader.close()
    assert len(places) == 2


def test_what_can_be_tuned(server: ThreadServer) -> None:
    target = find_target(f"{server.grpc},{server.unix}", {})
    loader = target.make()
    knobs = knobs_of(target, loader)
    assert (knobs.count, knobs.depth, knobs.batch, knobs.servers) == (None, "prefetch", None, "servers")
    assert knobs.now == {"prefetch": None, "servers": 2}
    loader.close()


def test_bench(server: ThreadServer) -> None:
    """In a process of its own, as the commands do it."""
    target = find_target(f"{server.unix},{server.grpc}", {"prefetch": 4})
    settings = BenchSettings(runs=1, sweeps={"servers": [1]}, timeout_seconds=NEVER_SECONDS)
    report = bench(target, STEP, PLAN, settings)
    assert report.notes == ["first batch, cold: not measured: the data is read by the servers"]
    (point,) = report.points
    assert point.errors == []
    assert set(point.runs[0]["stats"]["servers"]) == {server.unix}
    # It sleeps for that long.
    assert point.summary["server_making_ms"]["median"] >= 10
    assert point.summary["server_network_ms"]["median"] > 0
    assert {"server_queue_ms", "server_late", "server_faults"} <= set(point.summary)
    shown = "\n".join(table(report))
    assert "server, making" in shown


def test_doctor_and_tune_know_where_the_time_goes(
    server: ThreadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The doctor's process logs no advice.
    monkeypatch.setattr(logging.getLogger("headrace.advice"), "disabled", False)
    written = tmp_path / "report.json"
    target = find_target(server.unix, {})
    loader = make_examined(target.to_json(), None, str(written), run=True)
    outcomes, facts, costs = read_report(written)
    assert facts.servers == 1
    assert costs == {}
    assert "workers" not in outcomes, "there are none on this machine"
    run = measure(lambda: loader, STEP, PLAN)
    loader.close()

    # How much the loop waits, and for which of the two, depends on how busy the machine is.
    waiting = dataclasses.replace(doctor._run_facts(run, STEP, facts), wait_share=0.5)
    seen = dataclasses.replace(facts, run=waiting)
    findings = [RULES[name].look(seen) for name in ("waiting", "servers", "server-network")]
    assert sorted(len(list(each)) for each in findings) == [0, 1, 1]  # type: ignore[arg-type]
    assert findings[0]

    trial = served_trial(run)
    assert trial is not None
    assert (trial.servers, trial.slots) == (1, 1)
    assert trial.in_flight > trial.slots
    assert trial.step_seconds == pytest.approx(1e-3)
    assert trial.times.made >= 0.01
    needed = servers_needed(trial, 0.5)
    lines = tune_lines(Tuning(Trial(settings={}, rate=1.0), servers=needed))
    assert f"  servers: {needed.said}" in lines


def test_the_monitor_shows_each_server(server: ThreadServer) -> None:
    loader = find_target(server.unix, {}).make()
    sampler = Sampler(loader.stats, "RemoteLoader")
    for number, _ in enumerate(loader):
        if number == 4:
            break
    (row,) = sampler.look().servers
    assert row.name == server.unix
    assert row.batches_per_second > 0
    assert row.latency_ms >= 10
    metrics = exposition(loader.stats())
    assert f'headrace_server_up{{server="{server.unix}"}}' in metrics
    loader.close()
