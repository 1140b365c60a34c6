"""The content of an object as an array and as a file: right bytes for any reads, in few requests, of one version."""

import io
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import StorageError
from headrace.store import remote_content
from headrace.store.address import open_store
from headrace.store.remote_address import parse_address
from headrace.store.remote_content import RemoteContent
from headrace.store.remote_file import RemoteFile
from headrace.store.remote_object import RemoteObject, find_object
from tests.fault_proxy import FaultProxy
from tests.properties import examples
from tests.raw_files import put
from tests.s3_server import SECRET_KEY

CONTENT = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8).tobytes()
PLACES = st.tuples(st.integers(-100, 21_000), st.integers(0, 9000)).map(lambda pair: (pair[0], sum(pair)))


@pytest.fixture
def found(s3_place: str) -> RemoteObject:
    put(s3_place, "x", CONTENT)
    found = find_object(parse_address(f"{s3_place}/x"))
    assert found is not None
    return found


class _ReadsHere(RemoteObject):
    """Reads from memory, and remembers what was read: a property takes thousands of reads."""

    def __init__(self) -> None:
        super().__init__(parse_address("s3://bucket/x"), len(CONTENT), "")
        self.ranges: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> memoryview:
        assert 0 <= start < stop <= len(CONTENT)
        self.ranges.append((start, stop))
        return memoryview(CONTENT)[start:stop]


@pytest.fixture(scope="module", autouse=True)
def _small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_content, "PIECE_BYTES", 1000)
        patch.setattr(remote_content, "SMALL_BYTES", 100)
        patch.setattr(remote_content, "_LEAST_BYTES", 64)
        yield


@examples(100)
@given(st.lists(st.one_of(PLACES, st.lists(PLACES, max_size=4)), max_size=12))
def test_bytes_are_right_for_any_reads_and_expectations(steps):
    content = RemoteContent(_ReadsHere())
    assert len(content) == len(CONTENT)
    for step in steps:
        if isinstance(step, list):
            content.expect(step)
        else:
            start, stop = max(0, step[0]), max(0, step[1])
            assert content[start:stop].tobytes() == CONTENT[start:stop]


@examples(50)
@given(
    st.lists(
        st.tuples(st.sampled_from(["read", "seek", "end", "readinto"]), st.integers(0, 9000)), max_size=20
    )
)
def test_a_file_is_what_a_file_in_memory_is(steps):
    files = [RemoteFile(RemoteContent(_ReadsHere())), io.BytesIO(CONTENT)]
    for step, number in steps:
        outcomes = []
        for file in files:
            if step == "read":
                outcomes.append(file.read(number))
            elif step == "readinto":
                buffer = bytearray(number)
                outcomes.append((file.readinto(buffer), bytes(buffer)))
            else:
                outcomes.append(file.seek(-number, io.SEEK_END) if step == "end" else file.seek(2 * number))
            outcomes.append(file.tell())
        assert outcomes[:2] == outcomes[2:]
    assert files[0].seekable()
    assert files[0].read() == files[1].read()


def test_a_range_is_fetched_in_pieces_two_of_them_ahead():
    source = _ReadsHere()
    content = RemoteContent(source)
    content.expect([(500, 9500)])
    content[500:600]
    content[600:1400]
    for piece in content._expected[0]._pieces.values():
        piece.result()
    content[9499:9500]
    wanted = [(500, 1500), (1500, 2500), (2500, 3500), (8500, 9500)]
    assert sorted(source.ranges) == wanted
    content[600:1400]
    assert len(source.ranges) > len(wanted), "a piece that was passed is kept"


def test_reads_that_nobody_expected_grow_as_they_go_on():
    source = _ReadsHere()
    content = RemoteContent(source)
    for place in range(0, 5000, 10):
        content[place : place + 10]
    assert [stop - start for start, stop in source.ranges] == [
        64,
        128,
        256,
        512,
        1000,
        1000,
        1000,
        1000,
        1000,
    ]
    content[-10:]
    assert source.ranges[-1] == (20_000 - 64, 20_000)
    content[-60:]
    assert len(source.ranges) == 10


def test_a_small_object_is_fetched_once(s3_place: str, fault_proxy: FaultProxy) -> None:
    put(s3_place, "small", b"0123456789" * 10)
    found = find_object(parse_address(f"{s3_place}/small"))
    assert found is not None
    fault_proxy.clear()
    content = RemoteContent(found)
    content.expect([(90, 100), (20, 30)])
    assert content[25:35].tobytes() == b"5678901234"
    assert content[:].tobytes() == b"0123456789" * 10
    assert fault_proxy.requests["GET"] == 1


# Of one version


def test_a_large_part_takes_several_requests_at_once(found: RemoteObject, fault_proxy: FaultProxy) -> None:
    fault_proxy.clear()
    assert RemoteContent(find_again(found))[100:8100].tobytes() == CONTENT[100:8100]
    assert fault_proxy.requests["GET"] == 8


def find_again(found: RemoteObject) -> RemoteObject:
    """Through the proxy."""
    return RemoteObject(found.address, found.size, found.stamp)


def test_another_version_is_never_read(found: RemoteObject, s3_place: str) -> None:
    again = pickle.loads(pickle.dumps(found))
    assert again.read(5, 50) == CONTENT[5:50]
    assert SECRET_KEY.encode() not in pickle.dumps(again)
    put(s3_place, "x", CONTENT[::-1])
    for each in (found, again):
        with pytest.raises(StorageError, match=rf"{s3_place}/x: was replaced after it was listed"):
            each.read(5, 50)
    put(s3_place, "x", b"short")
    with pytest.raises(StorageError, match="was replaced after it was listed"):
        found.read(1000, 1500)
    open_store(s3_place).remove("x")
    with pytest.raises(
        StorageError, match=rf"{s3_place}/x: cannot be read: it was deleted after it was listed"
    ):
        found.read(5, 50)


@pytest.mark.parametrize("stamp", ['W/"another"', "modified 5"])
def test_versions_are_compared_also_where_the_server_does_not(found: RemoteObject, stamp: str) -> None:
    """By weak tags, and by times if there are no tags."""
    tag = found.stamp.strip('"')
    assert RemoteObject(found.address, found.size, f'W/"{tag}"').read(0, 5) == CONTENT[:5]
    assert RemoteObject(found.address, found.size, tag).read(0, 5) == CONTENT[:5]
    with pytest.raises(StorageError, match="was replaced"):
        RemoteObject(found.address, found.size, stamp).read(0, 5)
