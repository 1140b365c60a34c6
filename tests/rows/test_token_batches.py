"""The arrays of a batch against arrays made in plain Python; plans that do not depend on who asks when."""

import random
import threading
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.errors import SettingsError
from headrace.load.settings import LoaderSettings
from headrace.order.mixture import Stages
from headrace.order.steps import Steps
from headrace.order.stream import RowStream
from headrace.order.world import World
from headrace.pack.packing import Packing
from headrace.rows import token_batches
from headrace.rows.buffers import BufferPool
from headrace.rows.parts import PartTable
from headrace.rows.settings import TOKEN_FIELDS, CuSeqlens
from headrace.rows.token_batches import BatchPlan, Planner, TokenBatches, stretches_at
from headrace.rows.token_rows import DocumentRows, Stretches, TokenRows, WindowRows
from tests.properties import examples
from tests.rows.parts_in_ram import in_parts, next_tokens, read
from tests.workers.waiting import PATIENCE_SECONDS

Row = list[tuple[list[int], int | None]]
"""Pieces, each with the token that follows it in its document."""

LENGTHS = st.lists(st.lists(st.integers(0, 20), max_size=6), min_size=1, max_size=4).filter(
    lambda parts: sum(map(sum, parts)) >= 12
)


# The oracle


def naive_batch(rows: list[Row], settings: LoaderSettings) -> dict[str, Any]:
    """What a batch of those rows holds, place by place."""
    seq_len = settings.seq_len or 0
    names = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask")
    batch: dict[str, Any] = {name: [] for name in names}
    ends_of_rows = []
    for row in rows:
        made, ends = naive_row(row, settings)
        for name in names:
            assert len(made[name]) == seq_len
            batch[name].append(made[name])
        ends_of_rows.append(ends)
    batch |= naive_bounds(ends_of_rows, settings)
    stretches = [b - a for ends in ends_of_rows for a, b in zip([0, *ends], ends, strict=False)]
    batch["max_seqlen"] = max(stretches, default=0)
    return {name: batch[name] for name in TOKEN_FIELDS if name in (settings.token_fields)}


def naive_row(row: Row, settings: LoaderSettings) -> tuple[dict[str, list[Any]], list[int]]:
    """One row, and where its documents and its padding end."""
    seq_len, ignore = settings.seq_len or 0, settings.ignore_index
    out: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "labels", "position_ids", "segment_ids", "loss_mask")
    }
    ends = []
    for number, (piece, following) in enumerate(row, start=1):
        for place, token in enumerate(piece):
            if settings.labels == "unshifted":
                label = token if place else None
            else:
                label = piece[place + 1] if place + 1 < len(piece) else following
            out["tokens"].append(token)
            out["labels"].append(ignore if label is None else label)
            out["loss_mask"].append(label is not None)
            out["position_ids"].append(place)
            out["segment_ids"].append(number)
        ends.append(len(out["tokens"]))
    room = seq_len - len(out["tokens"])
    out["tokens"] += [settings.pad_id] * room
    out["labels"] += [ignore] * room
    out["loss_mask"] += [False] * room
    out["position_ids"] += list(range(room))
    out["segment_ids"] += [0] * room
    return out, ends + [seq_len] * (room > 0)


def naive_bounds(ends_of_rows: list[list[int]], settings: LoaderSettings) -> dict[str, Any]:
    seq_len, room = settings.seq_len or 0, settings.max_documents
    if settings.cu_seqlens == "batch":
        bounds = [0] + [row * seq_len + end for row, ends in enumerate(ends_of_rows) for end in ends]
        if room is not None:
            bounds += bounds[-1:] * (room + 1 - len(bounds))
        return {"cu_seqlens": bounds}
    most = max(map(len, ends_of_rows), default=0) if room is None else room
    return {"cu_seqlens": [[0, *ends] + [seq_len] * (most - len(ends)) for ends in ends_of_rows]}


def same(batch: dict[str, Any], wanted: dict[str, Any], settings: LoaderSettings) -> None:
    assert set(batch) == set(wanted)
    dtypes = {"segment_ids": "int32", "loss_mask": "bool", "cu_seqlens": "int32"}
    for name, value in batch.items():
        if name == "max_seqlen":
            assert value == wanted[name]
            assert type(value) is int
        else:
            assert value.tolist() == wanted[name], name
            assert value.dtype == dtypes.get(name, settings.dtype)


def rows_held(stretches: Stretches, count: int) -> list[Row]:
    pieces = read(stretches)
    following = iter(next_tokens(stretches))
    return [[(piece, next(following)) for piece in pieces.get(row, [])] for row in range(count)]


# The arrays


def token_rows(lengths: list[list[int]], settings: LoaderSettings) -> TokenRows:
    data, _ = in_parts(lengths)
    table = PartTable(data, "tokens")
    if settings.packing is Packing.WINDOWS:
        return WindowRows(table, settings.seq_len or 0, settings.boundaries, settings.align_documents)
    return DocumentRows(data, table, settings.seq_len or 0, settings.packing, settings.overlong)


OPTIONS = st.fixed_dictionaries(
    {
        "seq_len": st.integers(2, 12),
        "batch_size": st.integers(1, 5),
        "packing": st.sampled_from(["best-fit", "windows", "pad"]),
        "labels": st.sampled_from(["shifted", "unshifted"]),
        "dtype": st.sampled_from(["int32", "int64"]),
        "cu_seqlens": st.sampled_from(["batch", "row"]),
        "max_documents": st.none() | st.just(64),
        "pad_id": st.integers(0, 9),
        "ignore_index": st.sampled_from([-100, -1]),
        "shuffle": st.booleans(),
        "fields": st.none() | st.sets(st.sampled_from(TOKEN_FIELDS), min_size=1),
    }
)


def stream_over(sources: list[TokenRows], settings: LoaderSettings) -> RowStream:
    return RowStream(
        rows=tuple(source.rows for source in sources),
        stages=Stages.of([2] * len(sources)),
        shuffle=settings.shuffle,
        seed=settings.seed,
    )


@examples(30)
@given(LENGTHS, OPTIONS, st.integers(1, 3), st.booleans(), st.data())
def test_batches_are_those_of_plain_python(
    lengths: list[list[int]], options: dict[str, Any], size: int, drop_last: bool, data: st.DataObject
) -> None:
    chosen = LoaderSettings(**options)
    sources = [token_rows(lengths, chosen), token_rows(lengths[::-1], chosen)]
    stream = stream_over(sources, chosen)
    rank = data.draw(st.integers(0, size - 1))
    steps = Steps(
        start=data.draw(st.integers(0, 9)),
        stop=9 + 2 * sources[0].rows,
        batch_size=chosen.batch_size,
        world=World(rank, size),
        drop_last=drop_last,
    )
    make = TokenBatches(Planner(stream, sources, steps), chosen, BufferPool(keep=4))
    for step in range(steps.count or 0):
        first, last = steps.extent(step)
        rows = rows_held(stretches_at(stream, sources, np.arange(first, last)), last - first)
        same(make(step), naive_batch(rows, chosen), chosen)


@examples(25)
@given(LENGTHS, OPTIONS, st.integers(1, 9))
def test_batches_in_one_go_are_the_batches_one_by_one(
    lengths: list[list[int]], options: dict[str, Any], group: int
) -> None:
    chosen = LoaderSettings(**options)
    sources = [token_rows(lengths, chosen)]
    stream = stream_over(sources, chosen)
    steps = Steps(
        start=0, stop=5 * sources[0].rows + 1, batch_size=chosen.batch_size, world=World(), drop_last=False
    )
    alone, grouped = (
        TokenBatches(Planner(stream, sources, steps), chosen, BufferPool(keep=4)) for _ in range(2)
    )
    count = steps.count or 0
    together = [
        batch
        for first in range(0, count, group)
        for batch in grouped.many(range(first, min(first + group, count)))
    ]
    assert len(together) == count
    for step, batch in enumerate(together):
        wanted = alone(step)
        same(batch, {n: v if n == "max_seqlen" else v.tolist() for n, v in wanted.items()}, chosen)


@examples(25)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) >= 8),
    st.sampled_from(["shifted", "unshifted"]),
    st.integers(1, 4),
)
def test_a_loader_over_windows_is_all_tokens_joined_and_cut(
    lengths: list[int], labels: str, batch_size: int
) -> None:
    """From end to end, with rows that the oracle cuts itself."""
    _, documents = in_parts([lengths])
    data = headrace.from_arrays({"tokens": [np.array(each, dtype=np.uint16) for each in documents]})
    loader = headrace.Loader(
        data,
        seq_len=8,
        batch_size=batch_size,
        packing="windows",
        shuffle=False,
        drop_last=False,
        labels=labels,
    )
    owners = [(number, place) for number, each in enumerate(documents) for place in range(len(each))]
    rows: list[Row] = []
    for start in range(0, len(owners), 8):
        pieces: dict[int, list[int]] = {}
        for number, place in owners[start : start + 8]:
            pieces.setdefault(number, []).append(place)
        rows.append(
            [
                (
                    [documents[number][place] for place in places],
                    documents[number][places[-1] + 1] if places[-1] + 1 < len(documents[number]) else None,
                )
                for number, places in pieces.items()
            ]
        )
    batches = list(loader)
    assert len(batches) == -(-len(rows) // batch_size)
    for step, batch in enumerate(batches):
        wanted = naive_batch(rows[step * batch_size : (step + 1) * batch_size], loader.settings)
        same(dict(batch), wanted, loader.settings)


def test_a_rank_without_rows_in_the_last_step_gets_an_empty_batch() -> None:
    for cu_seqlens, most in (("batch", None), ("row", None), ("batch", 5), ("row", 5)):
        chosen = LoaderSettings(seq_len=4, batch_size=2, cu_seqlens=CuSeqlens(cu_seqlens), max_documents=most)
        sources = [token_rows([[4, 4, 4, 4, 4, 4, 4, 4, 4]], chosen)]
        steps = Steps(start=0, stop=9, batch_size=2, world=World(0, 4), drop_last=False)
        stream = stream_over(sources, chosen)
        batch = TokenBatches(Planner(stream, sources, steps), chosen, BufferPool(keep=2))(1)
        assert batch["tokens"].shape == (0, 4)
        assert batch["max_seqlen"] == 0
        wanted = naive_batch([], chosen)["cu_seqlens"]
        assert batch["cu_seqlens"].tolist() == wanted


@pytest.mark.parametrize("cu_seqlens", ["batch", "row"])
def test_more_documents_than_there_is_room_for_are_refused(cu_seqlens: str) -> None:
    chosen = LoaderSettings(seq_len=12, batch_size=2, cu_seqlens=CuSeqlens(cu_seqlens), max_documents=3)
    sources = [token_rows([[2] * 12], chosen)]
    steps = Steps(start=0, stop=2, batch_size=2, world=World(), drop_last=True)
    make = TokenBatches(Planner(stream_over(sources, chosen), sources, steps), chosen, BufferPool(keep=2))
    found = 12 if cu_seqlens == "batch" else 6
    with pytest.raises(SettingsError, match=f"max_documents=3: a batch has {found} segments"):
        make(0)


# Plans


def contents(plan: BatchPlan) -> tuple[int, list[list[int]]]:
    part = slice(plan.begin, plan.end)
    stretches = plan.stretches
    columns = (stretches.length, stretches.address, stretches.more, stretches.record, stretches.start)
    rows = (stretches.row[part] - plan.first_row).tolist()
    return plan.rows, [rows, *(column[part].tolist() for column in columns)]


class Plans:
    """A planner over some data, and what each of its plans must be."""

    def __init__(self, *, batch_size: int = 3, stop: int | None = 700, size: int = 1) -> None:
        chosen = LoaderSettings(seq_len=8, batch_size=batch_size)
        rng = random.Random(5)
        lengths = [[rng.randrange(14) for _ in range(20)] for _ in range(4)]
        self.sources = [token_rows(lengths, chosen), token_rows(lengths[:2], chosen)]
        self.stream = stream_over(self.sources, chosen)
        self.steps = Steps(
            start=5, stop=stop, batch_size=batch_size, world=World(size - 1, size), drop_last=False
        )
        self.count = self.steps.count or 200

    def planner(self) -> Planner:
        return Planner(self.stream, self.sources, self.steps)

    @cached_property
    def wanted(self) -> list[tuple[int, list[list[int]]]]:
        plans = []
        for step in range(self.count):
            first, last = self.steps.extent(step)
            stretches = stretches_at(self.stream, self.sources, np.arange(first, last))
            plans.append(contents(BatchPlan(stretches, 0, len(stretches.row), 0, last - first)))
        return plans


@pytest.fixture(scope="module")
def plans() -> Plans:
    return Plans()


@examples(10)
@given(seed=st.integers(0, 999), ahead=st.booleans())
def test_plans_do_not_depend_on_the_order_of_asking(plans: Plans, seed: int, ahead: bool) -> None:
    wanted, planner, rng = plans.wanted, plans.planner(), random.Random(seed)
    order = list(range(plans.count))
    rng.shuffle(order)
    for step in order[:40]:
        assert contents(planner.batch(step)) == wanted[step]
        if ahead and rng.random() < 0.5:
            planner.ahead()


@pytest.mark.parametrize("stop", [700, None])
@pytest.mark.parametrize("ahead", [True, False])
def test_plans_in_their_order_are_those_of_each_step(stop: int | None, ahead: bool) -> None:
    plans = Plans(stop=stop, size=3)
    planner = plans.planner()
    for step, wanted in enumerate(plans.wanted):
        assert contents(planner.batch(step)) == wanted
        if ahead:
            planner.ahead()
    for step, wanted in enumerate(plans.wanted):
        assert contents(planner.batch(step)) == wanted, "from the beginning again"


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))]
)
def test_threads_that_share_a_planner_get_the_right_plans(
    plans: Plans, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_batches, "_ROWS_PLANNED_AT_ONCE", 30)
    wanted, planner, failures = plans.wanted, plans.planner(), []
    todo = list(range(plans.count))[::-1]
    if seed % 2:
        random.Random(seed).shuffle(todo)

    def work(number: int) -> None:
        rng = random.Random(number)
        while True:
            try:
                step = todo.pop()
            except IndexError:
                return
            try:
                if contents(planner.batch(step)) != wanted[step]:
                    failures.append(f"step {step} differs")
            except Exception as error:
                failures.append(f"step {step}: {error!r}")
            if rng.random() < 0.5:
                planner.ahead()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_very_many_stretches_are_planned_in_smaller_parts(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_batches, "_STRETCHES_PLANNED_AT_ONCE", 20)
    planner = plans.planner()
    for step, wanted in enumerate(plans.wanted):
        assert contents(planner.batch(step)) == wanted
        planner.ahead()


def test_old_plans_are_let_go() -> None:
    planner = Plans(batch_size=512, stop=None).planner()
    for step in range(150):
        planner.batch(step)
        planner.ahead()
    assert len(planner._planned) <= 40


def test_a_failure_concerns_the_batch_it_belongs_to_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans()
    whole = plans.wanted
    real = token_batches.stretches_at
    bad = plans.steps.extent(20)[0]

    def failing(stream: Any, sources: Any, positions: Any) -> Stretches:
        if bad in positions:
            raise SettingsError("the twentieth")
        return real(stream, sources, positions)

    monkeypatch.setattr(token_batches, "stretches_at", failing)
    planner = plans.planner()
    outcomes: dict[int, str] = {}

    def work(steps: range) -> None:
        for step in steps:
            try:
                outcomes[step] = "right" if contents(planner.batch(step)) == whole[step] else "wrong"
            except SettingsError:
                outcomes[step] = "failed"

    threads = [threading.Thread(target=work, args=(range(first, 40, 3),)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert outcomes[20] == "failed"
    assert "wrong" not in outcomes.values()


def test_batches_before_a_damaged_one_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans()
    bad = plans.steps.extent(20)[0]
    real = token_batches.stretches_at

    def failing(stream: Any, sources: Any, positions: Any) -> Stretches:
        if bad in positions:
            raise SettingsError("the twentieth")
        return real(stream, sources, positions)

    monkeypatch.setattr(token_batches, "stretches_at", failing)
    planner = plans.planner()
    for step in range(20):
        planner.batch(step)
