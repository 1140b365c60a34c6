"""The commands on a dataset in a bucket: what they say, how few requests they make, and what they say if it fails."""

import json
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.format import units
from tests.cli.commands import run_here
from tests.fault_proxy import Answer, FaultProxy, Flip
from tests.uploads import upload

SHORT = ("--seq-len", 512, "--batch-size", 8, "--seconds", 0.1)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of documents, each cut into several units."""
    path = tmp_path_factory.mktemp("remote") / "data"
    rng = np.random.default_rng(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_BYTES", 40_000)
        with headrace.Writer(path, {"tokens": "uint16[*]"}, shard_bytes=200_000) as writer:
            for _ in range(600):
                writer.write({"tokens": rng.integers(0, 60_000, int(rng.integers(1, 1500)))})
    return path


@pytest.fixture
def remote(local: Path, s3_place: str) -> str:
    return upload(local, s3_place)


# What they say


def test_inspect_needs_no_shard(local: Path, remote: str, fault_proxy: FaultProxy) -> None:
    fault_proxy.clear()
    fault_proxy.add(Answer(403, "AccessDenied"), path="shard-")
    far = json.loads(run_here("inspect", remote, "--json").stdout)
    near = json.loads(run_here("inspect", local, "--json").stdout)
    # The manifest, the units, how many rows they have, and of the index the lengths and how often each occurs.
    assert sum(fault_proxy.requests.values()) <= 8
    (cost,) = far.pop("costs")
    assert near.pop("costs") == []
    assert (near.pop("pack_within"), far.pop("pack_within")) == ("dataset", "units")
    rows = [(each["seq_len"], each["rows"]) for each in far.pop("packing")]
    assert [seq_len for seq_len, _ in rows] == [each["seq_len"] for each in near.pop("packing")]
    assert all(
        len(headrace.Loader(remote, seq_len=seq_len, batch_size=1)) == count for seq_len, count in rows
    )
    far["dataset"] = near["dataset"]
    assert far == near
    assert (cost["order"], cost["shards"], cost["whole_units"]) == ("units", 5, True)


def test_inspect_says_what_it_costs(remote: str) -> None:
    done = run_here("inspect", remote)
    assert (done.returncode, done.stderr) == (0, "")
    said = " ".join(done.stdout.split())
    for words in (
        "shards 5",
        "stored ",
        "rows of 2,048 tokens comes",
        "how full rows of tokens are, packed within units, as a Loader packs remote data",
        "what a Loader does with it by default",
        "whole units are fetched",
        "stays in memory after the first epoch",
        "must arrive before",
    ):
        assert words in said


def test_inspect_and_doctor_of_data_without_tokens(tmp_path: Path, s3_place: str) -> None:
    with headrace.Writer(tmp_path / "images", {"image": "uint8[64]"}) as writer:
        for number in range(64):
            writer.write({"image": np.full(64, number, np.uint8)})
    place = upload(tmp_path / "images", s3_place)
    done = run_here("inspect", place)
    assert (done.returncode, done.stderr) == (0, "")
    assert "whole units are fetched" in done.stdout
    found = json.loads(run_here("doctor", place, "--no-run", "--json").stdout)
    assert found["costs"]["data"]["data_bytes"] == 64 * 64


def test_show_is_the_same_as_on_a_local_disk(local: Path, remote: str) -> None:
    near, far = (run_here("show", place, 3) for place in (local, remote))
    assert far.stdout == near.stdout
    row = ("--row", 3, "--seq-len", 512, "--shuffle", "units", "--lanes", 2, "--pack-within", "units")
    near, far = (run_here("show", place, *row) for place in (local, remote))
    assert far.stdout == near.stdout
    assert far.stdout.startswith("row 3 of")
    other = run_here("show", remote, *row[:-3], 5, *row[-2:])
    assert other.stdout != far.stdout


def test_lanes_belong_to_the_order_by_units(local: Path) -> None:
    done = run_here("show", local, "--row", 3, "--seq-len", 512, "--lanes", 2)
    assert done.returncode == 1
    assert "--lanes=2 only applies to --shuffle units" in done.stderr


def test_verify_fetches_each_file_once(local: Path, remote: str, fault_proxy: FaultProxy) -> None:
    fault_proxy.clear()
    done = run_here("verify", remote)
    assert done.returncode == 0
    assert "is intact: 9 files" in done.stdout
    # The shards are small here, so that their tables, which are read again, are a larger part of them than usual.
    assert fault_proxy.sent_bytes["GET"] < 1.3 * sum(path.stat().st_size for path in local.iterdir())


def test_verify_names_what_is_damaged(remote: str, fault_proxy: FaultProxy) -> None:
    fault_proxy.add(Flip(at=5000), path="shard-", method="GET", skip=3)
    done = run_here("verify", remote)
    assert done.returncode == 1
    assert "damaged  shard-" in done.stdout


def test_verify_does_not_call_files_damaged_that_it_may_not_read(
    remote: str, fault_proxy: FaultProxy
) -> None:
    fault_proxy.add(Answer(403, "AccessDenied"), path="shard-")
    done = run_here("verify", remote)
    assert done.returncode == 1
    assert "damaged" not in done.stdout
    assert "shard-" in done.stderr


def test_resuming_is_exact(remote: str) -> None:
    done = run_here("verify-resume", remote, "--seq-len", 512, "--batch-size", 8, "--trials", 1, "--rows", 60)
    assert done.returncode == 0, done.stderr
    assert "Resuming is exact" in done.stdout


def test_bench_and_its_cache(remote: str, tmp_path: Path) -> None:
    cache = ("--cache", tmp_path / "cache", "--cache-bytes", "100MB")
    done = run_here("bench", remote, *SHORT, *cache, "--runs", 1, "--set", "lanes=4", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (point,) = report["points"]
    assert not point["errors"]
    assert any("remote data is not in the page cache" in note for note in report["notes"])
    assert point["summary"]["beginning_requests"]["median"] > 0
    assert point["summary"]["beginning_mb"]["median"] > 0
    kept = json.loads(run_here("cache", "ls", "--cache", tmp_path / "cache", "--json").stdout)
    assert [each["address"] for each in kept["datasets"]] == [remote]
    assert kept["bytes"] > 0


def test_bench_shows_the_network(remote: str, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    done = run_here("bench", remote, *SHORT, "--cache", "off", "--runs", 1, "--html", page)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    for words in ("network requests", "beginning, fetched", "beginning, rate", "from the cache 0.0%"):
        assert words in said
    # Small data is fetched at the beginning only.
    assert "the beginning alone shows the network" in said
    assert "first batch, cold: not measured" in said
    assert "beginning, rate" in page.read_text()


def test_tune(remote: str) -> None:
    words = ("tune", remote, *SHORT[:4], "--keep", "batch_size")
    done = run_here(*words, "--budget", 1)
    assert done.returncode == 0, done.stderr
    assert "measurement" in done.stdout
    assert "MB/s fetched" in done.stdout
    baseline = json.loads(run_here(*words, "--budget", 1, "--json").stdout)["baseline"]
    assert baseline["network"]["beginning_requests"] > 0


def test_doctor_says_what_the_order_costs(remote: str) -> None:
    done = run_here("doctor", remote, *SHORT, "--compute-ms", 1, "--set", "shuffle=global", "--json")
    found = json.loads(done.stdout)
    assert (done.stderr, found["error"]) == ("", None)
    cost = found["costs"]["data"]
    assert (cost["order"], cost["whole_units"], cost["stays_in_memory"]) == ("global", False, True)
    # Whether the loop waits depends on the machine; there are too few units to warn of the order.
    names = {each["name"] for each in found["findings"]}
    assert {"remote-cache"} <= names <= {"remote-cache", "waiting", "network"}
    assert found["run"]["stats"]["fetched"]["cached_bytes"] == 0
    assert "not on this machine" in found["not_looked"]["random-reads"]


def test_doctor_finds_batches_that_are_mixed_badly(remote: str) -> None:
    done = run_here("doctor", remote, *SHORT[:4], "--set", "lanes=1", "--no-run")
    assert done.returncode == 0, done.stderr
    assert "warning   remote-mixing" in done.stdout
    assert "Nothing found" not in done.stdout
    fine = run_here("doctor", remote, *SHORT[:4], "--no-run", "--json")
    assert "remote-mixing" in json.loads(fine.stdout)["fine"]


# What they say if it fails


@pytest.mark.parametrize("command", ["inspect", "verify", "verify-resume"])
def test_what_is_not_there(command: str, s3_place: str) -> None:
    more = ("--batch-size", 8) if command == "verify-resume" else ()
    done = run_here(command, s3_place, *more)
    assert done.returncode == 1
    assert done.stderr.startswith(f"headrace: {s3_place}: no such dataset")
    bucket = run_here(command, "s3://no-such-bucket/data", *more)
    assert bucket.returncode == 1
    assert "there is no such bucket" in bucket.stderr
    assert bucket.stderr.count("\n") == 1


def test_bench_of_what_is_not_there(s3_place: str) -> None:
    done = run_here("bench", s3_place, "--runs", 1)
    assert done.returncode == 1
    assert "no such dataset" in done.stdout


def test_wrong_credentials(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-at-all")
    done = run_here("inspect", remote)
    assert done.returncode == 1
    assert "not-the-secret" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert remote in done.stderr


def test_a_size_that_is_none(local: Path) -> None:
    done = run_here("show", local, 0, "--cache-bytes", "much")
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: --cache-bytes: size 'much': must be a number")
