"""The metrics that a Prometheus server fetches while a loop runs."""

import http.client
import os
import re
import socket
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError
from headrace.measure.watching.monitor import monitor
from headrace.measure.watching.prometheus import MetricsServer, exposition
from headrace.observe.stats import FetchStats, LoaderStats, QueueStats, ServerStats, StageStats

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Sample = tuple[str, frozenset[tuple[str, str]]]


def parse(text: str) -> dict[Sample, float]:
    """Strictly, by the specification of the text format: every metric has HELP, then TYPE, then its samples, together;
    names and labels are well-formed; no sample comes twice; the last line ends."""
    assert text.endswith("\n")
    found: dict[Sample, float] = {}
    kinds: dict[str, str] = {}
    helped: str | None = None
    current: str | None = None
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            _, _, helped, said = line.split(" ", 3)
            assert NAME.fullmatch(helped)
            assert said
            assert helped not in kinds
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current == helped
            assert kind in ("counter", "gauge")
            assert current.endswith("_total") == (kind == "counter")
            kinds[current] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            assert name == current
            key = (name, frozenset(_labels(labels or "")))
            assert key not in found
            found[key] = float(value)
            assert found[key] >= 0
    return found


def _labels(text: str) -> Iterable[tuple[str, str]]:
    place = 0
    while place < len(text):
        match = LABEL.match(text, place)
        assert match, text
        yield match[1], re.sub(r'\\[\\"n]', lambda escape: ESCAPES[escape[0]], match[2])
        place = match.end()


def value(found: dict[Sample, float], name: str, **labels: str) -> float:
    return found[f"headrace_{name}", frozenset(labels.items())]


def fetch(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def _loader(**options: Any) -> headrace.Loader:
    data = headrace.from_arrays({"x": np.arange(640.0).reshape(64, 10)})
    return headrace.Loader(data, batch_size=4, **options)


def test_counters_grow_with_the_loop_and_the_port_is_free_afterwards() -> None:
    loader = _loader()
    with monitor(loader, view="off", metrics_port=0) as watched:
        port = watched.metrics_port
        assert port
        status, kind, text = fetch(port)
        before = parse(text)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert value(before, "batches_total") == 0
        for number, _ in enumerate(watched):
            if number == 6:
                during = parse(fetch(port)[2])
                assert value(during, "batches_total") == 7
                assert value(during, "rows_total") == 28
        after = parse(fetch(port)[2])
        assert value(after, "batches_total") == 16
        assert value(after, "rows_total") == 64
        assert value(after, "stage_seconds_total", stage="wait") > 0
        assert value(after, "stage_seconds_total", stage="gather") > 0
        assert value(after, "stage_runs_total", stage="step") == 16
        assert value(after, "queue_asked_total", queue="ready") == 16
        assert value(after, "queue_batches", queue="ready") <= value(after, "queue_capacity", queue="ready")
        assert 0 < value(after, "wait_share") < 1
        assert value(after, "workers") == loader.stats().workers == 1
    with pytest.raises(ConnectionError):
        fetch(port)
    assert "headrace-metrics" not in [thread.name for thread in threading.enumerate()]
    with MetricsServer(loader.stats, port=port) as again:
        assert again.port == port


def test_only_metrics_are_served() -> None:
    with MetricsServer(LoaderStats) as server:
        assert fetch(server.port, "/")[0] == 404
        assert fetch(server.port, "/metrics?x=1")[0] == 200
        assert fetch(server.port, method="POST")[0] == 501


def test_labels_are_escaped() -> None:
    odd = 'back\\slash "quote"\nline, {brace}=1'
    stats = LoaderStats(
        batches=3, stages={odd: StageStats(2, 1.5e-7)}, queues={odd: QueueStats(4, 8, 1, 5, 2)}
    )
    found = parse(exposition(stats))
    assert value(found, "stage_seconds_total", stage=odd) == 1.5e-7
    assert value(found, "queue_batches", queue=odd) == 2


def test_a_loader_that_has_done_nothing_is_well_formed() -> None:
    assert value(parse(exposition(LoaderStats())), "batches_total") == 0


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(SettingsError, match=rf"metrics_port={port}, .*in use.*metrics_port=0"),
            monitor([1, 2], view="off", metrics_port=port),
        ):
            pass


@pytest.mark.parametrize("port", [-1, 70_000, 1.5, "9000", True])
def test_a_port_that_is_none_is_refused(port: Any) -> None:
    with pytest.raises(SettingsError, match="metrics_port="), monitor([], view="off", metrics_port=port):
        pass


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(SettingsError, match="metrics_host='192.0.2.1'"):
        MetricsServer(LoaderStats, host="192.0.2.1")


def test_a_client_that_says_nothing_or_leaves_does_no_harm() -> None:
    with (
        MetricsServer(LoaderStats) as server,
        socket.create_connection(("127.0.0.1", server.port)),
        socket.create_connection(("127.0.0.1", server.port)) as leaving,
    ):
        leaving.sendall(b"GET /metr")
        leaving.close()
        assert fetch(server.port)[0] == 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_worker_does_not_hold_the_port() -> None:
    with MetricsServer(LoaderStats) as server:
        (ours, theirs), (forked, has_forked) = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            os.close(theirs)
            os.write(has_forked, b"!")
            os.read(ours, 1)
            os._exit(0)
        os.close(ours)
        # Until the child runs, it has let go of nothing.
        os.read(forked, 1)
        os.close(forked)
        os.close(has_forked)
    try:
        with MetricsServer(LoaderStats, port=server.port) as again:
            assert fetch(again.port)[0] == 200
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


def test_what_was_fetched_is_there_if_data_is_remote() -> None:
    fetched = FetchStats(requests=3, bytes=4000, cached_bytes=50, repeated=1)
    found = {name: value for (name, _), value in parse(exposition(LoaderStats(fetched=fetched))).items()}
    names = ("fetch_requests", "fetched_bytes", "cached_bytes", "fetch_repeated")
    assert [found[f"headrace_{name}_total"] for name in names] == [3, 4000, 50, 1]
    assert "fetch" not in exposition(LoaderStats())


def test_each_server_has_figures_of_its_own() -> None:
    servers = {
        "grpc://10.0.0.7:9000": ServerStats("up", 30, 4000, 1.5, late=2, faults=1, owes=4, slots=8),
        "unix:///run/a.sock": ServerStats("silent", 10, 1000, 0.5),
    }
    found = parse(exposition(LoaderStats(servers=servers)))
    wanted = {
        "server_up": (1, 0),
        "server_answers_total": (30, 10),
        "server_bytes_total": (4000, 1000),
        "server_seconds_total": (1.5, 0.5),
        "server_late_total": (2, 0),
        "server_faults_total": (1, 0),
        "server_owed_batches": (4, 0),
        "server_slots": (8, 0),
    }
    for name, values in wanted.items():
        assert tuple(value(found, name, server=server) for server in servers) == values
    assert "server" not in exposition(LoaderStats())
