"""PyTorch: tensors, device placement, the drop-in DataLoader, masks.

Names are imported on first use: a worker process needs few of them, and so starts faster.
"""

import importlib
from typing import TYPE_CHECKING, Any

from headrace.errors import MissingExtraError, how_to_install

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError(f"headrace.torch needs PyTorch: {how_to_install('torch')}") from error

if TYPE_CHECKING:
    from headrace.torch.dataloader import DataLoader as DataLoader
    from headrace.torch.loader import Loader as Loader
    from headrace.torch.masks import attention_mask as attention_mask
    from headrace.torch.masks import block_mask as block_mask
    from headrace.torch.masks import mask_from_segments as mask_from_segments
    from headrace.torch.masks import mask_mod_from_segments as mask_mod_from_segments
    from headrace.torch.masks import segments_from_tokens as segments_from_tokens
    from headrace.torch.remote_loader import RemoteLoader as RemoteLoader
    from headrace.torch.rows import RowDataset as RowDataset

_HOMES = {
    "DataLoader": "dataloader",
    "Loader": "loader",
    "RemoteLoader": "remote_loader",
    "RowDataset": "rows",
    "attention_mask": "masks",
    "block_mask": "masks",
    "mask_from_segments": "masks",
    "mask_mod_from_segments": "masks",
    "segments_from_tokens": "masks",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
