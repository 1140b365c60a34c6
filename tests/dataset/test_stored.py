import multiprocessing
import operator
import os
import pickle
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import xxhash

import headrace
from headrace.errors import CorruptError, DatasetNotFoundError, FormatError, HeadraceError, StorageError
from headrace.format.manifest import read_manifest
from headrace.store.local import LocalStore

FIELDS = {"tokens": "uint16[*]", "x": "float32[3]", "b": "bytes"}
COUNTS = [40, 0, 25, 35]


def record(number):
    return {
        "tokens": np.arange(number % 7, dtype=np.uint16) + number,
        "x": np.full(3, number, np.float32),
        "b": b"%d" % number,
    }


def is_record(got, number):
    want = record(number)
    arrays = all(np.array_equal(got[name], want[name]) for name in ("tokens", "x"))
    return arrays and got["b"] == want["b"] and list(got) == list(want)


@pytest.fixture
def directory(write_dataset, tmp_path):
    numbers = iter(range(100))
    write_dataset(tmp_path / "d", FIELDS, [[record(next(numbers)) for _ in range(n)] for n in COUNTS])
    return tmp_path / "d"


def test_opening_reads_no_shard(directory):
    """Only sizes and headers: a shard is mapped when it is first touched."""
    dataset = headrace.open(directory)
    assert "Dataset" in repr(dataset)
    lengths, counts = dataset.length_histogram()
    assert int(counts.sum()) == 100
    assert dataset.num_tokens == int((lengths * counts).sum())
    assert dataset.manifest.records == 100
    maps = f"/proc/{os.getpid()}/maps"
    if os.path.exists(maps):
        shards = {shard.stored.file for shard in dataset.manifest.shards}
        with open(maps) as file:
            assert not [line for line in file if any(name in line for name in shards)]


def test_pickles_are_small_and_reopen(directory):
    for in_memory in (False, True):
        dataset = headrace.open(directory, in_memory=in_memory)
        _ = dataset[:]
        raw = pickle.dumps(dataset)
        assert len(raw) < 4096
        again = pickle.loads(raw)
        assert all(is_record(again[number], number) for number in range(100))
        assert again.fingerprint == dataset.fingerprint


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_processes_read_the_same(directory, method):
    dataset = headrace.open(directory)
    assert is_record(dataset[3], 3)  # one part is mapped before the others start
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.starmap(operator.getitem, [(dataset, number) for number in range(100)])
    assert all(is_record(got, number) for number, got in enumerate(found))


def test_threads_share_a_dataset(directory):
    dataset, wrong = headrace.open(directory), []
    together = threading.Barrier(8, timeout=100)

    def read(seed):
        together.wait()
        for number in np.random.default_rng(seed).permutation(100).tolist():
            if not is_record(dataset[number], number):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.soak), "fork"])
def test_a_stock_dataloader_with_workers(directory, method):
    data = pytest.importorskip("torch.utils.data", reason="needs torch")
    loader = data.DataLoader(
        headrace.open(directory),
        batch_size=16,
        num_workers=2,
        collate_fn=list,
        multiprocessing_context=method,
    )
    batches = list(loader)
    assert [len(batch) for batch in batches] == [16] * 6 + [4]
    found = [got for batch in batches for got in batch]
    assert all(is_record(got, number) for number, got in enumerate(found))


def test_a_stock_dataloader_asks_for_whole_batches(directory, monkeypatch):
    data = pytest.importorskip("torch.utils.data", reason="needs torch")
    dataset = headrace.open(directory)
    asked = []
    original = type(dataset).__getitems__
    monkeypatch.setattr(
        type(dataset), "__getitems__", lambda self, i: asked.append(len(i)) or original(self, i)
    )
    assert len(list(data.DataLoader(dataset, batch_size=50, collate_fn=list, shuffle=True))) == 2
    assert asked == [50, 50]


def test_in_memory_needs_the_files_no_more(directory):
    dataset = headrace.open(directory, in_memory=True)
    for shard in directory.glob("shard-*"):
        shard.unlink()
    assert all(is_record(dataset[number], number) for number in range(100))
    view = dataset[0:5]["x"]
    assert np.shares_memory(view, dataset.part(0)["x"])
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


def test_a_relative_path_survives_another_working_directory(directory, monkeypatch, tmp_path):
    monkeypatch.chdir(directory.parent)
    dataset = headrace.open("d")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert is_record(dataset[99], 99)
    assert is_record(pickle.loads(pickle.dumps(dataset))[99], 99)
    assert repr(dataset).startswith("Dataset('d', 100 records")


def test_the_fingerprint_is_of_the_content(directory, write_dataset, tmp_path):
    shutil.copytree(directory, tmp_path / "copy")
    assert headrace.open(tmp_path / "copy").fingerprint == headrace.open(directory).fingerprint
    write_dataset(tmp_path / "other", FIELDS, [[record(1)]])
    assert headrace.open(tmp_path / "other").fingerprint != headrace.open(directory).fingerprint


def test_a_rebuilt_dataset_does_not_pass_for_the_old_one(directory, write_dataset):
    dataset = headrace.open(directory)
    raw = pickle.dumps(dataset)
    write_dataset(directory, FIELDS, [[record(1)]])
    with pytest.raises(FormatError, match="the dataset was rebuilt since it was opened, and the version"):
        pickle.loads(raw)
    assert is_record(dataset[99], 99)  # the old files are still there for those who have it open


@pytest.mark.parametrize("kind", ["shard", "index"])
def test_files_that_are_not_what_the_manifest_says(directory, kind):
    manifest = read_manifest(LocalStore(directory))
    stored = manifest.index if kind == "index" else manifest.shards[0].stored
    path = directory / stored.file

    def use():
        """The index is checked when the dataset is opened, a shard when it is first used, or read into memory."""
        if kind == "shard":
            dataset = headrace.open(directory)
            assert is_record(dataset[99], 99)  # of a shard that is whole
            with pytest.raises(headrace.HeadraceError) as caught:
                headrace.open(directory, in_memory=True)
            with pytest.raises(type(caught.value)):
                dataset[0]
            raise caught.value
        headrace.open(directory)

    good = path.read_bytes()
    cases = [
        (
            good[:-1],
            CorruptError,
            f"{stored.bytes - 1} bytes, but the manifest says {stored.bytes}: the file was truncated",
        ),
        (good + b"x", CorruptError, "truncated or overwritten"),
        (b"", CorruptError, "0 bytes, but the manifest says"),
        (b"SOMETHIN" + good[8:], FormatError, "not a Headrace file"),
        (good[:70] + b"#" + good[71:], CorruptError, "its header does not match the manifest"),
    ]
    for content, error, message in cases:
        path.write_bytes(content)
        with pytest.raises(error, match=message) as caught:
            use()
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(DatasetNotFoundError, match="missing, although the manifest names it; restore it"):
        use()
    path.mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        use()


def test_opening_reads_the_manifest_and_the_head_of_the_index_only(directory):
    for shard in directory.glob("shard-*"):
        shard.rename(shard.with_suffix(".away"))
    dataset = headrace.open(directory)
    assert len(dataset) == 100
    assert dataset.length_histogram("tokens")[1].sum() == 100
    for shard in directory.glob("*.away"):
        shard.rename(shard.with_suffix(".hdrc"))
    assert is_record(dataset[0], 0)


def test_a_file_that_goes_missing_later(directory):
    dataset = headrace.open(directory)
    for shard in directory.glob("shard-*"):
        shard.unlink()
    with pytest.raises(DatasetNotFoundError, match="missing, although the manifest names it"):
        dataset[0]


def test_counts_of_another_manifest(directory, reseal):
    def edit(body):
        first, third = body["shards"][0], body["shards"][2]
        for entry, change in ((first, 1), (third, -1)):
            entry["records"] += change
            entry["elements"]["x"] += change

    reseal(directory, edit)
    dataset = headrace.open(directory)
    assert len(dataset) == 100
    with pytest.raises(CorruptError, match="its counts do not match the manifest"):
        dataset[0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_forged_sizes_take_no_memory(directory, reseal, child_environment):
    """A sparse file of 8 GB with a header as large as the manifest may claim is refused in little memory."""
    stored = read_manifest(LocalStore(directory)).shards[0].stored
    path = directory / stored.file
    head = path.read_bytes()[:12] + (2**26).to_bytes(4, "little") + (2**33).to_bytes(8, "little") + bytes(40)
    with open(path, "r+b") as file:
        file.write(head)
        file.truncate(2**33)

    def edit(body):
        checksum = xxhash.xxh3_64_hexdigest(head + bytes(2**26))
        body["shards"][0].update(bytes=2**33, header_bytes=64 + 2**26, header_checksum=checksum)

    shutil.move(path, directory / "aside")  # keeps `reseal` from reading 8 GB
    reseal(directory, edit)
    shutil.move(directory / "aside", path)
    source = """
import resource, sys
import headrace
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
resource.setrlimit(resource.RLIMIT_DATA, (2**29, 2**29))
try:
    headrace.open(sys.argv[1])[0]
except headrace.HeadraceError as error:
    print(type(error).__name__)
"""
    ran = subprocess.run(
        [sys.executable, "-c", source, directory], capture_output=True, text=True, env=child_environment
    )
    assert (ran.stdout, ran.stderr) == ("CorruptError\n", "")


def test_every_error_of_opening_is_ours(tmp_path):
    for path in (tmp_path, tmp_path / "absent", "/dev/null/x"):
        with pytest.raises(HeadraceError):
            headrace.open(path)
    with pytest.raises(StorageError, match="File name too long"):
        read_manifest(LocalStore(tmp_path / ("x" * 300)))
