"""Datasets of more parts than are mapped at a time: the same rows, and no more maps than there may be."""

import gc
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.dataset import dataset as datasets
from headrace.errors import CorruptError
from headrace.rows.parts import PartTable
from tests.properties import examples
from tests.rows.parts_in_ram import in_parts, tokens_at

PARTS, MOST = 40, 3


@pytest.fixture
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "MOST_PARTS", MOST)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "data"
    fields = {"tokens": "uint16[*]", "x": "float32[3]", "name": "bytes"}
    random = np.random.default_rng(5)
    with headrace.Writer(path, fields=fields, shard_bytes=600) as writer:
        for number in range(PARTS * 8):
            tokens = random.integers(0, 1000, random.integers(0, 60))
            writer.write({"tokens": tokens, "x": np.full(3, number), "name": b"n%d" % number})
    assert len(headrace.open(path).source.part_records) > 10 * MOST
    return path


def mapped_shards(directory: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-1] for line in lines if f"{directory}/shard-" in line})


LOADERS: dict[str, dict[str, Any]] = {
    "packed": {"seq_len": 64, "batch_size": 4},
    "packed in groups": {"seq_len": 64, "batch_size": 4, "group_shards": 5},
    "windows": {"seq_len": 64, "batch_size": 4, "packing": "windows"},
    "aligned windows": {"seq_len": 64, "batch_size": 4, "packing": "windows", "align_documents": True},
    "padded": {"seq_len": 64, "batch_size": 4, "packing": "pad"},
    "records": {"batch_size": 5},
    "in stored order": {"batch_size": 5, "shuffle": "none"},
}


def batches(data: Any, **options: Any) -> list[dict[str, Any]]:
    return [dict(batch) for batch in headrace.Loader(data, seed=3, **options)]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("way", [{"prefetch": 0}, {"prefetch": 8, "workers": 4}], ids=["at once", "threads"])
def test_the_same_batches(
    directory: Path, options: dict[str, Any], way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = batches(headrace.open(directory, in_memory=True), **options, prefetch=0)
    monkeypatch.setattr(datasets, "MOST_PARTS", MOST)
    assert_same(batches(directory, **options, **way), expected)


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize("options", [LOADERS["records"], LOADERS["in stored order"]])
def test_no_more_parts_are_mapped_than_may_be(directory: Path, options: dict[str, Any]) -> None:
    loader = headrace.Loader(directory, **options, prefetch=0)
    gc.collect()
    before = mapped_shards(directory)
    seen = []
    for _ in loader:
        seen.append(mapped_shards(directory) - before)
    # The dataset keeps as many as the tables, which each field has one of, and not always the same.
    assert 0 < max(seen) <= 2 * MOST + 1


@pytest.mark.usefixtures("few_parts")
def test_fields_that_are_asked_for_late_are_still_there(directory: Path) -> None:
    """The first loop uses tokens only, so that labels are made when all other batches have come and gone."""
    loader = headrace.Loader(directory, seq_len=64, batch_size=4, seed=3)
    kept = list(loader)
    labels = [batch["labels"] for batch in kept]
    reference = headrace.Loader(
        headrace.open(directory, in_memory=True), seq_len=64, batch_size=4, seed=3, prefetch=0
    )
    for found, batch in zip(labels, reference, strict=True):
        np.testing.assert_array_equal(found, batch["labels"])


@examples(40)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=12),
    most=st.integers(1, 4),
    data=st.data(),
)
def test_what_is_pinned_stays_whatever_is_planned_meanwhile(
    lengths: list[list[int]], most: int, data: st.DataObject
) -> None:
    dataset, documents = in_parts(lengths)
    table = PartTable(dataset, "tokens")
    table._most = most
    plans = []
    for _ in range(data.draw(st.integers(1, 8))):
        asked = data.draw(st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=6))
        records = np.array(asked)
        with table.pinned() as pins:
            found = table.parts_of(records)
            begin, _ = table.extents(records, found)
            plans.append((asked, table.addresses(begin, found), pins))
        assert len(table._kept) <= most or len(lengths) <= most
    for asked, addresses, _ in plans:
        for record, address in zip(asked, addresses.tolist(), strict=True):
            assert tokens_at(address, table.token_type, len(documents[record])) == documents[record]


@pytest.mark.usefixtures("few_parts")
def test_many_threads_plan_and_copy_at_once(directory: Path) -> None:
    rows = headrace.Loader(directory, batch_size=4, seed=3).rows
    expected = rows(range(rows.rows_per_epoch))["x"]
    wrong: list[int] = []

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            positions = random.integers(0, rows.rows_per_epoch, 16)
            if not np.array_equal(rows(positions)["x"], expected[positions]):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


WAYS_TO_READ: dict[str, Any] = {
    "records, through a function": lambda path: list(
        headrace.Loader(path, batch_size=5, prefetch=0).map(lambda sample: {"x": sample["x"]})
    ),
    "groups of shards": lambda path: headrace.Loader(path, seq_len=64, batch_size=4, group_shards=4),
    "by number": lambda path: [record["x"][0] for record in headrace.open(path)],
    "all lengths": lambda path: headrace.open(path).lengths,
}


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize("read", WAYS_TO_READ.values(), ids=WAYS_TO_READ)
def test_nothing_keeps_more_parts_than_may_be(directory: Path, read: Any) -> None:
    gc.collect()
    before = mapped_shards(directory)
    kept = read(directory)
    gc.collect()
    assert mapped_shards(directory) - before <= 2 * MOST
    del kept


@pytest.mark.usefixtures("few_parts")
def test_a_shard_that_several_plans_use_is_mapped_once(directory: Path) -> None:
    """Maps are counted, not files: plans that are ahead pin most shards, again and again."""
    shards = len(headrace.open(directory).source.part_records)
    loader = headrace.Loader(directory, seq_len=64, batch_size=4, epochs=3)
    most = 0
    for _ in loader:
        lines = Path("/proc/self/maps").read_text().splitlines()
        most = max(most, sum(f"{directory}/shard-" in line for line in lines))
    assert MOST < most <= shards


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize("step", range(4))
def test_an_interrupt_while_parts_are_let_go_of_harms_nothing(directory: Path, step: int) -> None:
    """After any line of it: as Ctrl-C may come there, and as a fork may find it."""
    expected = headrace.Loader(directory, batch_size=4, seed=3).rows(range(40))["x"]
    rows = headrace.Loader(directory, batch_size=4, seed=3).rows
    code = PartTable._forget.__code__
    lines = sorted({line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno})

    def interrupt(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == lines[step]:
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            rows(range(40))
    finally:
        sys.settrace(None)
    np.testing.assert_array_equal(rows(range(40))["x"], expected)


@pytest.mark.usefixtures("few_parts")
def test_a_damaged_index_is_an_error_that_says_so(directory: Path, tmp_path: Path) -> None:
    copied = tmp_path / "data"
    shutil.copytree(directory, copied)
    source = headrace.open(copied).source
    (index,) = copied.glob("index-*")
    order = source.length_table("tokens").order
    content = bytearray(index.read_bytes())
    place = bytes(content).index(order.tobytes())
    content[place + order.nbytes - 1] = 1
    index.write_bytes(content)
    with pytest.raises(CorruptError, match="run `headrace verify`"):
        list(headrace.Loader(copied, seq_len=64, batch_size=4, packing="pad", prefetch=0))
