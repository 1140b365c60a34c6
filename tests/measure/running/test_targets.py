"""A target is a dataset's directory or `module:function`, and a setting that would have no effect is refused."""

from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import SettingsError, TargetError
from headrace.measure.running.knobs import knobs_of
from headrace.measure.running.targets import Target, find_target


def test_a_directory_is_a_loader_of_its_tokens(data: Path) -> None:
    loader = find_target(str(data), {"batch_size": 4, "seq_len": 128, "num_workers": 1}).make()
    assert isinstance(loader, headrace.Loader)
    assert (loader.settings.batch_size, loader.settings.seq_len, loader.settings.workers) == (4, 128, 1)
    assert next(iter(loader))["tokens"].shape == (4, 128)


def test_a_setting_that_no_loader_has_is_refused(data: Path) -> None:
    with pytest.raises(SettingsError, match="btach_size"):
        Target(name=str(data), settings={"seq_len": 64, "btach_size": 4}).make()


def test_a_setting_without_effect_is_refused(targets: str) -> None:
    with pytest.raises(SettingsError, match=r"num_workers: .*:plain has no such parameter"):
        find_target(f"{targets}:plain", {"num_workers": 2}).make()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "ValueError: no such bucket"),
        ("not_a_loader", "returned int"),
        ("missing", "has no 'missing'"),
        ("Rows.missing", "no such dataset"),
    ],
)
def test_bad_functions_are_told(targets: str, name: str, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        find_target(f"{targets}:{name}", {}).make()


def test_a_module_that_is_not_there_is_told() -> None:
    with pytest.raises(
        TargetError, match="there is no module 'no_such_module_anywhere' in .*, and none is installed$"
    ):
        find_target("no_such_module_anywhere:make", {}).make()
    with pytest.raises(TargetError, match="no such dataset"):
        find_target("no/such/data", {})


def test_a_part_of_a_dataset_is_its_first_records(data: Path) -> None:
    whole = headrace.open(data)
    for size, count in ((0.5, 450), (1, 900), (10, 10), (400, 400)):
        loader = Target(
            name=str(data), settings={"dataset_size": size, "seq_len": 64, "packing": "pad"}
        ).make(epochs=1, batch_size=1, shuffle="none", overlong="truncate")
        assert loader.rows_per_epoch == count
    part = Target(name=str(data), settings={"dataset_size": 450}).make(batch_size=1, seq_len=64, epochs=1)
    seen = np.sort(np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in part]))
    expected = np.sort(np.concatenate([whole[i]["tokens"] for i in range(450)]))
    np.testing.assert_array_equal(seen, expected)
    with pytest.raises(SettingsError, match="dataset_size=0"):
        Target(name=str(data), settings={"dataset_size": 0}).make()


def test_no_workers_of_a_dataset_make_batches_in_the_loop(data: Path) -> None:
    loader = Target(name=str(data), settings={"seq_len": 64, "num_workers": 0}).make()
    assert loader.settings.prefetch == 0
    assert next(iter(loader))["tokens"].shape == (32, 64)


def test_fields_come_from_the_command_line_as_one_text(data: Path) -> None:
    settings = {"seq_len": 64, "batch_size": 4, "fields": "tokens, labels"}
    batch = next(iter(Target(name=str(data), settings=settings).make()))
    assert list(batch.keys()) == ["tokens", "labels"]


def test_a_script_is_found_by_its_path(targets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a_script_elsewhere.py").write_text("def plain():\n    return [1, 2, 3]\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(find_target(f"{tmp_path}/a_script_elsewhere.py:plain", {}).make()) == 3


def test_what_can_be_iterated_by_number_is_a_loader() -> None:
    class Numbered:
        def __getitem__(self, index: int) -> int:
            return [1, 2][index]

    assert list(Target(name="numbered", function=Numbered).make()) == [1, 2]


def test_what_can_be_tuned(data: Path, targets: str) -> None:
    target = find_target(str(data), {"seq_len": 64})
    knobs = knobs_of(target, target.make())
    assert (knobs.count, knobs.kind, knobs.depth, knobs.batch) == ("workers", None, "prefetch", "batch_size")
    target = find_target(f"{targets}:sleeping", {})
    knobs = knobs_of(target, target.make())
    assert (knobs.count, knobs.kind, knobs.depth) == ("num_workers", None, None)
    assert knobs.now == {"num_workers": 0, "batch_size": 4}
    target = find_target(f"{targets}:plain", {})
    knobs = knobs_of(target, target.make())
    assert (knobs.count, knobs.depth, knobs.batch) == (None, None, None)


def test_a_number_of_workers_that_a_loader_finds_out_can_be_tuned_too(data: Path) -> None:
    def make(workers: int | None = None) -> headrace.Loader:
        return headrace.Loader(data, seq_len=64, batch_size=4, workers=workers)

    target = Target(name="make", function=make)
    knobs = knobs_of(target, target.make())
    assert (knobs.count, knobs.kind) == ("workers", None)
    assert knobs.now == {"workers": None}
