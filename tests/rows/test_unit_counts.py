"""How many rows each unit has: stored, or counted from the lengths of all documents, with one warning of the cost."""

import logging
from pathlib import Path

import pytest

import headrace
from headrace.load.loader import Loader
from headrace.load.settings import LoaderSettings
from headrace.measure.proving.proof import prove_resume
from headrace.rows import unit_counts
from tests.fault_proxy import FaultProxy
from tests.load.remote_data import put, write_local


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_local(tmp_path_factory.mktemp("counts") / "data")


@pytest.fixture
def remote(local: Path, s3_place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(unit_counts, "_warned", set())
    return put(local, s3_place)


def test_one_warning_says_what_it_costs_and_what_to_do(remote: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            Loader(remote, seq_len=128, batch_size=2)
        Loader(remote, seq_len=512, batch_size=2, packing="pad")
        Loader(remote, seq_len=512, batch_size=2, overlong="truncate")
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"{remote}: the lengths of all documents are read first (1.3 KB): ")
    assert "packing='best-fit' and overlong='split' with a seq_len of 512, 1024, 2048" in said
    assert said.endswith("a Loader with these settings starts without that")


def test_no_warning_without_reading(remote: str, local: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Loader(remote, seq_len=512, batch_size=2)
        Loader(local, seq_len=128, batch_size=2)
        Loader(remote, seq_len=128, batch_size=2, packing="windows")
    assert not caplog.records


def test_a_dataset_is_counted_once(remote: str, fault_proxy: FaultProxy) -> None:
    dataset = headrace.open(remote)
    Loader(dataset, seq_len=128, batch_size=2)
    before = sum(fault_proxy.requests.values())
    Loader(dataset, seq_len=128, batch_size=2)
    assert sum(fault_proxy.requests.values()) == before


def test_trials_of_a_proof_say_nothing(remote: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = LoaderSettings(seq_len=128, batch_size=4)
    with caplog.at_level(logging.WARNING):
        proof = prove_resume(headrace.open(remote), settings, trials=2, rows=60)
    assert proof.exact
    assert len(caplog.records) == 1
