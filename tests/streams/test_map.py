"""Functions on items, and which items: map and filter."""

from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import SettingsError, StageError
from tests.streams import files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    files.write_jsonl(tmp_path / "a.jsonl", 20)
    return tmp_path / "a.jsonl"


def test_each_operation_is_a_new_stream(path: Path) -> None:
    stream = headrace.stream(path)
    even = stream.filter(files.has_even_number)
    numbers = even.map(files.numbered)
    assert len(list(stream)) == 20
    assert [record["n"] for record in even] == list(range(0, 20, 2))
    assert list(numbers) == [{"n": number} for number in range(0, 20, 2)]
    assert list(stream.map(files.text_of)) == files.lines(20)


def test_a_function_that_fails_is_named_with_its_item_and_loses_nothing(path: Path) -> None:
    failing = True

    def picky(record: dict[str, Any]) -> int:
        if failing and record["n"] == 3:
            raise LookupError("no threes")
        return int(record["n"])

    for name in ("map", "filter"):
        failing = True
        stream = getattr(headrace.stream(path), name)(picky)
        items = iter(stream)
        found = [next(items) for _ in range(3 if name == "map" else 2)]  # as a filter, it drops 0
        for _ in range(2):  # asked again, it fails again, and does not end
            with pytest.raises(StageError, match=r"picky\) failed on \{'n': 3,.*LookupError: no threes"):
                next(items)
        state = stream.state_dict()
        failing = False
        wanted = list(stream)
        assert found == wanted[: len(found)]
        assert list(items) == wanted[len(found) :]
        stream.load_state_dict(state)
        assert list(stream) == wanted[len(found) :]


def test_a_function_cannot_end_the_stream(path: Path) -> None:
    def stop(record: dict[str, Any]) -> Any:
        raise StopIteration

    with pytest.raises(StageError, match="StopIteration"):
        list(headrace.stream(path).map(stop))
    with pytest.raises(StageError, match="StopIteration"):
        list(headrace.stream(path).filter(stop))


def test_only_functions_will_do(path: Path) -> None:
    with pytest.raises(SettingsError, match=r"map\('text'\): must be a function"):
        headrace.stream(path).map("text")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"filter\(3\): must be a function"):
        headrace.stream(path).filter(3)  # type: ignore[arg-type]
