from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import BuildError, DirectoryInUseError, FieldError, SettingsError, UnfinishedBuildError
from tests.ingest import deaths
from tests.properties import examples
from tests.samples import tree

FIELDS = {"x": "float32[2]", "tokens": "uint16[*]", "name": "bytes"}


def _record(number: int) -> dict[str, object]:
    return {"x": [number, -number], "tokens": np.arange(number % 17), "name": f"record {number}"}


def _check(dataset: headrace.Dataset, count: int) -> None:
    assert len(dataset) == count
    for number in range(count):
        record = dataset[number]
        assert record["x"].tolist() == [number, -number]
        assert record["tokens"].tolist() == list(range(number % 17))
        assert record["name"] == f"record {number}".encode()


def test_one_and_many_records_and_columns_at_a_time(tmp_path: Path) -> None:
    with headrace.Writer(tmp_path, fields=FIELDS, shard_bytes=2000) as writer:
        writer.write(_record(0))
        writer.write([_record(number) for number in range(1, 2500)])
        writer.write_columns(
            {
                "x": np.array([[n, -n] for n in range(2500, 2600)]),
                "tokens": [np.arange(n % 17) for n in range(2500, 2600)],
                "name": [f"record {n}".encode() for n in range(2500, 2600)],
            }
        )
        assert len(writer) == 2600
        with pytest.raises(UnfinishedBuildError):
            headrace.open(tmp_path)
    _check(headrace.open(tmp_path), 2600)
    assert len(list(tmp_path.glob("shard-*"))) > 2
    assert not (tmp_path / ".build").exists()
    assert not [verdict for verdict in headrace.verify(tmp_path) if verdict.problem]


def test_the_caller_may_reuse_its_buffers(tmp_path: Path) -> None:
    buffer = np.zeros(3, dtype=np.int64)
    with headrace.Writer(tmp_path, fields={"x": "int64[3]"}) as writer:
        for number in range(5):
            buffer[:] = number
            writer.write({"x": buffer})
    assert headrace.open(tmp_path)[:]["x"][:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"x": [1, 2], "tokens": [70_000], "name": b""}, "the value 70000 does not fit"),
        ({"x": [1, 2], "tokens": [-1], "name": b""}, "the value -1 does not fit"),
        ({"x": [1, 2], "tokens": [0.5], "name": b""}, "got values of dtype float64"),
        ({"x": [1, 2, 3], "tokens": [1], "name": b""}, r"got shape \(3,\)"),
        ({"x": [1, 2], "tokens": 7, "name": b""}, r"got shape \(\)"),
        ({"x": [1, 2], "tokens": [1]}, "a record needs the fields x, tokens, name"),
        ({"x": [1, 2], "tokens": [1], "name": b"", "y": 1}, "got x, tokens, name, y"),
    ],
)
def test_a_bad_record_is_refused_and_the_others_stay(
    record: dict[str, object], message: str, tmp_path: Path
) -> None:
    with headrace.Writer(tmp_path, fields=FIELDS) as writer:
        writer.write(_record(0))
        with pytest.raises(SettingsError, match=message):
            writer.write([_record(1), record])
        writer.write(_record(1))
    _check(headrace.open(tmp_path), 2)


def test_an_exception_leaves_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), headrace.Writer(tmp_path, fields=FIELDS) as writer:
        writer.write({**_record(0), "x": [1 / 0, 0]})
    with pytest.raises(UnfinishedBuildError):
        headrace.open(tmp_path)


def test_a_dataset_or_another_writer_is_not_overwritten(tmp_path: Path) -> None:
    with headrace.Writer(tmp_path, fields=FIELDS) as writer:
        with pytest.raises(DirectoryInUseError, match=r"headrace\.Writer, process"):
            headrace.Writer(tmp_path, fields=FIELDS)
        writer.write(_record(0))
    with pytest.raises(BuildError, match="holds a dataset already"):
        headrace.Writer(tmp_path, fields=FIELDS)
    with headrace.Writer(tmp_path, fields={"y": "int8"}, overwrite=True) as writer:
        writer.write({"y": 3})
    assert headrace.open(tmp_path)[0]["y"] == 3


def test_no_records_make_an_empty_dataset(tmp_path: Path) -> None:
    headrace.Writer(tmp_path, fields=FIELDS).close()
    dataset = headrace.open(tmp_path)
    assert len(dataset) == 0
    assert list(dataset) == []
    assert dataset.num_tokens == 0


@pytest.mark.parametrize(
    "fields", [{}, {"a/b": "int8"}, {"": "int8"}, {"x": "int7"}, {"x": "uint16[3,*]"}, ["x"]]
)
def test_impossible_fields_are_refused(fields: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        headrace.Writer(tmp_path, fields=fields)
    assert issubclass(FieldError, KeyError)


def test_a_killed_writer_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    [finished] = deaths.run("write", out=whole, moments=[0], records=2000)
    a_quarter = finished["changes"] // 4
    answers = deaths.run("write", out=cut, moments=[a_quarter, a_quarter, a_quarter, 0], records=2000)
    assert [answer["killed"] for answer in answers] == [True, True, True, False]
    assert answers[-1]["changes"] < finished["changes"], "what was written before was written again"
    assert tree(cut) == tree(whole)
    assert headrace.open(cut)[1999]["name"] == b"record 1999"


@examples(25)
@given(
    lengths=st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=6),
    shard_bytes=st.integers(1, 500),
)
def test_any_way_of_writing_reads_back(
    lengths: list[list[int]], shard_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("writer")
    expected = [np.arange(length) for many in lengths for length in many]
    with headrace.Writer(path, fields={"t": "uint32[*]"}, shard_bytes=shard_bytes) as writer:
        for number, many in enumerate(lengths):
            if number % 2:
                writer.write([{"t": np.arange(length)} for length in many])
            else:
                writer.write_columns({"t": [np.arange(length) for length in many]})
    dataset = headrace.open(path)
    assert [record["t"].tolist() for record in dataset] == [item.tolist() for item in expected]
