"""The same tokens and images for everybody who reads from a bucket, each in the format that its documentation advises.

tokens   rows of 2,049 tokens: `headrace/`, `mds/` and `litdata/` as in token_data.py; `parts/`: plain files of rows
images   records of 50,000 to 100,000 random bytes, as JPEG files have them: `headrace/`, `mds/`, `litdata/`, `tars/` in
         webdataset's format, and `files/`
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from token_data import SEQ_LEN, rows_of

ROWS_PER_PART = 4096
TAR_BYTES = 32 * 2**20
SMALLEST_IMAGE, LARGEST_IMAGE = 50_000, 100_000


def write_parts(folder: Path) -> None:
    """Tokens as plain binary files of 17 MB."""
    rows = rows_of(folder)
    (folder / "parts").mkdir()
    for number, first in enumerate(range(0, len(rows), ROWS_PER_PART)):
        rows[first : first + ROWS_PER_PART].tofile(folder / "parts" / f"{number:05d}.bin")


def rows_in(content: bytes) -> Any:
    return np.frombuffer(content, np.uint16).reshape(-1, SEQ_LEN)


def make_images(folder: Path, images: int) -> None:
    """Headrace's dataset, from which all others are written."""
    from headrace import Writer

    random = np.random.default_rng(0)
    with Writer(folder / "headrace", {"image": "bytes", "label": "int64"}) as writer:
        for number in range(images):
            size = int(random.integers(SMALLEST_IMAGE, LARGEST_IMAGE))
            writer.write({"image": random.bytes(size), "label": number})


def _images_of(folder: Path) -> Iterator[tuple[bytes, int]]:
    import headrace

    for record in headrace.open(folder / "headrace"):
        yield bytes(record["image"]), int(record["label"])


def write_image_mds(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"image": "bytes", "label": "int"}) as writer:
        for image, label in _images_of(folder):
            writer.write({"image": image, "label": label})


def litdata_images(folder: str) -> Iterator[dict[str, Any]]:
    for image, label in _images_of(Path(folder)):
        yield {"image": image, "label": label}


def write_image_litdata(folder: Path) -> None:
    import litdata

    litdata.optimize(
        fn=litdata_images,
        inputs=[str(folder)],
        output_dir=str(folder / "litdata"),
        chunk_bytes="64MB",
        num_workers=1,
        verbose=False,
    )


def write_image_tars(folder: Path) -> None:
    import webdataset as wds

    (folder / "tars").mkdir()
    pattern = str(folder / "tars" / "%05d.tar")
    with wds.ShardWriter(pattern, maxcount=10**9, maxsize=TAR_BYTES, verbose=0) as writer:
        for image, label in _images_of(folder):
            writer.write({"__key__": f"{label:08d}", "jpg": image})


def write_image_files(folder: Path) -> None:
    (folder / "files").mkdir()
    for image, label in _images_of(folder):
        (folder / "files" / f"{label:08d}.jpg").write_bytes(image)


def upload(folder: Path, bucket: str, prefix: str, environment: dict[str, str]) -> None:
    """All files of a folder, as any tool would upload them; a manifest or an index comes last."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        bucket,
        prefix=prefix,
        endpoint=environment["AWS_ENDPOINT_URL"],
        region=environment["AWS_REGION"],
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.suffix == ".json"):
        obstore.put(store, str(path.relative_to(folder)), path)
