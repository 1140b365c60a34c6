"""In a torch DataLoader, stock or ours: recognised, shared by workers and ranks, in another order each epoch."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset

import headrace
import headrace.torch
from headrace.errors import BadRecordsError
from tests.streams import files

pytestmark = [
    # Python 3.12 and later warn of forking where other threads run, as those of PyTorch do.
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch")
    files.write_jsonl(path / "a.jsonl", 60)
    files.write_jsonl(path / "b.jsonl", 33, "other")
    return path


def stream_of(folder: Path, **options: Any) -> Any:
    return headrace.stream(folder, fields=["n", "text"], **{"block_bytes": 150, "buffer": 16, **options})


def texts_of(loader: Any) -> list[str]:
    return [text for batch in loader for text in batch["text"]]


WANTED = sorted([*files.lines(60), *files.lines(33, "other")])


def test_it_is_an_iterable_dataset(folder: Path) -> None:
    assert isinstance(stream_of(folder), IterableDataset)
    assert isinstance(stream_of(folder).batch(2), IterableDataset)


def test_torch_may_be_imported_after_the_stream_was_made(folder: Path) -> None:
    """Before it, it is in all other tests."""
    program = (
        f"import headrace, copy\nstream = headrace.stream({str(folder)!r})\nassert isinstance(stream, type(stream))\n"
        "import torch.utils.data\nassert not isinstance(3, torch.utils.data.IterableDataset)\n"
        "loader = torch.utils.data.DataLoader(stream, batch_size=10)\n"
        "print(sum(len(batch['n']) for batch in loader), isinstance(stream, torch.utils.data.IterableDataset))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["93", "True"], done.stderr


@pytest.mark.parametrize(
    ("workers", "method", "world"),
    [
        (0, None, 1),
        (0, None, 3),
        (1, "fork", 2),
        (2, "fork", 1),
        (2, "fork", 2),
        (3, "fork", 2),
        (1, "spawn", 1),
        pytest.param(2, "spawn", 1, marks=pytest.mark.soak),
    ],
)
def test_workers_and_ranks_share_the_records(folder: Path, workers: int, method: Any, world: int) -> None:
    found = []
    for rank in range(world):
        stream = stream_of(folder, seed=3, rank=rank, world_size=world)
        found += texts_of(
            DataLoader(stream, batch_size=7, num_workers=workers, multiprocessing_context=method)
        )
    assert sorted(found) == WANTED


def test_more_workers_than_blocks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    loader = DataLoader(
        headrace.stream(tmp_path), batch_size=1, num_workers=4, multiprocessing_context="fork"
    )
    assert sorted(texts_of(loader)) == ["one", "two"]


def test_epochs_of_workers_differ(folder: Path) -> None:
    stream = stream_of(folder, seed=3)
    loader = DataLoader(stream, batch_size=7, num_workers=2, multiprocessing_context="fork")
    epochs = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        epochs.append(texts_of(loader))
    lasting = DataLoader(
        stream_of(folder, seed=3),
        batch_size=7,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    assert [texts_of(lasting) for _ in range(3)] == epochs
    assert len(set(map(tuple, epochs))) == 3
    assert [sorted(epoch) for epoch in epochs] == [WANTED] * 3


def test_batches_of_the_stream_become_tensors(folder: Path) -> None:
    stream = stream_of(folder, seed=3).tokenize("bytes").pack(32).batch(4, drop_last=True)
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
    batches = list(loader)
    assert batches
    for batch in batches:
        assert batch["tokens"].shape == batch["labels"].shape == (4, 32)
        assert batch["tokens"].dtype == torch.int64
        assert batch["loss_mask"].dtype == torch.bool


def test_what_goes_wrong_in_a_worker_is_told(tmp_path: Path) -> None:
    """By the way that torch sends errors: closing a DataLoader whose worker failed would take it five seconds."""
    (tmp_path / "a.jsonl").write_text('{"a": 1}\nbroken\n')
    try:
        list(DataLoader(headrace.stream(tmp_path)))
    except BadRecordsError:
        sent = pickle.dumps(ExceptionWrapper(where="in worker 0"))
    with pytest.raises(BadRecordsError, match="byte 9: not JSON"):
        pickle.loads(sent).reraise()


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_our_own_dataloader_shares_and_resumes(folder: Path, workers: str) -> None:
    def make() -> Any:
        options = {"num_workers": 2, "workers": workers, "persistent_workers": True}
        return headrace.torch.DataLoader(stream_of(folder, seed=3), batch_size=7, **options)

    loader = make()
    epochs = [texts_of(loader) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [WANTED, WANTED]
    assert epochs[0] != epochs[1]
    loader = make()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert texts_of(resumed) == texts_of(batches) == epochs[0][28:]
    assert texts_of(resumed) == epochs[1]
