from pathlib import Path
from typing import Any

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
        ({"x": [1, 1e300], "tokens": [1], "name": b""}, r"the value 1e\+300 does not fit"),
        ({"x": [1, 2], "tokens": [1], "name": 5}, "'name' is bytes: got int; give bytes"),
        ({"x": [1, 2], "tokens": [1], "name": [1, 2]}, "'name' is bytes: got list"),
        ({"x": [1, 2], "tokens": [1], "name": None}, "'name' is bytes: got NoneType"),
        ({"x": [1, 2], "tokens": [1], "name": "\ud800"}, "'name' is bytes: the string has no UTF-8 form"),
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, r"write\(5\): must be a record"),
        ((1, 2), r"write\(1 in a tuple\): must be a record"),
        ("ab", r"write\('a' in a str\): must be a record"),
        ([_record(1), None], r"write\(None in a list\): must be a record"),
    ],
)
def test_what_is_no_record_is_refused(given: Any, said: str, tmp_path: Path) -> None:
    with headrace.Writer(tmp_path, fields=FIELDS) as writer:
        with pytest.raises(SettingsError, match=said):
            writer.write(given)
        writer.write(_record(0))
    _check(headrace.open(tmp_path), 1)


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


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="resume=True and overwrite=True exclude each other"):
        headrace.Writer(tmp_path / "out", fields=FIELDS, resume=True, overwrite=True)
    assert not (tmp_path / "out").exists()


def test_a_writer_that_overwrites_is_resumed_and_the_old_dataset_stays_until_then(tmp_path: Path) -> None:
    with headrace.Writer(tmp_path, fields={"y": "int8"}) as writer:
        writer.write({"y": 3})
    settings = {"fields": {"x": "int64"}, "shard_bytes": 80}
    writer = headrace.Writer(tmp_path, **settings, overwrite=True)
    for number in range(25):
        writer.write({"x": number})
    writer.__exit__(RuntimeError, RuntimeError(), None)
    assert headrace.open(tmp_path)[0]["y"] == 3
    with headrace.Writer(tmp_path, **settings, resume=True) as writer:
        assert len(writer) == 20
        writer.write_columns({"x": range(20, 30)})
    assert headrace.open(tmp_path)[:]["x"].tolist() == list(range(30))
    with pytest.raises(BuildError, match="holds a dataset already"):
        headrace.Writer(tmp_path, **settings, resume=True)


def test_after_its_end_a_writer_takes_nothing_more(tmp_path: Path) -> None:
    writer = headrace.Writer(tmp_path / "closed", fields={"x": "int64"})
    writer.write({"x": 1})
    writer.close()
    writer.close()
    with pytest.raises(BuildError, match="the writer is closed, and its dataset is complete"):
        writer.write({"x": 2})
    with pytest.raises(ZeroDivisionError), headrace.Writer(tmp_path / "left", fields={"x": "int64"}) as left:
        left.write({"x": 1 / 0})
    for use in (left.close, lambda: left.write_columns({"x": [1]})):
        with pytest.raises(BuildError, match=r"left because of an error; continue .* resume=True"):
            use()


@pytest.mark.parametrize("setting", ["shard_bytes", "resume", "overwrite"])
def test_settings_of_another_type_are_refused(setting: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{setting}='x': must be"):
        headrace.Writer(tmp_path / "out", fields=FIELDS, **{setting: "x"})
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("before_the_end", [1, 3, 6, 9, 12, 20])
def test_a_writer_that_was_killed_while_it_was_completed_is_completed(
    before_the_end: int, tmp_path: Path
) -> None:
    """Also if it was killed when everything was done but the removal of its own folder."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    [finished] = deaths.run("write", out=whole, moments=[0], records=300)
    moments = [finished["changes"] - before_the_end, 0]
    answers = deaths.run("write", out=cut, moments=moments, records=300)
    assert [answer["killed"] for answer in answers] == [True, False]
    assert answers[-1]["error"] is None or "holds a dataset already" in answers[-1]["error"]
    left = {name: digest for name, digest in tree(cut).items() if not name.startswith((".build", ".lock"))}
    assert left == tree(whole)


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
