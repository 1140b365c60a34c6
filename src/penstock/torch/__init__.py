"""PyTorch: tensors, device placement, the drop-in DataLoader, masks."""

from penstock.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError("penstock.torch needs PyTorch: pip install penstock[torch]") from error

from penstock.torch.dataloader import DataLoader
from penstock.torch.loader import Loader
from penstock.torch.masks import (
    attention_mask,
    block_mask,
    mask_from_segments,
    mask_mod_from_segments,
    segments_from_tokens,
)
from penstock.torch.rows import RowDataset

__all__ = [
    "DataLoader",
    "Loader",
    "RowDataset",
    "attention_mask",
    "block_mask",
    "mask_from_segments",
    "mask_mod_from_segments",
    "segments_from_tokens",
]
