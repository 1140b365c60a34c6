"""Copies of local datasets in a bucket."""

from pathlib import Path

from headrace.format.manifest import MANIFEST_NAME
from headrace.store.address import open_store


def upload(directory: Path, place: str) -> str:
    """Copy the files of a dataset to a place, the manifest last."""
    store = open_store(place)
    names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST_NAME)
    for name in (*names, MANIFEST_NAME):
        with store.pending(name) as pending:
            pending.file.write((directory / name).read_bytes())
    return place
