"""Streams from a bucket: the records of equal local files in the same order, continued, shared, and told of changes."""

import pickle
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace
from headrace.errors import BadRecordsError, FormatError, SettingsError, StateError, StorageError
from headrace.store.address import open_store
from tests import raw_files
from tests.fault_proxy import Answer, FaultProxy, Reset, Truncate
from tests.raw_files import BLOCK_BYTES, FORMATS, RECORDS, Twins, put
from tests.s3_server import SECRET_KEY, S3Server
from tests.streams import files


@pytest.fixture(scope="module")
def formats(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """A file of each format."""
    folder = tmp_path_factory.mktemp("raw") / "formats"
    raw_files.write_all(folder)
    return raw_files.upload_for_module(folder, s3_server)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    raw_files.read_in_small_pieces(monkeypatch)


def stream_of(place: str | Path, name: str, **options: Any) -> Any:
    return headrace.stream(f"{place}/{name}", **{"block_bytes": BLOCK_BYTES, **options})


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", FORMATS)
def test_the_records_of_local_files_in_the_same_order(
    formats: Twins, s3_environment: S3Server, name: str
) -> None:
    for options in ({}, {"seed": 3, "buffer": 7, "rank": 1, "world_size": 2}):
        settings = {**FORMATS[name].stream, **options}
        far = files.copies(stream_of(formats.address, name, **settings))
        assert far == files.copies(stream_of(formats.folder, name, **settings))
        assert far or options


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_state_is_continued(formats: Twins, s3_environment: S3Server, name: str) -> None:
    def make() -> Any:
        return stream_of(formats.address, name, seed=1, buffer=9).tokenize("bytes").batch(7)

    stream = make()
    items = iter(stream)
    for _ in range(6):
        next(items)
    state = files.through_json(stream.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    assert files.copies(resumed) == files.copies(items)


def test_a_state_of_local_files_is_not_one_of_objects(formats: Twins, s3_environment: S3Server) -> None:
    near, far = (stream_of(place, "a.jsonl", seed=1) for place in (formats.folder, formats.address))
    with pytest.raises(StateError, match="inputs in a bucket and on a disk are different inputs"):
        far.load_state_dict(near.state_dict())


def test_blocks_that_follow_each_other_are_fetched_together(s3_place: str, fault_proxy: FaultProxy) -> None:
    lines = "".join(f"line {number} {'x' * 900}\n" for number in range(3000))
    put(s3_place, "a.txt", lines)
    fault_proxy.clear()
    stream = headrace.stream(f"{s3_place}/a.txt")
    assert stream.inputs.blocks.count > 30
    assert [record["text"] for record in stream] == lines.splitlines()
    assert fault_proxy.requests["GET"] == 1
    assert fault_proxy.sent_bytes["GET"] == len(lines)

    fault_proxy.clear()
    shuffled = headrace.stream(f"{s3_place}/a.txt", seed=1)
    assert sorted(record["text"] for record in shuffled) == sorted(lines.splitlines())
    assert fault_proxy.most_in_flight > 4


def test_only_the_columns_that_are_wanted_are_fetched(s3_place: str, fault_proxy: FaultProxy) -> None:
    noise = np.random.default_rng(1)
    table = pa.table({"n": range(4000), "large": [noise.bytes(1000) for _ in range(4000)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=1000)
    put(s3_place, "a.parquet", sink.getvalue().to_pybytes())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table, max_chunksize=1000)
    put(s3_place, "a.arrow", sink.getvalue().to_pybytes())
    for name in ("a.parquet", "a.arrow"):
        fault_proxy.clear()
        numbers = [record["n"] for record in headrace.stream(f"{s3_place}/{name}", fields=["n"])]
        assert numbers == list(range(4000))
        assert fault_proxy.sent_bytes["GET"] < 1_000_000


@pytest.mark.usefixtures("small_pieces")
def test_faults_leave_the_records_as_they_are(
    formats: Twins, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.store.client._FIRST_PAUSE_SECONDS", 0.001)
    for name in ("a.jsonl", "a.jsonl.zst", "a.parquet"):
        for skip, fault in enumerate((Answer(503, "SlowDown"), Truncate(100), Reset())):
            fault_proxy.add(fault, method="GET", path=f"/{name}", skip=skip, count=2)
        assert list(stream_of(formats.address, name)) == RECORDS


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["lines.txt", "a.csv", "a.parquet", "a.arrow", "stream.arrow", "a.npy"])
def test_an_object_that_is_replaced_meanwhile_is_told(s3_place: str, tmp_path: Path, name: str) -> None:
    """By another one of the same size."""
    FORMATS[name].write(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    put(s3_place, name, content)
    stream = headrace.stream(f"{s3_place}/{name}", block_bytes=BLOCK_BYTES)
    state = stream.state_dict()
    items = iter(stream)
    next(items)
    put(s3_place, name, content[:-1] + b"?")
    with pytest.raises(StorageError, match=rf"{s3_place}/{name}: was replaced after it was listed"):
        list(items)
    with pytest.raises(StateError, match="saved by another stream.*inputs is"):
        headrace.stream(f"{s3_place}/{name}", block_bytes=BLOCK_BYTES).load_state_dict(state)


def test_an_object_that_is_deleted_meanwhile_is_told(s3_place: str) -> None:
    put(s3_place, "a.txt", "a\n")
    stream = headrace.stream(s3_place)
    open_store(s3_place).remove("a.txt")
    with pytest.raises(
        StorageError, match=rf"{s3_place}/a.txt: cannot be read: it was deleted after it was listed"
    ):
        list(stream)


def test_what_is_wrong_in_a_file_is_told_with_its_address(s3_place: str) -> None:
    put(s3_place, "a.jsonl", '{"n": 1}\n\n{"n": \n')
    with pytest.raises(BadRecordsError, match=rf"{s3_place}/a.jsonl, line 3, byte 10: not JSON"):
        list(headrace.stream(f"{s3_place}/a.jsonl"))
    for name, kind in (("a.parquet", "Parquet"), ("a.arrow", "Arrow"), ("a.npy", r"\.npy")):
        put(s3_place, name, "this is something else")
        with pytest.raises(FormatError, match=rf"{s3_place}/{name}: not a complete {kind} file"):
            list(headrace.stream(f"{s3_place}/{name}"))
    put(s3_place, "a.txt.gz", "this is something else")
    with pytest.raises(
        StorageError, match=rf"{s3_place}/a.txt.gz: cannot be decompressed: Not a gzipped file"
    ):
        list(headrace.stream(f"{s3_place}/a.txt.gz"))


# Other processes


def test_what_is_sent_to_workers_holds_no_credentials(formats: Twins, s3_environment: S3Server) -> None:
    stream = stream_of(formats.address, "a.jsonl", seed=1)
    before = files.copies(islice(stream, 5))
    sent = pickle.dumps(stream)
    assert SECRET_KEY.encode() not in sent
    assert len(sent) < 2000
    assert files.copies(islice(pickle.loads(sent), 5)) == before


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forked_workers_of_a_dataloader_read_by_themselves(formats: Twins, s3_environment: S3Server) -> None:
    """Although the process that they are forked from has listed and read objects before."""
    data = pytest.importorskip("torch.utils.data", reason="needs torch")
    stream = stream_of(formats.address, "a.parquet", fields=["n"])
    assert len(list(stream)) == len(RECORDS)
    stream.set_epoch(0)
    loader = data.DataLoader(stream, batch_size=10, num_workers=2, multiprocessing_context="fork")
    found = [n for batch in loader for n in batch["n"].tolist()]
    assert sorted(found) == [record["n"] for record in RECORDS]


# Web servers


def test_a_file_of_a_web_server(fault_proxy: FaultProxy) -> None:
    body = b"".join(b"line %d\n" % number for number in range(100))
    part = {"Content-Range": f"bytes 0-{len(body) - 1}/{len(body)}"}
    fault_proxy.add(Answer(200, body=body), method="HEAD", path="/folder/a.txt")
    fault_proxy.add(Answer(206, body=body, headers=part), method="GET", path="/folder/a.txt")
    fault_proxy.add(Answer(404), path="/folder/b.txt")
    address = f"{fault_proxy.endpoint}/folder"
    texts = [record["text"] for record in headrace.stream(f"{address}/a.txt")]
    assert texts == body.decode().splitlines()
    with pytest.raises(
        StorageError, match=re.escape(f"input '{address}/b.txt': no such file; if it is a folder")
    ):
        headrace.stream(f"{address}/b.txt")
    for folder in (f"{address}/*.txt", f"{address}/"):
        with pytest.raises(SettingsError, match="a web server cannot be listed; name its files one"):
            headrace.stream(folder)
