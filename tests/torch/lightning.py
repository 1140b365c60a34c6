"""A callback for PyTorch Lightning, as the documentation has it."""

from typing import Any


def loader_state(lightning: Any, loader: Any) -> Any:
    """The callback of docs/loader.md."""

    class LoaderState(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            checkpoint["loader"] = loader.state_dict()

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            loader.load_state_dict(checkpoint["loader"])

    return LoaderState()
