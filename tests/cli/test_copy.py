"""`headrace copy` as users see it."""

import json
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import headrace
from headrace.store.address import open_store
from headrace.store.store import write_file
from tests.cli.commands import run_here
from tests.fault_proxy import Hold
from tests.samples import tree

DEADLINE_SECONDS = 90


@pytest.fixture
def data(tmp_path):
    with headrace.Writer(tmp_path / "data", fields={"x": "int64"}, shard_bytes=800) as writer:
        for first in range(0, 500, 100):
            writer.write_columns({"x": np.arange(first, first + 100)})
    return tmp_path / "data"


def test_up_down_and_again(data, s3_place, tmp_path):
    done = run_here("copy", data, s3_place)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first.startswith(f"{s3_place}: 500 records in 7 files, ")
    assert second.startswith("copied and checked 7 files, ")
    assert third == f"next: headrace inspect {s3_place}"
    assert run_here("copy", s3_place, tmp_path / "back").returncode == 0
    assert tree(tmp_path / "back") == tree(data)
    again = run_here("copy", data, s3_place)
    assert again.stdout.startswith(f"{s3_place} is up to date: 7 files, ")
    assert again.stdout.endswith(" (sizes compared; --verify reads them)\n")
    assert run_here("copy", data, s3_place, "--verify").stdout.endswith(" (verified)\n")


def test_a_copy_that_lacks_only_its_manifest(data, s3_place):
    run_here("copy", data, s3_place)
    open_store(s3_place).remove("headrace.json")
    lines = run_here("copy", data, s3_place).stdout.splitlines()
    assert lines[1:] == ["7 of 7 files were there already", f"next: headrace inspect {s3_place}"]


def test_a_copy_is_repaired_from_a_good_one(data, s3_place):
    """As `headrace verify` advises."""
    run_here("copy", data, s3_place)
    there = open_store(s3_place)
    missing, damaged = sorted(file for file in there.files() if file.startswith("shard-"))[:2]
    content = there.read(damaged)
    there.remove(missing)
    there.remove(damaged)
    write_file(there, damaged, [content[:-1], b"?"])
    verified = run_here("verify", s3_place)
    assert verified.returncode == 1
    assert (
        f"damaged  {missing}: {s3_place}/{missing}: is missing, although the manifest names it"
        in verified.stdout
    )
    advice = f"for example with `headrace copy GOOD {s3_place} --verify`"
    assert advice in verified.stdout
    done = run_here("copy", data, s3_place, "--verify")
    assert "copied and checked 2 files" in done.stdout
    assert run_here("verify", s3_place).returncode == 0


def test_as_json(data, tmp_path):
    done = run_here("copy", data, tmp_path / "copy", "--json")
    document = json.loads(done.stdout)
    del document["seconds"], document["bytes"], document["copied_bytes"]
    assert document == {
        "source": str(data),
        "destination": str(tmp_path / "copy"),
        "records": 500,
        "files": 7,
        "copied_files": 7,
        "previous_bytes": 0,
        "is_changed": True,
    }


def test_refusals_name_the_option(data, tmp_path):
    with headrace.Writer(tmp_path / "copy", fields={"x": "int64"}) as writer:
        writer.write({"x": 1})
    done = run_here("copy", data, tmp_path / "copy")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"headrace: {tmp_path / 'copy'}: holds another dataset; choose another place, or use --replace\n"
    )
    done = run_here("copy", data, tmp_path / "copy", "--replace")
    assert (done.returncode, done.stderr) == (0, "")
    assert "of the dataset before are kept for its readers" in done.stdout
    assert "would be gone" in run_here("copy", data, "memory://x").stderr


def test_ctrl_c_leaves_what_the_same_command_continues(data, s3_place, fault_proxy):
    release = threading.Event()
    fault_proxy.add(Hold(release), method="PUT", path="index-")
    there = open_store(s3_place)
    command = [sys.executable, "-m", "headrace", "copy", str(data), s3_place]
    copying = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while len(there.files()) < 6:
            assert time.monotonic() < deadline
            assert copying.poll() is None
            time.sleep(0.02)
        copying.send_signal(signal.SIGINT)
        release.set()
        stdout, stderr = copying.communicate(timeout=DEADLINE_SECONDS)
    finally:
        copying.kill()
        copying.communicate()
    assert (copying.returncode, stdout) == (130, "")
    assert stderr == "headrace: stopped; what was copied is kept, and the same command continues the copy\n"
    assert not there.has("headrace.json")
    done = run_here("copy", data, s3_place)
    assert re.search(r"(6|7) of 7 files were there already", done.stdout)
    assert {file: there.read(file) for file in there.files()} == {
        path.name: path.read_bytes() for path in data.iterdir()
    }
