"""What `headrace doctor` sees in PyTorch's DataLoaders."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch's DataLoader")

from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace.measure.doctor.examined import look_at
from headrace.measure.doctor.loaders import facts_of
from headrace.observe import host
from headrace.observe.findings import NotLooked

pytestmark = pytest.mark.usefixtures("machine")


class Images(Dataset):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        self.samples = [(str(file), 0) for file in sorted(folder.iterdir())]
        self.split, self.here = "train", "."

    def __len__(self) -> int:
        return len(self.samples)


class Lines(IterableDataset):  # type: ignore[misc]
    def __init__(self, *files: Path) -> None:
        self.files = list(files)

    def __iter__(self) -> Iterator[str]:
        return iter(())


def test_facts_of_a_dataloader(data: Path) -> None:
    found = facts_of(DataLoader(Images(data), shuffle=True))
    assert found.random_order
    assert sorted(found.files) == sorted(str(each) for each in data.iterdir())


def test_an_iterable_over_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 1000)
    loader = DataLoader(Lines(tmp_path / "a.txt"))
    assert len(look_at(facts_of(loader))["streamed"]) == 1
    assert isinstance(look_at(facts_of(DataLoader(Lines())))["streamed"], NotLooked)
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    assert look_at(facts_of(loader))["streamed"] == []
