"""What many tests share: a way to write a dataset of given records, and a way to damage one credibly."""

import gc
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from headrace.format.fields import Field, FieldKind, parse_fields
from headrace.format.finish import finish_dataset
from headrace.format.manifest import Manifest
from headrace.format.ragged import Ragged
from headrace.format.shard import Column, ShardBuilder
from headrace.store.local import LocalStore
from tests.fault_proxy import FaultProxy
from tests.properties import examples
from tests.s3_server import BUCKET, S3Server, shared_server

Record = Mapping[str, Any]

# Hypothesis times each example, and the drawing of examples, by the clock: on a busy machine every property would fail.
hypothesis_settings.register_profile(
    "without a clock",
    examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
hypothesis_settings.load_profile("without a clock")

# A shell without job control starts its background jobs deaf to Ctrl-C, and every process below them inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """First come the tests that fork most: what a fork costs grows with all that other tests import."""
    if not config.pluginmanager.has_plugin("randomly"):
        items.sort(key=lambda item: not item.nodeid.startswith("tests/torch/dataloader"))


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector need not look at it again, here and in every fork."""
    gc.collect()
    gc.freeze()


def as_columns(fields: Mapping[str, Field], records: Sequence[Record]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for name, field in fields.items():
        items = [record[name] for record in records]
        if field.kind is FieldKind.BYTES:
            columns[name] = Ragged.from_items([np.frombuffer(item, np.uint8) for item in items], np.uint8)
        elif field.variable:
            arrays = [np.asarray(item, field.numpy_dtype).reshape(len(item), *field.shape) for item in items]
            columns[name] = Ragged.from_items(arrays, field.numpy_dtype, field.shape)
        else:
            columns[name] = np.array(items, field.numpy_dtype).reshape(len(items), *field.shape)
    return columns


def write_dataset_at(
    directory: Path, notations: Mapping[str, str], shards: Iterable[Sequence[Record]], **extra: Any
) -> Manifest:
    """Write a dataset with the library's own writer; each item of `shards` is the records of one shard."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = parse_fields(notations)
    entries = []
    for records in shards:
        builder = ShardBuilder(fields)
        builder.append(as_columns(fields, records))
        entries.append(builder.write(LocalStore(directory)))
    return finish_dataset(LocalStore(directory), fields, entries, "headrace tests", **extra)


def reseal_at(directory: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Make every checksum and size right again after a test changed files; `edit` changes the manifest."""
    path = directory / "headrace.json"
    body = json.loads(path.read_bytes())
    for stored in (*body["shards"], body["index"], *body["further"]):
        file = directory / stored["file"]
        if file.exists():
            content = file.read_bytes()
            stored["bytes"], stored["checksum"] = len(content), xxhash.xxh3_128_hexdigest(content)
            stored["header_bytes"] = 64 + int.from_bytes(content[12:16], "little")
            stored["header_checksum"] = xxhash.xxh3_64_hexdigest(content[: stored["header_bytes"]])
    if edit:
        edit(body)
    body.pop("checksum", None)
    rest = json.dumps(body)[1:].encode()
    path.write_bytes(b'{"checksum": "' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n' + rest)


@pytest.fixture(scope="session")
def write_dataset() -> Callable[..., Manifest]:
    return write_dataset_at


@pytest.fixture(scope="session")
def reseal() -> Callable[..., None]:
    return reseal_at


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    """For child processes: a crash shows its stack, and no thread pools take address space."""
    return {**os.environ, "PYTHONFAULTHANDLER": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server, which all processes of a test run share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with shared_server(folder) as server:
        yield server


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Server:
    """The environment says where the server is, and nothing of this machine's own settings; nothing is cached."""
    monkeypatch.setenv("HEADRACE_CACHE", "off")
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    return s3_server


@pytest.fixture
def s3_place(s3_environment: S3Server) -> str:
    """The address of a prefix that nobody else uses."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def fault_proxy(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, which the environment names instead of it."""
    with FaultProxy(s3_environment.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def start_program(
    tmp_path: Path, child_environment: dict[str, str]
) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Runs a script that can import the tests' helpers, in a process group of its own."""
    programs = []

    def start(code: str, **options: Any) -> "subprocess.Popen[str]":
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        path = os.pathsep.join([str(Path(__file__).parents[1]), child_environment.get("PYTHONPATH", "")])
        program = subprocess.Popen(
            [sys.executable, "-W", "error", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**child_environment, "PYTHONPATH": path},
            start_new_session=True,
            **options,
        )
        programs.append(program)
        return program

    yield start
    for program in programs:
        if program.returncode is None:
            # Nobody has asked for its exit code, so that no other group can have its number.
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
