"""One run of a loop, on a clock that the test holds: what is counted, and what becomes of loaders that misbehave."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError, TargetError
from headrace.measure import clock
from headrace.measure.running.quantiles import quantiles
from headrace.measure.running.run import Plan, Run, measure
from headrace.measure.running.steps import Step

BATCH = {"tokens": np.zeros((4, 8), np.int64)}

pytestmark = pytest.mark.usefixtures("held")


def _run(loader: Any, step: Step | None = None, **plan: Any) -> Run:
    return measure(lambda: loader, step or Step(), Plan(**{"seconds": 0.2, **plan}))


def test_what_a_batch_holds_is_counted() -> None:
    run = _run([BATCH] * 30, batches=20)
    assert (run.batches, run.samples, run.tokens, run.bytes) == (20, 80, 640, 20 * 256)
    assert run.complete
    assert run.epochs == 0


@pytest.mark.parametrize(
    ("used", "bytes_a_token"), [((), 8), (("labels",), 8 + 8), (("labels", "loss_mask"), 8 + 8 + 1)]
)
def test_of_a_loaders_batches_what_the_step_uses_is_counted(
    data: Path, used: tuple[str, ...], bytes_a_token: int
) -> None:
    loader = headrace.Loader(data, seq_len=64, batch_size=4, epochs=None, prefetch=0)
    run = _run(loader, Step(function=lambda batch: [batch[name] for name in used]), batches=20, warmup=1)
    assert run.bytes == 20 * 4 * 64 * bytes_a_token


def test_what_looking_at_a_batch_takes_is_no_part_of_the_loops_time(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.measure.running.contents.padding_share", lambda *_: clock.sleep(1.0))
    loader = headrace.Loader(data, seq_len=64, batch_size=4, epochs=None, prefetch=0)
    run = _run(loader, Step(function=lambda batch: clock.sleep(0.25)), batches=4)
    assert run.seconds == pytest.approx(4 * 0.25, abs=0.01)


def test_a_loader_that_ends_is_begun_again() -> None:
    run = _run([BATCH] * 10, batches=25)
    assert run.batches == 25
    assert run.epochs == 2


class Slow:
    """Every batch takes 5 ms."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            clock.sleep(0.005)
            yield BATCH


def about(value: float) -> Any:
    """Looking at the clock takes a little too."""
    return pytest.approx(value, rel=0.01)


def test_waiting_and_computing_make_the_step() -> None:
    run = _run(Slow(), Step(compute_ms=10), batches=10)
    assert run.seconds == about(10 * 0.015)
    assert run.wait_ms == {name: about(5) for name in run.wait_ms}
    assert run.step_ms == {name: about(15) for name in run.step_ms}
    assert run.wait_share == about(5 / 15)
    assert run.utilisation == about(10 / 15)
    assert run.headroom == about(5 / 15)
    assert run.series == {"wait_ms": [about(5)] * 10, "step_ms": [about(15)] * 10}


def test_it_counts_for_as_long_as_it_was_told() -> None:
    run = _run(Slow(), Step(compute_ms=5), seconds=2.0)
    assert run.seconds == about(2.0)
    assert run.batches == about(200)


def test_the_first_batches_do_not_count() -> None:
    def slow_start() -> Iterator[Any]:
        for number in range(100):
            clock.sleep(0.1 if number < 2 else 0.001)
            yield BATCH

    run = _run(slow_start(), batches=10, warmup=2)
    assert run.first_batch_seconds == about(0.1)
    assert run.wait_ms["max"] == about(1)


def test_a_real_step_is_timed() -> None:
    seen = []

    def step(batch: Any) -> None:
        seen.append(batch)
        clock.sleep(0.002)

    run = _run([BATCH] * 100, Step(function=step), batches=5)
    assert run.compute_seconds == about(0.01)
    assert run.utilisation == about(1)
    # Those of the warm-up, those that count, and those of the headroom.
    assert len(seen) >= 3 + 5 + 3


def test_loaders_that_misbehave() -> None:
    with pytest.raises(TargetError, match="no batch"):
        _run([])
    ended = _run(iter([BATCH] * 10))
    assert ended.batches == 7
    assert "ended after 10 batches" in ended.notes[0]
    short = _run(iter([BATCH] * 2))
    assert short.batches == 0
    assert "ended after 2" in short.notes[0]
    changing = _run([np.zeros((4, 2)), np.zeros((3, 2))] * 50, batches=10)
    assert changing.samples == 35
    assert changing.batch_samples == (3, 4)
    assert "3 to 4 samples" in changing.notes[0]


def test_what_fails_on_the_way_is_told_with_what_was_measured() -> None:
    def failing() -> Iterator[Any]:
        yield from [BATCH] * 10
        raise OSError("disk gone")

    told: list[Run] = []
    with pytest.raises(TargetError, match="after 10 batches: OSError: disk gone"):
        measure(failing, Step(), Plan(), told.append)
    assert told[0].batches == 7

    def bad_step(batch: Any) -> None:
        raise RuntimeError("loss is nan")

    with pytest.raises(TargetError, match="the step .*bad_step failed: RuntimeError: loss is nan"):
        _run([BATCH] * 10, Step(function=bad_step))


def test_a_step_may_take_things_out_of_its_batch() -> None:
    def step(batch: Any) -> None:
        batch.pop("tokens")
        clock.sleep(0.001)

    class Fresh:
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield dict(BATCH)

    run = _run(Fresh(), Step(function=step), batches=5)
    assert run.headroom is not None
    assert run.notes == []


def test_headroom_that_cannot_be_measured_is_a_note() -> None:
    calls = 0

    def step(batch: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise RuntimeError("no more")
        clock.sleep(0.001)

    run = _run([BATCH] * 100, Step(function=step), batches=5)
    assert run.complete
    assert run.headroom is None
    assert "headroom was not measured" in run.notes[0]


def test_telling_is_no_part_of_the_loop() -> None:
    told = 0

    def tell(run: Run) -> None:
        nonlocal told
        told += 1
        clock.sleep(0.2)

    run = measure(Slow, Step(), Plan(batches=400), tell)
    assert told > 3
    assert run.wait_ms["max"] == about(5)
    assert run.seconds == about(400 * 0.005)


def test_looking_for_padding_is_no_part_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "headrace.measure.running.contents.padding_share", lambda batch, pad_id: clock.sleep(0.3)
    )
    assert _run(Slow(), batches=10).seconds == about(10 * 0.005)


def test_ctrl_c_leaves_what_was_measured() -> None:
    told: list[Run] = []

    def interrupted() -> Iterator[Any]:
        yield from [BATCH] * 10
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(interrupted, Step(), Plan(), told.append)
    assert told[0].batches == 7
    assert told[0].wait_ms


def test_headraces_own_loader_tells_its_stages_and_its_padding() -> None:
    documents = [np.ones(length, np.uint16) for length in range(1, 100)]
    dataset = headrace.from_arrays({"tokens": documents})
    loader = headrace.Loader(dataset, seq_len=100, batch_size=4, packing="pad", epochs=None)
    run = _run(loader, batches=10)
    assert run.stats is not None
    assert run.stats["batches"] == 10
    assert "gather" in run.stats["stages"]
    assert run.padding == pytest.approx(1 - sum(range(1, 100)) / 9900)
    assert run.truncation == 0
    truncated = headrace.Loader(
        dataset, seq_len=50, batch_size=4, packing="pad", overlong="truncate", epochs=None
    )
    assert (_run(truncated, batches=5).truncation or 0) > 0.1


def test_padding_of_other_loaders_is_seen_in_their_masks() -> None:
    mask = np.ones((4, 8), np.int64)
    mask[:, 6:] = 0
    run = _run([{"input_ids": np.zeros((4, 8)), "attention_mask": mask}] * 10, batches=5)
    assert run.padding == 0.25
    assert run.truncation is None


def test_padding_is_looked_for_in_the_first_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they do not tell: it reads the whole batch."""
    looked: list[Any] = []
    monkeypatch.setattr(
        "headrace.measure.running.contents.padding_share", lambda batch, pad_id: looked.append(batch)
    )
    run = _run([BATCH] * 200, batches=100)
    assert run.padding is None
    assert 0 < len(looked) < 50


def test_settings_are_checked() -> None:
    for wrong in ({"seconds": 0}, {"batches": 0}, {"warmup": 0}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            Plan(**wrong)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="give only one of them"):
        Step(compute_ms=1, name="a:b")
    with pytest.raises(SettingsError, match="compute_ms=-1"):
        Step(compute_ms=-1)


def test_quantiles_are_values_that_were_measured() -> None:
    found = quantiles(np.array([1.0, 2.0, 3.0, 100.0]))
    assert (found["p50"], found["p99"], found["max"]) == (3.0, 100.0, 100.0)
    assert quantiles(np.array([])) == {}


def test_a_failure_in_the_warm_up_is_not_taken_for_an_end() -> None:
    def failing() -> Iterator[Any]:
        yield BATCH
        raise OSError("disk gone")

    told: list[Run] = []
    with pytest.raises(TargetError, match="after 1 batch: OSError"):
        measure(failing, Step(), Plan(), told.append)
    assert told[-1].notes == []
    assert "the loader ended after 1 batch" in _run(iter([BATCH]), warmup=1).notes[0]


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_connection_to_a_worker_that_breaks_is_explained(error: Exception) -> None:
    """This may be all that PyTorch says when one of its workers was killed."""

    def failing() -> Iterator[Any]:
        yield from [BATCH] * 5
        raise error

    said = f"after 5 batches: {type(error).__name__}.*a worker process of the loader has probably died"
    with pytest.raises(TargetError, match=said):
        measure(failing, Step(), Plan())
