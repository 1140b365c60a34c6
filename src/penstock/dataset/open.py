"""`penstock.open`: find out what lies at a path and open it."""

import os
from pathlib import Path

from penstock.dataset.dataset import Dataset
from penstock.dataset.directory import DirectorySource


def open_dataset(path: str | os.PathLike[str], *, in_memory: bool = False) -> Dataset:
    """Open a dataset: reads the manifest, checks sizes and headers, and maps files as they are touched.

    `in_memory=True` reads everything into RAM first, for data that fits.
    """
    return Dataset(DirectorySource(str(Path(path)), in_memory))
