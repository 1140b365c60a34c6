"""Trainers around `headrace.torch.Loader`: every row once per epoch, also after a crash at any step."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

import headrace
from headrace.torch import Loader
from tests.torch.lightning import loader_state

ROWS, BATCH, EPOCHS = 22, 4, 3
STEPS = ROWS // BATCH
"""Batches in an epoch; two rows are too few for another one."""


def make_loader(**options: Any) -> Loader:
    data = headrace.from_arrays({"x": np.arange(ROWS, dtype=np.float32)})
    return Loader(data, batch_size=BATCH, seed=2, rank=0, world_size=1, **options)


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch["x"]]


def uninterrupted() -> list[list[int]]:
    """The batches of a plain loop over all epochs."""
    loader = make_loader()
    return [numbers(batch) for _ in range(EPOCHS) for batch in loader]


class GoneError(Exception):
    """The machine went away."""


@pytest.mark.filterwarnings("ignore")
class TestLightning:
    @pytest.fixture
    def lightning(self) -> Any:
        return pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")

    def _fit(
        self,
        lightning: Any,
        folder: Path,
        *,
        crash_after: int | None = None,
        resume: bool = False,
        **options: Any,
    ) -> Any:
        class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)
                self.epochs: dict[int, list[list[int]]] = {}
                self.validated: list[list[int]] = []

            def training_step(self, batch: Any, _: int) -> Any:
                self.epochs.setdefault(self.current_epoch, []).append(numbers(batch))
                return self.layer(batch["x"][:, None]).sum()

            def validation_step(self, batch: Any, _: int) -> None:
                self.validated.append(numbers(batch))

            def on_train_batch_end(self, *_: Any) -> None:
                if crash_after == sum(map(len, self.epochs.values())):
                    self.trainer.save_checkpoint(folder / "last.ckpt")
                    raise GoneError

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        model = Model()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        loader, evaluation = options.pop("loader", None), options.pop("evaluation", None)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            **quiet,
            **{"max_epochs": EPOCHS, "enable_checkpointing": False, **options},
        )
        resumed = {"ckpt_path": folder / "last.ckpt", "weights_only": False} if resume else {}
        try:
            trainer.fit(model, loader or make_loader(), evaluation, **resumed)
        except GoneError:
            assert crash_after is not None
        return model

    def test_every_epoch_is_a_whole_one_in_another_order(self, lightning: Any, tmp_path: Path) -> None:
        epochs = self._fit(lightning, tmp_path).epochs
        assert [len(epoch) for epoch in epochs.values()] == [STEPS] * EPOCHS
        assert [batch for epoch in epochs.values() for batch in epoch] == uninterrupted()

    @pytest.mark.parametrize("crash_after", [1, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS, EPOCHS * STEPS - 1])
    def test_a_crash_after_any_step_loses_and_repeats_nothing(
        self, lightning: Any, tmp_path: Path, crash_after: int
    ) -> None:
        before = self._fit(lightning, tmp_path, crash_after=crash_after).epochs
        after = self._fit(lightning, tmp_path, resume=True).epochs
        seen = [batch for epochs in (before, after) for epoch in epochs.values() for batch in epoch]
        assert seen == uninterrupted()
        for epoch in range(EPOCHS):
            assert len(before.get(epoch, [])) + len(after.get(epoch, [])) == STEPS

    @pytest.mark.parametrize("whole_epochs", [1, 2])
    def test_the_epoch_after_a_checkpoint_between_epochs_is_the_next(
        self, lightning: Any, tmp_path: Path, whole_epochs: int
    ) -> None:
        """Lightning's checkpoints are made there by default, and it does not load the Loader's state from them."""
        saving = {"callbacks": [self._checkpoint(tmp_path)], "enable_checkpointing": True}
        before = self._fit(lightning, tmp_path, max_epochs=whole_epochs, **saving).epochs
        after = self._fit(lightning, tmp_path, resume=True).epochs
        seen = [batch for epochs in (before, after) for epoch in epochs.values() for batch in epoch]
        assert seen == uninterrupted()

    def test_a_callback_keeps_the_place_in_epochs_that_are_cut_short(
        self, lightning: Any, tmp_path: Path
    ) -> None:
        limited = {"limit_train_batches": 2, "enable_checkpointing": True}
        loaders = [make_loader(), make_loader()]
        before, after = (
            self._fit(
                lightning,
                tmp_path,
                loader=loader,
                callbacks=[loader_state(lightning, loader), self._checkpoint(tmp_path)],
                max_epochs=1 if loader is loaders[0] else 3,
                resume=loader is loaders[1],
                **limited,
            ).epochs
            for loader in loaders
        )
        seen = [batch for epochs in (before, after) for epoch in epochs.values() for batch in epoch]
        assert seen == uninterrupted()[: len(seen)]
        assert len(seen) == STEPS

    def _checkpoint(self, folder: Path) -> Any:
        from pytorch_lightning.callbacks import ModelCheckpoint

        return ModelCheckpoint(dirpath=folder, filename="last", enable_version_counter=False)

    def test_a_limit_goes_on_with_the_rows_that_have_not_come(self, lightning: Any, tmp_path: Path) -> None:
        epochs = self._fit(lightning, tmp_path, limit_train_batches=2, max_epochs=4).epochs
        seen = [batch for epoch in epochs.values() for batch in epoch]
        assert seen == uninterrupted()[: len(seen)]
        assert len(seen) >= STEPS

    def test_validation_sees_the_same_batches_each_time(self, lightning: Any, tmp_path: Path) -> None:
        options = {"evaluation": make_loader(restart=True, shuffle=False), "limit_val_batches": 3}
        model = self._fit(lightning, tmp_path, num_sanity_val_steps=2, **options)
        wanted = [numbers(batch) for batch in islice(make_loader(shuffle=False), 3)]
        assert model.validated == wanted[:2] + wanted * EPOCHS


@pytest.mark.filterwarnings("ignore")
class TestAccelerate:
    @pytest.mark.parametrize("stop_after", [1, STEPS, STEPS + 2])
    def test_its_checkpoints_hold_the_place_in_the_stream(self, tmp_path: Path, stop_after: int) -> None:
        accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

        def prepared() -> tuple[Any, Any]:
            accelerator = accelerate.Accelerator(cpu=True)
            loader = accelerator.prepare(make_loader())
            accelerator.register_for_checkpointing(loader)
            return accelerator, loader

        accelerator, loader = prepared()
        seen: list[list[int]] = []
        while len(seen) < stop_after:
            seen += [numbers(batch) for batch in islice(loader, stop_after - len(seen))]
        accelerator.save_state(str(tmp_path / "state"))
        accelerator, loader = prepared()
        accelerator.load_state(str(tmp_path / "state"))
        seen += [numbers(batch) for _ in range(loader.epoch, EPOCHS) for batch in loader]
        assert seen == uninterrupted()


def hugging_face_trainer(
    folder: Path, seen: list[list[int]], crash_after: int | None = None
) -> Callable[..., Any]:
    """`train` of a Trainer whose batches come from a Loader, and whose checkpoints hold the Loader's state."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from transformers.trainer_callback import ExportableState

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any) -> dict[str, Any]:
            seen.append([int(number) for number in x])
            return {"loss": self.layer(x[:, None]).sum()}

    class LoaderState(transformers.TrainerCallback, ExportableState):  # type: ignore[misc, name-defined]
        loader: Loader | None = None
        saved: Any = None

        def state(self) -> dict[str, Any]:
            saved = self.loader.state_dict() if self.loader is not None else None
            return {"args": {}, "attributes": {"saved": saved}}

        def on_train_begin(self, *_: Any, train_dataloader: Loader, **__: Any) -> None:
            self.loader = train_dataloader
            if self.saved is not None:
                train_dataloader.load_state_dict(self.saved)

        def on_save(self, *_: Any, **__: Any) -> None:
            if crash_after == len(seen):
                raise GoneError

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return loader

    loader = make_loader()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        save_strategy="steps" if crash_after else "no",
        save_steps=crash_after or 500,
        ignore_data_skip=True,
        restore_callback_states_from_checkpoint=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(model=Model(), args=arguments, callbacks=[LoaderState()]).train


@pytest.mark.filterwarnings("ignore")
class TestHuggingFace:
    def test_every_epoch_is_a_whole_one_in_another_order(self, tmp_path: Path) -> None:
        seen: list[list[int]] = []
        hugging_face_trainer(tmp_path, seen)()
        assert seen == uninterrupted()

    @pytest.mark.parametrize("crash_after", [1, STEPS - 1, STEPS, STEPS + 2])
    def test_a_crash_after_any_step_loses_and_repeats_nothing(self, tmp_path: Path, crash_after: int) -> None:
        seen: list[list[int]] = []
        with pytest.raises(GoneError):
            hugging_face_trainer(tmp_path, seen, crash_after)()
        hugging_face_trainer(tmp_path, seen)(resume_from_checkpoint=True)
        assert seen == uninterrupted()
