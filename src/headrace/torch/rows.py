"""Rows of one epoch by number, for a stock `torch.utils.data.DataLoader` with its samplers and workers.

    rows = headrace.torch.RowDataset("data", seq_len=2048)
    for batch in DataLoader(rows, batch_size=32, shuffle=True, num_workers=2):
        step(batch["tokens"], batch["labels"])

Item p is the row at position p of that epoch's stream. With `shuffle="none"` that is the order of storage, and the
DataLoader's sampler does the mixing; with `shuffle="global"` a DataLoader that goes from 0 on gets the
order of a `headrace.Loader` with the same settings, row for row.
"""

import operator
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from headrace.errors import SettingsError
from headrace.load.settings import LoaderSettings, parse_settings
from headrace.public import public
from headrace.rows.recipe import make_recipe
from headrace.rows.rows import Rows
from headrace.rows.settings import CuSeqlens, RowOptions
from headrace.torch.device import as_tensor

_ROW_FIELDS = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask")


class RowDataset(Dataset[dict[str, Any]]):  # type: ignore[misc]
    """Items are dicts of tensors: tokens, labels, position_ids, segment_ids and loss_mask; with `max_documents` also
    cu_seqlens, which has one size then, so that it can be stacked. Without `seq_len` they are the data's records."""

    @public
    def __init__(self, data: Any, *, epoch: int = 0, **options: Unpack[RowOptions]) -> None:
        """`data` is anything that a Loader takes. `shuffle` defaults to "none"."""
        self._rows = Rows(make_recipe(data, _settings(dict(options))), batch_size=1)
        # Workers that outlive an epoch must see it change: they share this one number.
        self._epoch: Tensor = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()
        self.set_epoch(epoch)
        _ = len(self)

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Switch to the rows of another epoch, also in running workers. Without a shuffle, all epochs are the same."""
        if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or epoch < 0:
            raise SettingsError(f"epoch={epoch!r}: must be a whole number of at least 0")
        self._epoch.fill_(int(epoch))

    def __len__(self) -> int:
        return self._rows.rows_per_epoch

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Many items at once, as a DataLoader asks for the rows of a batch."""
        positions = self.epoch * len(self) + np.array([self._checked(row) for row in rows], dtype=np.int64)
        if not len(positions):
            return []
        if self._rows.recipe.settings.seq_len is None:
            return [_record(sample) for sample in self._rows.recipe.samples(positions)]
        columns = self._rows(positions)
        tensors = {name: as_tensor(column) for name, column in columns.items()}
        return [{name: tensor[number] for name, tensor in tensors.items()} for number in range(len(rows))]

    def _checked(self, row: Any) -> int:
        number = operator.index(row)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} is out of range for an epoch of {len(self)} rows")
        return number % len(self)

    def __repr__(self) -> str:
        seq_len = self._rows.recipe.settings.seq_len
        kind = f"rows of {seq_len} tokens" if seq_len else "records"
        return f"RowDataset({len(self):,} {kind}, epoch {self.epoch})"


def _settings(options: dict[str, Any]) -> LoaderSettings:
    for name in options:
        if name not in RowOptions.__annotations__:
            known = ", ".join(sorted(RowOptions.__annotations__))
            raise SettingsError(f"{name}: a RowDataset has no such setting; the settings are epoch, {known}")
    chosen = {"batch_size": 1, "cu_seqlens": CuSeqlens.ROW, "shuffle": "none"} | options
    if chosen.get("seq_len") is None:
        del chosen["cu_seqlens"]
        return parse_settings(chosen)
    fixed = chosen.get("max_documents") is not None
    if chosen.get("fields") is None:
        chosen["fields"] = (*_ROW_FIELDS, "cu_seqlens") if fixed else _ROW_FIELDS
    settings = parse_settings(chosen)
    asked = settings.fields or ()
    if "max_seqlen" in asked:
        raise SettingsError(f"fields={asked}: max_seqlen belongs to a batch, not to a row; leave it out")
    if "cu_seqlens" in asked and not fixed:
        raise SettingsError(
            f"fields={asked}: cu_seqlens has a different size in every row, so it cannot be stacked; give max_documents"
        )
    return settings


def _record(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        name: as_tensor(np.asarray(value) if isinstance(value, np.generic) else value)
        for name, value in sample.items()
    }
