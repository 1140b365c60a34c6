"""Heavy image augmentation on servers: the training process only fetches finished batches.

    python examples/serve_images.py                      starts a server on this machine, and compares

or on several machines:

    headrace serve examples/serve_images.py:make_loader --port 9000 --host 0.0.0.0 --insecure        on all that augment
    python examples/serve_images.py grpc://cpu-1:9000 grpc://cpu-2:9000                     where the training runs

`--insecure` is for networks that are trusted; docs/serve.md says how to use TLS and a token instead.

The images are generated. Each is cropped at random, resized, flipped, and changed in brightness, contrast and colour:
several milliseconds of processor time an image. The random numbers depend on the row and the epoch alone, so the server
makes the very same images as a local Loader would:

    |                    | images/s | CPU time of the training process, ms an image |
    | a local Loader     |      ... |                                           ... |
    | a RemoteLoader     |      ... |                                           ... |
    all 32 batches are the same
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import headrace

SIDE, CROPPED = 128, 96
IMAGES, BATCH = 512, 16


class Images:
    """Generated pictures of coloured waves, one for each number."""

    fingerprint = f"waves-{SIDE}-{IMAGES}"

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, number: int) -> dict[str, Any]:
        y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
        waves = [
            np.sin(2 * np.pi * ((number % 7 + 1) * x + (number % 5) * y + shade / 3)) for shade in range(3)
        ]
        return {"image": np.uint8(127.5 * (1 + np.stack(waves, axis=-1))), "label": np.int64(number % 7)}


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A random crop, resized, perhaps mirrored, in other light and colours."""
    side = rng.uniform(0.5, 1.0) * (SIDE - 1)
    left, top = rng.uniform(0, SIDE - 1 - side, 2)
    picture = resized(sample["image"].astype(np.float32) / 255, left, top, side)
    if rng.random() < 0.5:
        picture = picture[:, ::-1]
    brightness, contrast, colour = rng.uniform(0.6, 1.4, 3)
    picture = (picture - picture.mean()) * contrast + picture.mean() * brightness
    grey = picture.mean(axis=-1, keepdims=True)
    picture = np.clip(grey + (picture - grey) * colour, 0, 1)
    return {"image": np.ascontiguousarray(picture.transpose(2, 0, 1), np.float32), "label": sample["label"]}


def resized(picture: NDArray[np.float32], left: float, top: float, side: float) -> NDArray[np.float32]:
    """The square of this side as CROPPED times CROPPED pixels, each a mean of the four nearest ones."""
    x, y = (first + np.linspace(0, side, CROPPED, dtype=np.float32) for first in (left, top))
    x0, y0 = np.minimum(x.astype(np.int64), SIDE - 2), np.minimum(y.astype(np.int64), SIDE - 2)
    right, down = (x - x0)[None, :, None], (y - y0)[:, None, None]
    corners = [picture[np.ix_(y0 + dy, x0 + dx)] for dy in (0, 1) for dx in (0, 1)]
    above = corners[0] * (1 - right) + corners[1] * right
    below = corners[2] * (1 - right) + corners[3] * right
    mixed: NDArray[np.float32] = above * (1 - down) + below * down
    return mixed


def make_loader() -> headrace.Loader:
    return headrace.Loader(Images(), batch_size=BATCH, seed=0).map(augment)


def measure(loader: headrace.Loader, batches: int) -> tuple[float, float, list[Any]]:
    """Images a second, CPU milliseconds of this process an image, and the batches."""
    iterator = iter(loader)
    kept = [next(iterator)]
    begun, cpu = time.perf_counter(), time.process_time()
    kept += [next(iterator) for _ in range(batches - 1)]
    images = BATCH * (batches - 1)
    return images / (time.perf_counter() - begun), 1e3 * (time.process_time() - cpu) / images, kept


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """A server on this machine, for the duration of the example."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "images.sock")
        command = [sys.executable, "-m", "headrace", "serve", f"{__file__}:make_loader", "--socket", address]
        with subprocess.Popen(command) as server:
            try:
                yield f"unix://{address}"
            finally:
                server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("addresses", nargs="*", help="where servers are; without any, one is started here")
    parser.add_argument("--batches", type=int, default=IMAGES // BATCH, help="how many batches to load")
    options = parser.parse_args()
    # The modules of the server and of this script have the same source, and so the same fingerprint.
    rate, cpu, expected = measure(make_loader(), options.batches)
    with contextlib.ExitStack() as stack:
        addresses = options.addresses or [stack.enter_context(own_server())]
        remote = headrace.RemoteLoader(addresses)
        remote_rate, remote_cpu, found = measure(remote, options.batches)
    print("|                    | images/s | CPU time of the training process, ms an image |")
    print(f"| a local Loader     | {rate:8.0f} | {cpu:45.2f} |")
    print(f"| a RemoteLoader     | {remote_rate:8.0f} | {remote_cpu:45.2f} |")
    same = all(
        np.array_equal(here[name], there[name])
        for here, there in zip(found, expected, strict=True)
        for name in ("image", "label")
    )
    assert same, "the batches differ"
    print(f"all {options.batches} batches are the same")


if __name__ == "__main__":
    main()
