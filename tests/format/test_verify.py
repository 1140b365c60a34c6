import shutil
import subprocess
import sys

import pytest
import xxhash

import headrace
from headrace.errors import CorruptError, DatasetNotFoundError
from headrace.format.container import StoredFile
from headrace.format.fields import parse_fields
from headrace.format.finish import finish_dataset
from headrace.format.manifest import ShardEntry, read_manifest
from headrace.store.local import LocalStore

FIELDS = {"t": "uint16[*]", "x": "int8", "b": "bytes"}


@pytest.fixture
def directory(write_dataset, tmp_path):
    shards = [[{"t": range(n), "x": n, "b": b"x" * n} for n in part] for part in ([3, 0], [1, 3, 3], [2])]
    raw = b'{"sources": []}'
    (tmp_path / "provenance.json").write_bytes(raw)
    stored = StoredFile(
        *("provenance.json", len(raw), xxhash.xxh3_128_hexdigest(raw), 0, xxhash.xxh3_64_hexdigest(b""))
    )
    write_dataset(tmp_path, FIELDS, shards, provenance=stored)
    return tmp_path


def problems(directory):
    verdicts = list(headrace.verify(directory))
    names = [verdict.file for verdict in verdicts]
    assert len(names) == len(set(names)), "each file is reported exactly once"
    assert set(names) == {stored.file for stored in read_manifest(LocalStore(directory)).files}
    return {verdict.file: verdict.problem for verdict in verdicts if verdict.problem}


def test_a_whole_dataset_has_no_problems(directory):
    assert problems(directory) == {}
    assert [verdict.file.split("-")[0] for verdict in headrace.verify(directory)] == [
        *("shard", "shard", "shard", "provenance.json", "units", "index")
    ]


def test_what_is_no_dataset_raises_at_once(tmp_path):
    with pytest.raises(DatasetNotFoundError):
        headrace.verify(tmp_path)
    (tmp_path / "headrace.json").write_bytes(b"{}")
    with pytest.raises(CorruptError):
        headrace.verify(tmp_path)


def test_each_flipped_byte_is_found_in_its_file_and_hides_no_other(directory):
    for stored in read_manifest(LocalStore(directory)).files:
        path = directory / stored.file
        good = path.read_bytes()
        for place in range(0, len(good), max(1, len(good) // 40)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
            found = problems(directory)
            assert list(found) == [stored.file]
            assert str(path) in found[stored.file]
            assert "checksum" in found[stored.file]
        path.write_bytes(good)


def test_several_damaged_files_are_all_named(directory):
    manifest = read_manifest(LocalStore(directory))
    first, second, _ = (directory / shard.stored.file for shard in manifest.shards)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    index = directory / manifest.index.file
    index.write_bytes(index.read_bytes() + b"\x00")
    found = problems(directory)
    assert set(found) == {first.name, second.name, index.name}
    assert "is missing, although the manifest names it" in found[first.name]
    assert "bytes, but the manifest says" in found[second.name]
    assert "bytes, but the manifest says" in found[index.name]


def test_a_directory_in_the_place_of_a_file(directory):
    path = directory / read_manifest(LocalStore(directory)).shards[0].stored.file
    path.unlink()
    path.mkdir()
    assert list(problems(directory)) == [path.name]


def test_a_wrong_header_checksum_is_found_though_the_file_is_whole(directory, reseal):
    name = read_manifest(LocalStore(directory)).shards[1].stored.file
    reseal(directory, lambda body: body["shards"][1].update(header_checksum="0" * 16))
    assert "the checksum of its header does not match" in problems(directory)[name]


@pytest.mark.parametrize("elements", [{"t": 3, "x": 2, "b": 4}, {"t": 4, "x": 2, "b": 3}])
def test_counts_of_the_manifest_are_compared(directory, reseal, elements):
    manifest = read_manifest(LocalStore(directory))
    reseal(directory, lambda body: body["shards"][0].update(elements=elements))
    assert manifest.shards[0].stored.file in problems(directory)


@pytest.mark.parametrize("swap", [(0, 1), (1, 2), (0, 2)])
def test_an_index_of_other_shards_is_found(directory, reseal, swap):
    a, b = swap
    manifest = read_manifest(LocalStore(directory))

    def edit(body):
        body["shards"][a], body["shards"][b] = body["shards"][b], body["shards"][a]

    reseal(directory, edit)
    assert list(problems(directory)) == [manifest.further[0].stored.file, manifest.index.file]


def test_one_file_may_stand_for_two_shards(write_dataset, tmp_path):
    manifest = write_dataset(tmp_path, {"t": "uint16[*]"}, [[{"t": [1]}, {"t": [2]}], [{"t": [3, 3]}]])
    a, b = manifest.shards
    finish_dataset(LocalStore(tmp_path), parse_fields({"t": "uint16[*]"}), [a, b, a], "test")
    assert len(headrace.open(tmp_path)) == 5
    assert problems(tmp_path) == {}
    wrong = ShardEntry(stored=a.stored, records=1, elements={"t": 2})
    finish_dataset(LocalStore(tmp_path), parse_fields({"t": "uint16[*]"}), [a, b, wrong], "test")
    assert a.stored.file in problems(tmp_path)


def test_datasets_without_records_or_ragged_fields(write_dataset, tmp_path):
    for number, (fields, shards) in enumerate(
        [
            ({"t": "int8[*]"}, []),
            ({"t": "int8[*]"}, [[], []]),
            ({"x": "int8"}, [[{"x": 1}]]),
            ({"b": "bytes"}, [[]]),
        ]
    ):
        write_dataset(tmp_path / str(number), fields, shards)
        assert problems(tmp_path / str(number)) == {}


def test_memory_and_descriptors_stay_bounded(write_dataset, tmp_path, child_environment):
    """500 shards of 1 MB, one file under many names, verified in 300 MB of address space."""
    records = [{"x": bytes(1000), "t": [1] * (n % 7)} for n in range(1000)]
    manifest = write_dataset(tmp_path, {"t": "int8[*]", "x": "bytes"}, [records])
    entry = manifest.shards[0]
    names = [f"shard-{number:05d}.hdrc" for number in range(500)]
    for name in names:
        (tmp_path / name).hardlink_to(tmp_path / entry.stored.file)
    shards = [
        ShardEntry(
            stored=StoredFile(**{**entry.stored.__dict__, "file": name}),
            records=1000,
            elements=entry.elements,
        )
        for name in names
    ]
    finish_dataset(LocalStore(tmp_path), parse_fields({"t": "int8[*]", "x": "bytes"}), shards, "test")
    source = """
import resource, sys
import headrace
from pathlib import Path
list(headrace.verify(sys.argv[2]))  # everything is imported
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, used + 300_000_000))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
verdicts = list(headrace.verify(sys.argv[1]))
print(len(verdicts), {verdict.problem for verdict in verdicts})
"""
    small = tmp_path / "small"
    write_dataset(small, {"t": "int8[*]"}, [[]])
    if sys.platform != "linux":
        pytest.skip("needs RLIMIT_AS and /proc")
    ran = subprocess.run(
        [sys.executable, "-c", source, tmp_path, small], capture_output=True, text=True, env=child_environment
    )
    assert (ran.stdout, ran.stderr) == ("502 {''}\n", "")
    shutil.rmtree(tmp_path)
