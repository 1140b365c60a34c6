"""Inputs in buckets: the objects that patterns and prefixes stand for, as on a disk, and errors as clear as there."""

import os

import pytest

import headrace
from headrace.errors import SettingsError, StorageError
from headrace.store.client import RemoteOptions, client_for
from headrace.store.remote_address import parse_address
from headrace.store.s3 import S3Request
from tests.fault_proxy import FaultProxy
from tests.raw_files import Twins, put, upload_for_module
from tests.s3_server import BUCKET, S3Server

NAMES = [
    "a.txt",
    "b.jsonl",
    "sub/a.txt",
    "sub/deep/c.txt",
    "sub/deep/.hidden.txt",
    "sub/.folder/d.txt",
    ".hidden.txt",
    "sub2/ü + #1%20.txt",
    "sub2/[x].txt",
    "sub2/data.unknown",
    "other.d/e.txt",
]
PATTERNS = [
    "",
    "sub",
    "sub/",
    "sub/a.txt",
    "*.txt",
    "?.*",
    "[ab].*",
    "[!a].*",
    "sub*/*.txt",
    "**/*.txt",
    "**/deep/*",
    "**",
    "sub/**",
    "sub/**/*.txt",
    "s*/**/c.txt",
    ".*.txt",
    "sub/.*/*",
    "sub2/[[]x].txt",
    "sub2/ü*",
    "*/*/c.txt",
    "*unknown",
    "**/*.unknown",
]


@pytest.fixture(scope="module")
def files(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    folder = tmp_path_factory.mktemp("found")
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return upload_for_module(folder, s3_server)


def found(place: str, given: str, **options: list[str]) -> list[tuple[str, int]] | str:
    """The names and sizes of the files, or the kind of error."""
    try:
        files = headrace.stream(os.path.join(place, given) if given else place, **options).inputs.files
    except (SettingsError, StorageError) as error:
        return type(error).__name__
    return [(file.path.removeprefix(f"{place}/"), file.bytes) for file in files]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_means_on_a_disk(
    files: Twins, s3_environment: S3Server, pattern: str
) -> None:
    assert found(files.address, pattern) == found(str(files.folder), pattern)


def test_patterns_to_include_mean_the_same(files: Twins, s3_environment: S3Server) -> None:
    for include in (["*.unknown"], ["c*", "*deep*"], ["*.nothing"]):
        near, far = (found(place, "", include=include) for place in (str(files.folder), files.address))
        assert near == far
    assert found(files.address, "a.txt", include=["*"]) == "SettingsError"


def test_a_bucket_is_listed_once_and_only_where_it_must_be(files: Twins, fault_proxy: FaultProxy) -> None:
    prefix = files.address.rpartition("/")[2]
    headrace.stream(f"{files.address}/sub*/**/*.txt")
    assert len(fault_proxy.log) == 1
    assert f"prefix={prefix}%2F" in fault_proxy.log[0].path
    fault_proxy.clear()
    headrace.stream(f"{files.address}/sub/*.txt")
    assert len(fault_proxy.log) == 1
    assert f"prefix={prefix}%2Fsub%2F" in fault_proxy.log[0].path
    assert "delimiter=" in fault_proxy.log[0].path


def test_the_same_object_by_several_names_is_read_once(files: Twins, s3_environment: S3Server) -> None:
    place, here = files.address, str(files.folder / "a.txt")
    given = [f"{place}/a.txt", f"{place}/*.txt", f"{place}/a.txt".replace("s3:", "s3a:"), here]
    assert [file.path for file in headrace.stream(given).inputs.files] == [here, f"{place}/a.txt"]


@pytest.mark.parametrize("name", ["a[1].txt", "q?.txt", "s*.txt", "d[2]/x.txt", "d[2]"])
def test_a_name_with_characters_of_patterns_means_itself(s3_place: str, tmp_path, name: str) -> None:
    names = ["a[1].txt", "a1.txt", "q?.txt", "qq.txt", "s*.txt", "so.txt", "d[2]/x.txt", "d2.txt"]
    for each in names:
        put(s3_place, each, each)
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text(each)
    assert found(s3_place, name) == found(str(tmp_path), name) != "SettingsError"


def _put_mark(address: str) -> None:
    """An empty object whose key ends with a slash, as consoles write it; the client library cannot."""
    parsed = parse_address(address)
    requests = client_for(parsed, RemoteOptions()).s3_requests()
    key = f"{parsed.prefix}/"
    requests.ask(S3Request(method="PUT", key=key, headers={"Content-Length": "0"}, most_bytes=1 << 16))


def test_the_mark_of_an_empty_folder_is_no_document(s3_place: str, s3_environment: S3Server) -> None:
    put(s3_place, "mk/a.txt", "x")
    put(s3_place, "mk/empty.txt", "")
    _put_mark(f"{s3_place}/mk/new/")
    for given in ("mk", "mk/**", "mk/*"):
        assert [name for name, _ in found(s3_place, given, format="text")] == ["mk/a.txt", "mk/empty.txt"]


def test_marks_of_folders_are_no_files(s3_place: str) -> None:
    for name in ("texts", "texts/a.txt", "texts/more", "texts/more/b.txt"):
        put(s3_place, name, "" if "." not in name else "x")
    files = headrace.stream(f"{s3_place}/texts").inputs.files
    assert [file.path for file in files] == [f"{s3_place}/texts/a.txt", f"{s3_place}/texts/more/b.txt"]


ERRORS = [
    ("{place}/nothing", "no such object, and there is nothing under that prefix"),
    ("{place}/*.nothing", "no object matches"),
    ("{place}/sub*/", "no object matches"),
    ("s3://bu*/a.txt", "the name of a bucket cannot be a pattern; name the bucket"),
    ("s3://no-such-bucket/a.txt", "there is no such bucket; check its spelling"),
    ("s3://no-such-bucket/*.txt", "there is no such bucket; check its spelling"),
    ("s3://", "must name a bucket or host"),
    ("s3://{bucket}/a//b.txt", "an empty, '.' or '..' part"),
    ("hdfs://{bucket}/a.txt", "files cannot be read from hdfs://; give a local path, or one of s3://"),
    ("memory://{bucket}/a.txt", "files cannot be read from memory://"),
    ("https://me:hush@host/a.txt", r"https://\[hidden\]@host/a.txt: an address must not hold a user name"),
]


@pytest.mark.parametrize(("address", "said"), ERRORS)
def test_what_cannot_be_found_is_told(
    files: Twins, s3_environment: S3Server, address: str, said: str
) -> None:
    given = address.format(bucket=BUCKET, place=files.address)
    with pytest.raises((SettingsError, StorageError), match=said):
        headrace.stream(given)


def test_a_name_that_says_nothing_and_looks_like_records_needs_a_format(s3_place: str) -> None:
    put(s3_place, "dump", '{"t": "a"}\n{"t": "b"}\n')
    with pytest.raises(SettingsError, match=f"{s3_place}/dump: looks like JSON lines.*format='jsonl'"):
        headrace.stream(f"{s3_place}/dump")
    assert [record["t"] for record in headrace.stream(f"{s3_place}/dump", format="jsonl")] == ["a", "b"]
