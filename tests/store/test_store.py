"""What holds of every store: each test runs on all of them."""

import os
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest

import headrace
from headrace.errors import DirectoryInUseError, SettingsError, StorageError
from headrace.format.manifest import FurtherFile, read_manifest
from headrace.store.address import open_store, split_place
from headrace.store.local import LocalStore
from headrace.store.memory import MemoryStore
from headrace.store.store import Store, write_file

Open = Callable[[str], Store]


@pytest.fixture(params=["local", "memory", "s3"])
def open_place(request, tmp_path) -> Open:
    if request.param == "local":
        return lambda name: LocalStore(tmp_path / name)
    if request.param == "memory":
        return lambda name: MemoryStore(f"memory://{name}")
    place = request.getfixturevalue("s3_place")
    return lambda name: open_store(f"{place}/{name}")


@pytest.fixture
def store(open_place) -> Store:
    store = open_place("a")
    store.create()
    return store


def content_of(store: Store) -> dict[str, bytes]:
    return {file: store.read(file) for file in store.files()}


def test_a_file_comes_back(store):
    write_file(store, "x", [b"0123", memoryview(b"456789")])
    assert store.files() == ["x"]
    assert store.has("x")
    assert store.status("x").bytes == 10
    assert store.status("x").modified_ns > 0
    assert store.read("x") == b"0123456789"
    assert store.head("x", 4) == (b"0123", 10)
    assert store.head("x", 40) == (b"0123456789", 10)
    for in_memory in (False, True):
        view = store.view("x", in_memory=in_memory)
        assert view.tobytes() == b"0123456789"
        with pytest.raises(ValueError, match="read-only|cannot set WRITEABLE"):
            view.flags.writeable = True


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [(3, 4, b"3456"), (8, 40, b"89"), (10, 1, b""), (40, 1, b""), (4, None, b"456789")],
)
def test_a_stretch_ends_where_the_file_does(store, start, count, expected):
    write_file(store, "x", [b"0123456789"])
    assert store.read("x", start, count) == expected


def test_exactly_the_bytes_that_are_needed(store):
    write_file(store, "x", [b"0123456789"])
    assert store.fetch("x", 3, 7) == b"3456"
    assert store.fetch("x", 0, 10) == b"0123456789"
    assert store.fetch("x", 4, 4) == b""
    assert store.fetch("x", 3, 7).readonly
    for start, stop in ((3, 11), (10, 11), (20, 30)):
        with pytest.raises(StorageError, match=f"has 10 bytes, but bytes {start} to {stop} of it are needed"):
            store.fetch("x", start, stop)
    with pytest.raises(FileNotFoundError):
        store.fetch("y", 0, 1)


def test_a_store_knows_whether_its_reads_are_requests(store):
    assert store.is_remote == store.name.startswith("s3://")
    assert store.folder("b").is_remote == store.is_remote


def test_a_stamp_changes_with_the_file(store):
    assert store.stamp("x") is None
    write_file(store, "x", [b"first"])
    first = store.stamp("x")
    assert first is not None
    assert store.stamp("x") == first
    write_file(store, "x", [b"second"])
    assert store.stamp("x") not in (None, first)


def test_a_file_is_replaced_if_it_is_the_one_that_was_seen(store):
    inner = store.folder("b")
    inner.create()
    write_file(inner, "x", [b"first"])
    store.replace("x", inner, None)
    seen = store.stamp("x")
    write_file(inner, "x", [b"second"])
    with pytest.raises(DirectoryInUseError, match="x: was written by somebody else in the meantime"):
        store.replace("x", inner, None)
    store.replace("x", inner, seen)
    store.replace("x", inner, seen)  # as a repetition after an interrupt does
    assert (store.read("x"), inner.files()) == (b"second", [])
    write_file(inner, "x", [b"third"])
    with pytest.raises(DirectoryInUseError):
        store.replace("x", inner, seen)
    assert (store.read("x"), inner.read("x")) == (b"second", b"third")
    with pytest.raises(OSError, match="y"):
        store.replace("y", inner, None)


def test_what_is_not_there(store):
    assert not store.has("x")
    for ask in (store.read, store.status, store.view, lambda file: store.head(file, 1)):
        with pytest.raises(FileNotFoundError):
            ask("x")
    store.remove("x")


def test_a_place_that_was_not_made(open_place):
    nowhere = open_place("nowhere")
    assert not nowhere.exists()
    assert nowhere.files() == []
    assert not nowhere.has("x")
    with pytest.raises(FileNotFoundError):
        nowhere.read("x")
    nowhere.remove_all()
    nowhere.create()
    nowhere.create()
    assert nowhere.exists()


def test_a_file_takes_its_name_when_it_is_whole_and_may_change_it(store):
    with store.pending("x") as pending:
        pending.file.write(b"half")
        assert not store.has("x")
        pending.file.write(b" and half")
        pending.name = "y"
    assert content_of(store) == {"y": b"half and half"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_failure_leaves_the_old_file(store, error):
    write_file(store, "x", [b"old"])

    def fail():
        with store.pending("x") as pending:
            pending.file.write(b"new")
            raise error

    with pytest.raises(error):
        fail()
    assert content_of(store) == {"x": b"old"}


def test_who_has_a_file_open_keeps_it(store):
    write_file(store, "x", [b"old"])
    view = store.view("x")
    write_file(store, "x", [b"new!"])
    store.remove("x")
    store.remove("x")
    assert view.tobytes() == b"old"
    assert store.files() == []


def test_folders_are_places_of_their_own(store):
    inner = store.folder("b").folder("c")
    assert not inner.exists()
    inner.create()
    write_file(inner, "x", [b"inner"])
    write_file(store, "x", [b"outer"])
    assert store.files() == ["x"]
    assert store.folder("b").folder("c").read("x") == b"inner"
    assert inner.name == f"{store.name}/b/c"
    assert inner.locate("x") == f"{store.name}/b/c/x"
    store.folder("b").remove_all()
    assert not store.folder("b").folder("c").has("x")
    assert store.has("x")


def test_one_holder_at_a_time(store):
    with (
        store.lock("the first"),
        pytest.raises(DirectoryInUseError, match=f"the first, process {os.getpid()}"),
    ):
        store.lock("the second").__enter__()
    with store.lock("the third"):
        pass


def test_it_can_be_sent_to_another_process(store):
    write_file(store, "x", [b"content"])
    copy = pickle.loads(pickle.dumps(store))
    assert content_of(copy) == content_of(store)
    with copy.lock("the copy"):
        pass


def test_scratch_is_a_local_directory_that_goes_too(store):
    scratch = store.scratch()
    (scratch / "large").write_bytes(b"x")
    store.remove_all()
    assert not (scratch / "large").exists()


def test_many_threads_write_one_name(store):
    def write(number):
        write_file(store, "x", [bytes([number]) * 1000] * 20)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = store.read("x")
    assert len(content) == 20_000
    assert len(set(content)) == 1


def test_a_file_is_moved_from_a_folder_in_one_step_and_only_once(store):
    inner = store.folder("b")
    inner.create()
    write_file(store, "x", [b"old"])
    write_file(inner, "x", [b"new"])
    store.take("x", inner)
    store.take("x", inner)  # as a repetition after an interrupt does
    assert (store.read("x"), inner.files()) == (b"new", [])
    with pytest.raises(OSError, match="y"):
        store.take("y", inner)


def test_a_claimed_place_is_ours_until_it_is_removed(store):
    inner = store.folder("b")
    inner.claim()
    inner.claim()
    write_file(inner, "x", [b"ours"])
    inner.claim()
    assert inner.files() == ["x"]
    inner.remove_all()
    assert not inner.exists()
    inner.create()
    write_file(inner, "x", [b"somebody's"])
    with pytest.raises(StorageError, match="is not a folder of Headrace"):
        inner.claim()
    assert content_of(inner) == {"x": b"somebody's"}


# What people do with stores


def write_some(place, count=300):
    random = np.random.default_rng(1)
    fields = {"tokens": "uint16[*]", "label": "int64", "name": "bytes"}
    with headrace.Writer(place, fields=fields, shard_bytes=2000) as writer:
        for number in range(count):
            tokens = random.integers(0, 500, random.integers(0, 20))
            writer.write({"tokens": tokens, "label": number, "name": f"record {number}".encode()})


def test_a_dataset_is_the_same_bytes_and_rows_in_every_store(store, tmp_path):
    write_some(store)
    write_some(tmp_path / "reference")
    assert content_of(store) == content_of(LocalStore(tmp_path / "reference"))
    assert [verdict.problem for verdict in headrace.verify(store)] == [""] * (len(store.files()) - 1)
    dataset, reference = headrace.open(store), headrace.open(tmp_path / "reference")
    settings = {
        "batch_size": 8,
        "seq_len": 64,
        "packing": "best-fit",
        "seed": 3,
        "prefetch": 0,
        "shuffle": "units",
    }
    batches = zip(headrace.Loader(dataset, **settings), headrace.Loader(reference, **settings), strict=True)
    for batch, expected in batches:
        for name, values in expected.items():
            np.testing.assert_array_equal(batch[name], values)
    again = pickle.loads(pickle.dumps(dataset))
    assert again[7]["name"] == dataset[7]["name"] == b"record 7"


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_build_is_the_same_bytes_in_every_store(store, tmp_path, shuffle):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"document {number} " * (number % 7))
    settings = {"tokenizer": "bytes", "shard_bytes": 4096, "shuffle": shuffle, "workers": 1}
    report = headrace.build(texts, store, **settings)
    headrace.build(texts, tmp_path / "reference", **settings)
    assert content_of(store) == content_of(LocalStore(tmp_path / "reference"))
    assert not store.folder(".build").exists()
    assert report.records == len(headrace.open(store))
    # Another build has nothing to do.
    assert headrace.build(texts, store, **settings).built == 0


def test_a_writer_that_was_cut_off_goes_on_in_every_store(store, tmp_path):
    writer = headrace.Writer(store, fields={"x": "int64"}, shard_bytes=80)
    for number in range(35):
        writer.write({"x": number})
    writer.__exit__(RuntimeError, RuntimeError(), None)
    with headrace.Writer(store, fields={"x": "int64"}, shard_bytes=80, resume=True) as writer:
        assert 0 < len(writer) <= 35
        for number in range(len(writer), 50):
            writer.write({"x": number})
    assert headrace.open(store)[:]["x"].tolist() == list(range(50))


def test_files_of_neighbours_lie_in_any_store(store):
    tokens = np.array([5, 6, 9, 7, 9, 9, 8], np.uint16)
    write_file(store, "tokens.bin", [tokens.tobytes()])
    place = store.locate("tokens.bin")
    if isinstance(store, MemoryStore):
        open_store(store.name).create()
        write_file(open_store(store.name), "tokens.bin", [tokens.tobytes()])
    dataset = headrace.open(place, eos_id=9)
    assert [record["tokens"].tolist() for record in dataset] == [[5, 6, 9], [7, 9], [9], [8]]
    parent, _ = split_place(place)
    # Nothing is written into a bucket by reading from it.
    index = [] if parent.is_remote else ["tokens.bin.headrace-index"]
    assert parent.files() == ["tokens.bin", *index]


def test_further_files_of_a_manifest_are_kept_checked_and_otherwise_ignored(store):
    from headrace.format.finish import finish_dataset, store_document
    from headrace.format.workplace import Workplace

    write_some(store, 30)
    manifest = read_manifest(store)
    sums = store_document(store, "sums", b"[1, 2, 3]")
    further = [FurtherFile(purpose="of a later version", stored=sums)]
    finish_dataset(store, manifest.fields, manifest.shards, "tests", further=further)
    assert read_manifest(store).further[:1] == tuple(further)
    Workplace(store).remove()
    assert len(headrace.open(store)) == 30
    store.remove(sums.file)  # where a name has one content, writing another one makes no difference
    write_file(store, sums.file, [b"[1, 2, 4]"])
    assert [verdict.file for verdict in headrace.verify(store) if verdict.problem] == [sums.file]


# Addresses


def test_addresses_of_memory_name_the_same_store_everywhere():
    store = open_store("memory://addresses")
    assert open_store("memory://addresses/") is store
    assert open_store("memory://addresses/b") is store.folder("b")
    assert split_place("memory://addresses/b/x.bin") == (store.folder("b"), "x.bin")
    assert open_store(store) is store
    write_some("memory://addresses/data", 10)
    assert len(headrace.open("memory://addresses/data")) == 10
    assert len(headrace.Loader("memory://addresses/data", batch_size=2)) == 5


def test_addresses_that_name_no_store():
    with pytest.raises(
        SettingsError, match="ftp://bucket/prefix: there is no store for ftp://; give a local path"
    ):
        headrace.open("ftp://bucket/prefix")
    with pytest.raises(SettingsError, match="must name a store, like memory://mine"):
        open_store("memory://")


def test_a_store_in_memory_is_built_by_its_own_process(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 10_000)
    store = MemoryStore()
    with pytest.raises(SettingsError, match="in the memory of this process; build with workers=1"):
        headrace.build(str(tmp_path / "*.txt"), store, tokenizer="bytes", workers=2, shard_bytes=4096)
    assert not store.exists()
    assert not store.folder(".build").exists()
    assert headrace.build(str(tmp_path / "*.txt"), store, tokenizer="bytes").records == 2


def test_a_place_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be created"):
        LocalStore(tmp_path / "file" / "inside").create()
