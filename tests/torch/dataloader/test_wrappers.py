"""What people put around a DataLoader takes this one: Lightning, Accelerate, Hugging Face's Trainer, ranks."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch.utils.data import DistributedSampler, TensorDataset

from headrace.torch import DataLoader
from tests.torch.dataloader import state_datasets as data
from tests.torch.leftovers import is_alive, wait_until
from tests.torch.lightning import loader_state

LENGTH = 37


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(data.Numbers(LENGTH), **{"batch_size": 4, "shuffle": True, **options})


@pytest.mark.filterwarnings("ignore")
class TestLightning:
    @pytest.fixture
    def lightning(self) -> Any:
        return pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")

    def _model(self, lightning: Any, stop_after: int | None = None, save_to: Path | None = None) -> Any:
        class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.seen = torch.nn.Linear(1, 1), []

            def training_step(self, batch: Any, _: int) -> Any:
                self.seen.append(batch.tolist())
                return self.layer(batch[:, None].float()).sum()

            def on_train_batch_end(self, *_: Any) -> None:
                if stop_after == len(self.seen):
                    self.trainer.save_checkpoint(save_to)
                    raise RuntimeError("the machine goes away")

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        return Model()

    def _trainer(self, lightning: Any, folder: Path, **options: Any) -> Any:
        return lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            **options,
        )

    @pytest.mark.parametrize("worker_kind", ["process", "thread"])
    def test_it_trains_with_all_the_data_in_every_epoch(
        self, lightning: Any, tmp_path: Path, worker_kind: str
    ) -> None:
        model = self._model(lightning)
        loader = _loader(num_workers=2, worker_kind=worker_kind, persistent_workers=True)
        self._trainer(lightning, tmp_path, max_epochs=2).fit(model, loader)
        numbers = [number for batch in model.seen for number in batch]
        assert sorted(numbers[:LENGTH]) == sorted(numbers[LENGTH:]) == list(range(LENGTH))

    def test_its_checkpoint_holds_the_place_in_the_epoch(self, lightning: Any, tmp_path: Path) -> None:
        numbers = self._seen_over_a_restart(lightning, tmp_path, after_steps=4, epochs=1)
        assert sorted(numbers) == list(range(LENGTH))

    @pytest.mark.parametrize("step", [9, 10], ids=["before the last step", "at the last step"])
    def test_no_epoch_is_lost_or_repeated_after_a_checkpoint_at_its_end(
        self, lightning: Any, tmp_path: Path, step: int
    ) -> None:
        """Lightning has not asked for the end of the loader by then, and begins the next epoch when it goes on."""
        numbers = self._seen_over_a_restart(lightning, tmp_path, after_steps=step, epochs=2)
        assert sorted(numbers[:LENGTH]) == sorted(numbers[LENGTH:]) == list(range(LENGTH))

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_callback_loads_the_state_of_a_checkpoint_between_epochs(
        self, lightning: Any, tmp_path: Path, num_workers: int
    ) -> None:
        """By itself, Lightning does not load it."""

        def seeded() -> DataLoader[Any]:
            return _loader(generator=torch.Generator().manual_seed(3), num_workers=num_workers)

        plain = seeded()
        uninterrupted = [batch.tolist() for _ in range(3) for batch in plain]
        loader, model = seeded(), self._model(lightning)
        trainer = self._trainer(
            lightning, tmp_path, max_epochs=1, callbacks=[loader_state(lightning, loader)]
        )
        trainer.fit(model, loader)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        loader, resumed = seeded(), self._model(lightning)
        trainer = self._trainer(
            lightning, tmp_path, max_epochs=3, callbacks=[loader_state(lightning, loader)]
        )
        trainer.fit(resumed, loader, ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
        assert model.seen + resumed.seen == uninterrupted

    def _seen_over_a_restart(self, lightning: Any, folder: Path, after_steps: int, epochs: int) -> list[int]:
        """What was trained on before and after the process was replaced by one that loads its checkpoint."""
        first = self._model(lightning, stop_after=after_steps, save_to=folder / "saved.ckpt")
        with pytest.raises(RuntimeError, match="goes away"):
            self._trainer(lightning, folder, max_epochs=epochs).fit(first, _loader())
        second = self._model(lightning)
        self._trainer(lightning, folder, max_epochs=epochs).fit(
            second, _loader(num_workers=2), ckpt_path=folder / "saved.ckpt", weights_only=False
        )
        return [number for batch in first.seen + second.seen for number in batch]

    def test_it_makes_another_of_the_same_kind(self, lightning: Any) -> None:
        from pytorch_lightning.utilities.data import _update_dataloader

        loader = _loader(num_workers=2, worker_kind="thread", snapshot_every_n_steps=5, prefetch_factor=3)
        sampler = DistributedSampler(loader.dataset, 2, 0)
        other = _update_dataloader(loader, sampler)
        assert type(other) is DataLoader
        assert (other.worker_kind, other.snapshot_every_n_steps, other.prefetch_factor) == ("thread", 5, 3)
        assert other.sampler is sampler
        assert sum(len(batch) for batch in other) == 19


@pytest.mark.filterwarnings("ignore")
def test_accelerate_prepares_it() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(_loader(num_workers=2))
    assert sorted(number for batch in prepared for number in batch.tolist()) == list(range(LENGTH))
    in_order = accelerator.prepare(_loader(shuffle=False))
    skipped = accelerator.skip_first_batches(in_order, 3)
    assert next(iter(skipped)).tolist() == [12, 13, 14, 15]


@pytest.mark.filterwarnings("ignore")
def test_hugging_faces_trainer_takes_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []  # type: tuple[Any, list[int]]

        def forward(self, x: Any) -> dict[str, Any]:
            self.seen += x.tolist()
            return {"loss": self.layer(x[:, None].float()).sum()}

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, 4, shuffle=True, num_workers=2, collate_fn=_as_x)
            return self.accelerator.prepare(loader)

    model = Model()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=TensorDataset(torch.arange(LENGTH))).train()
    assert sorted(model.seen) == sorted([*range(LENGTH), *range(LENGTH)])


def _as_x(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([sample[0] for sample in samples])}


_RANKS = """
    import json, os, sys
    import torch.distributed as dist
    from headrace.torch import DataLoader
    from tests.torch.dataloader.state_datasets import Numbers
    from torch.utils.data import DistributedSampler

    # Both have imported torch now.
    child = os.fork()
    rank, file = (0 if child else 1), sys.argv[1]
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
    dataset = Numbers(37)
    sampler = DistributedSampler(dataset, seed=5)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
    sampler.set_epoch(1)
    batches, mine = iter(loader), []
    for _ in range(2):
        mine += next(batches).tolist()
    state = loader.state_dict()
    del batches
    other_sampler = DistributedSampler(dataset, seed=5)
    other = DataLoader(dataset, batch_size=4, sampler=other_sampler, num_workers=1)
    other.load_state_dict(state)
    for batch in other:
        mine += batch.tolist()
        dist.barrier()
    everyone = [None, None]
    dist.all_gather_object(everyone, mine)
    dist.destroy_process_group()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print(json.dumps(everyone))
"""


def test_ranks_of_torch_distributed_share_an_epoch(tmp_path: Path, child_environment: dict[str, str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_RANKS), str(tmp_path / "meet")],
        env=child_environment,
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    first, second = json.loads(ran.stdout)
    assert len(first) == len(second) == 19
    # 37 over two ranks: one number comes twice, to make them equal.
    assert sorted(set(first) | set(second)) == list(range(37))


class Repeating:
    """A batch sampler without an end, as in ultralytics and timm."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Infinite(DataLoader[Any]):
    """Keeps one iterator for all epochs, and ends its workers by itself, as loaders of ultralytics and timm do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)

    def end(self) -> None:
        if not hasattr(self.iterator, "_workers"):
            return
        for worker in self.iterator._workers:
            if worker.is_alive():
                worker.terminate()
        self.iterator._shutdown_workers()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
@pytest.mark.parametrize(
    "way",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "pin_memory": True},
        {"num_workers": 2, "worker_kind": "thread"},
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
    ],
    ids=["in the loop", "fork", "pinned", "thread", "forkserver"],
)
def test_loaders_that_reach_for_the_workers_of_their_iterator(way: dict[str, Any]) -> None:
    loader = Infinite(list(range(10)), batch_size=4, **way)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    workers = list(getattr(loader.iterator, "_workers", []))
    assert len(workers) == (2 if way and way.get("worker_kind") != "thread" else 0)
    pids = [worker.pid for worker in workers]
    assert len({*pids, os.getpid()}) == 1 + len(workers)
    loader.end()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
