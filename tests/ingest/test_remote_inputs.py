"""Builds from a bucket: the same datasets as from equal files on a disk, and no more requests than it takes."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import BadRecordsError, FormatError, SettingsError, StorageError
from headrace.readers import csv_cuts
from headrace.store.address import open_store
from tests import raw_files
from tests.cli.commands import run_here
from tests.fault_proxy import Answer, FaultProxy, Hold, Reset, Truncate
from tests.ingest import deaths
from tests.raw_files import FORMATS, Twins, put
from tests.s3_server import S3Server
from tests.samples import documents, tree

SETTINGS: dict[str, Any] = {"workers": 1, "shard_bytes": raw_files.SHARD_BYTES}
LINES: dict[str, Any] = {**SETTINGS, "split": "line"}


@pytest.fixture(scope="module")
def formats(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """A file of each format."""
    folder = tmp_path_factory.mktemp("raw") / "formats"
    raw_files.write_all(folder)
    return raw_files.upload_for_module(folder, s3_server)


@pytest.fixture
def twins(s3_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Writes files into a folder of the current directory and into the bucket, under the same name: files are grouped
    by their names. Gives the address and the folder."""
    monkeypatch.chdir(tmp_path)

    def write(contents: dict[str, str]) -> tuple[str, str]:
        folder = Path(s3_place.rpartition("/")[2])
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
            put(s3_place, name, content)
        return s3_place, str(folder)

    return write


def texts(count: int = 8) -> dict[str, str]:
    return {f"{number:02d}.txt": "\n".join(documents(number, seed=number)) for number in range(1, count + 1)}


def described(out: str | Path) -> dict[str, Any]:
    """What a dataset holds, apart from the names of its inputs and what identifies their contents."""
    files = tree(Path(out))
    manifest = json.loads((Path(out) / "headrace.json").read_bytes())
    del files["headrace.json"], files[manifest["provenance"]["file"]]
    ours = {name: value for name, value in manifest.items() if name not in ("checksum", "provenance")}
    return {"files": files, "manifest": ours, "fingerprint": headrace.open(out).fingerprint}


def read(proxy: FaultProxy) -> set[str]:
    """The names of the objects that were read."""
    paths = [request.path for request in proxy.log if request.method == "GET"]
    return {path.rpartition("/")[2] for path in paths if "?" not in path}


# The same datasets


@pytest.mark.parametrize("name", FORMATS)
def test_a_build_from_a_bucket_is_that_of_a_disk(
    formats: Twins, s3_environment: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    raw_files.read_in_small_pieces(monkeypatch)
    settings = {**SETTINGS, **FORMATS[name].build}
    far = headrace.build(f"{formats.address}/{name}", tmp_path / "far", **settings)
    near = headrace.build(formats.folder / name, tmp_path / "near", **settings)
    assert described(tmp_path / "far") == described(tmp_path / "near")
    assert (far.records, far.built, far.input_bytes) == (near.records, near.built, near.input_bytes)
    assert headrace.build(f"{formats.address}/{name}", tmp_path / "far", **settings).built == 0


def test_local_and_remote_inputs_together_in_worker_processes(
    twins: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    """From one bucket into the other; the files of a task may be here and there."""
    address, folder = twins(texts())
    odd = [f"{folder}/{number:02d}.txt" for number in range(1, 9, 2)]
    given = [f"{address}/*[02468].txt", *odd, f"{address}/02.txt"]
    report = headrace.build(given, f"{address}-out", **{**LINES, "workers": 2})
    again = headrace.build(given, tmp_path / "again", **LINES)
    assert report.inputs == again.inputs == 8
    there = open_store(f"{address}-out")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert {file: there.read(file) for file in there.files()} == expected


def test_the_command_reads_from_a_bucket(twins: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    address, _ = twins(texts(9))
    (tmp_path / "more.txt").write_text("more")
    common = ("--split", "line", "--workers", 1, "--json")
    done = run_here("build", f"{address}/0?.txt", tmp_path / "more.txt", "--out", tmp_path / "far", *common)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["inputs"] == 10
    done = run_here("build", address, "--include", "*5.txt", "--out", tmp_path / "one", *common)
    assert json.loads(done.stdout)["inputs"] == 1
    missing = run_here("build", f"{address}/missing.txt", "--out", tmp_path / "two", *common)
    assert missing.returncode == 1
    assert f"input '{address}/missing.txt': no such object, and there is nothing under" in missing.stderr


# Again, with changes, and after deaths


def test_only_what_is_new_or_changed_is_read(
    twins: Callable[..., tuple[str, str]], fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    address, folder = twins({**texts(), "large.txt": "\n".join(documents(300))})
    headrace.build(address, tmp_path / "far", **LINES)

    fault_proxy.clear()
    assert headrace.build(address, tmp_path / "far", **LINES).built == 0
    assert read(fault_proxy) == set()

    twins({"31.txt": "one more\n" * 500})
    report = headrace.build(address, tmp_path / "far", **LINES)
    assert (report.added, report.changed, report.removed) == (1, 0, 0)
    assert read(fault_proxy) == {"31.txt"}

    fault_proxy.clear()
    twins({"large.txt": "\n".join(documents(300, seed=1))})
    report = headrace.build(address, tmp_path / "far", **LINES)
    assert (report.added, report.changed, report.removed) == (0, 1, 0)
    assert read(fault_proxy) == {"large.txt"}
    headrace.build(folder, tmp_path / "near", **LINES)
    assert described(tmp_path / "far") == described(tmp_path / "near")


def test_a_build_that_was_killed_is_continued(twins: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    address, folder = twins({**texts(5), "large.txt": "\n".join(documents(200))})
    outs = [(f"{tmp_path}/{moment}", moment) for moment in (12, 50)]
    answers = deaths.run("build", folder=address, deaths=outs, **LINES)
    assert [answer["killed"] for answer in answers] == [True, True]
    headrace.build(folder, tmp_path / "near", **LINES)
    reused = []
    for out, _ in outs:
        reused.append(headrace.build(address, out, **LINES).reused)
        assert described(out) == described(tmp_path / "near")
    assert reused[0] < reused[1]


# Trouble on the way


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv", "a.parquet", "a.arrow"])
def test_faults_leave_the_result_as_it_is(
    formats: Twins,
    fault_proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    raw_files.read_in_small_pieces(monkeypatch)
    monkeypatch.setattr("headrace.store.client._FIRST_PAUSE_SECONDS", 0.001)
    for skip, fault in enumerate((Answer(503, "SlowDown"), Truncate(100), Reset())):
        fault_proxy.add(fault, method="GET", path=f"/{name}", skip=2 * skip, count=2)
    settings = {**SETTINGS, **FORMATS[name].build}
    headrace.build(f"{formats.address}/{name}", tmp_path / "far", **settings)
    headrace.build(formats.folder / name, tmp_path / "near", **settings)
    assert described(tmp_path / "far") == described(tmp_path / "near")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_an_object_that_is_replaced_while_it_is_read_is_told(
    fault_proxy: FaultProxy,
    s3_place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """By another one of the same size."""
    raw_files.read_in_small_pieces(monkeypatch)
    FORMATS[name].write(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    put(s3_place, name, content)
    fault_proxy.clear()
    go_on = threading.Event()
    # Somewhere in the middle, after the plan.
    fault_proxy.add(Hold(go_on), method="GET", path=name, skip=8)
    errors: list[str] = []

    def build() -> None:
        with pytest.raises(StorageError) as caught:
            headrace.build(f"{s3_place}/{name}", tmp_path / "out", **SETTINGS, tokenizer="bytes")
        errors.append(str(caught.value))

    thread = threading.Thread(target=build)
    thread.start()
    while thread.is_alive() and fault_proxy.requests["GET"] < 9:
        time.sleep(0.002)
    put(s3_place, name, content.replace(b"river", b"RIVER"))
    go_on.set()
    thread.join()
    assert errors[0].startswith(
        f"{s3_place}/{name}: was replaced after it was listed; objects must not change while"
    )


def test_a_table_that_is_cut_in_the_wrong_place_is_told(
    s3_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quoted text that looks like rows, and is longer than what is looked at around a cut."""
    monkeypatch.setattr(csv_cuts, "WINDOWS_BYTES", (500, 1000))
    rows = "".join(f"{n},text {n},{n}\n" for n in range(3000))
    quoted = f'0,"{rows}",0\n'
    put(s3_place, "right.csv", f"a,text,b\n{rows}")
    put(s3_place, "wrong.csv", f"a,text,b\n{quoted}{rows}")
    report = headrace.build(f"{s3_place}/right.csv", tmp_path / "right", tokenizer="bytes", **SETTINGS)
    assert (report.records, report.shards > 5) == (3000, True)
    with pytest.raises(FormatError, match=r"wrong.csv: judging by the bytes around byte \d+, .*local disk"):
        headrace.build(f"{s3_place}/wrong.csv", tmp_path / "wrong", tokenizer="bytes", **SETTINGS)


def test_bad_records_are_told_with_their_address_and_place(s3_place: str, tmp_path: Path) -> None:
    put(s3_place, "a.jsonl", '{"text": "a"}\n' * 500 + "{broken\n" + '{"text": "b"}\n' * 500)
    with pytest.raises(BadRecordsError, match=rf"{s3_place}/a.jsonl, line 501, byte 7000: not JSON"):
        headrace.build(f"{s3_place}/a.jsonl", tmp_path / "out", tokenizer="bytes", **SETTINGS)


# Outputs among the inputs


def test_what_is_in_the_output_is_never_read(twins: Callable[..., tuple[str, str]]) -> None:
    address, _ = twins(texts(3))
    report = headrace.build(address, f"{address}/data", **LINES)
    assert report.inputs == 3
    assert headrace.build(address, f"{address}/data", **LINES).built == 0
    put(f"{address}/data", "mine.txt", "mine")
    for given, said in (
        (f"{address}/data/mine.txt", f"all files there are inside the output {address}/data"),
        (f"{address}/data/*.txt", f"all files there are inside the output {address}/data"),
    ):
        with pytest.raises(SettingsError, match=f"{said}, whose files are never read; choose another output"):
            headrace.build(given, f"{address}/data", **LINES)
    with pytest.raises(SettingsError, match="is already a Headrace dataset; give the raw files"):
        headrace.build(f"{address}/data", f"{address}/other", **LINES)
    put(f"{address}/new", "mine.txt", "mine")
    with pytest.raises(SettingsError, match="this is also the output directory"):
        headrace.build(f"{address}/new", f"{address}/new", **LINES)


@pytest.fixture(autouse=True)
def _no_credentials_are_left(tmp_path: Path, s3_server: S3Server) -> Iterator[None]:
    """No file of any dataset holds the secret."""
    yield
    secret = s3_server.environment()["AWS_SECRET_ACCESS_KEY"].encode()
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            assert secret not in Path(folder, name).read_bytes()
