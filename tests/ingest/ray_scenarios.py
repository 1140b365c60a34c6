"""Builds on a real Ray, in a network namespace of its own, one after the other; prints what came out as JSON.

    python -m tests.ingest.ray_scenarios FOLDER cluster      several nodes, which come and go
    python -m tests.ingest.ray_scenarios FOLDER alone        a Ray that a build starts itself, and a bucket

There Ray uses 127.0.0.1, and nothing of it reaches beyond.
"""

import contextlib
import ctypes
import fcntl
import gzip
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1
_FAST_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
"""Ray takes longer by default to notice that a node is gone."""
TEXTS = {"tokenizer": "bytes", "shard_bytes": 4096}


def enter_namespace() -> None:
    """A network of this process and its children alone, whose loopback is up. An OSError if that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK) and libc.unshare(_NEW_USER | _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        enter_namespace()
    except OSError as error:
        print(json.dumps({"impossible": str(error)}))
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found = Scenarios(folder).run() if sys.argv[2] == "cluster" else alone(folder)
    print(json.dumps(found))


def alone(folder: Path) -> dict[str, Any]:
    """A build into a bucket by a Ray that it starts itself, and which ends with it."""
    import headrace
    from tests.s3_server import BUCKET, shared_server

    with shared_server(folder) as server:
        os.environ.update(server.environment())
        place = f"s3://{BUCKET}/built"
        report = headrace.build(folder / "texts", place, engine="ray", workers=2, shuffle=True, **TEXTS)
        headrace.copy(place, folder / "from-bucket")
    ended = _wait_until(lambda: not _processes_named("ray::", "raylet"))
    return {"built": report.built, "ended": ended, "parts": parts_on_a_cluster_with_a_token(folder)}


def parts_on_a_cluster_with_a_token(folder: Path) -> list[int]:
    """What a user begins with `ray start` asks for a token, which Ray makes and keeps in the home directory."""
    home = folder / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home)}
    # Ray has set it in this process, for the cluster before.
    environment.pop("RAY_AUTH_MODE", None)
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = "start --head --num-cpus=2 --include-dashboard=false --port=6379 --node-ip-address=127.0.0.1"
    build = [
        sys.executable,
        "-m",
        "headrace",
        "build",
        str(folder / "texts"),
        "--out",
        str(folder / "parts-ray"),
    ]
    build += ["--tokenizer", "bytes", "--shard-size", "4096"]
    on_ray = ["--engine", "ray", "--address", "127.0.0.1:6379"]
    steps = [["--part", "0/2", *on_ray], ["--part", "1/2", *on_ray], ["--finish"]]
    subprocess.run([*ray, *head.split()], env=environment, check=True, stdout=subprocess.DEVNULL)
    try:
        return [
            subprocess.run([*build, *step], env=environment, stdout=sys.stderr).returncode for step in steps
        ]
    finally:
        subprocess.run([*ray, "stop", "--force"], env=environment, check=True, stdout=subprocess.DEVNULL)


class Scenarios:
    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        # The head has no processors, so that jobs run on the nodes that are added and removed.
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _FAST_HEALTH_CHECKS}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def run(self) -> dict[str, Any]:
        nodes = [self.cluster.add_node(num_cpus=1) for _ in range(2)]
        found = {"node killed": self.node_killed(nodes[0])}
        found["shuffled records"] = self.shuffled_records()
        found["interrupted"] = self.interrupted()
        found["other place"] = self.other_place()
        self.cluster.remove_node(nodes[1], allow_graceful=False)
        found_first = os.pathsep.join([str(self.folder / "broken"), os.environ.get("PYTHONPATH", "")])
        self.cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": found_first})
        found["no tokenizer library"] = self.no_tokenizer_library()
        self.cluster.shutdown()
        return found

    def build(self, inputs: str, out: str, **options: Any) -> Any:
        import headrace

        return headrace.build(
            self.folder / inputs, self.folder / out, engine="ray", address=self.cluster.address, **options
        )

    def node_killed(self, node: Any) -> dict[str, Any]:
        """A node dies when the first tasks are done."""
        seen: list[Any] = []

        def progress(now: Any) -> None:
            is_due = now.stage == "reading" and now.finished_tasks == 2 and not any(seen)
            seen.append(is_due)
            if is_due:
                self.cluster.remove_node(node, allow_graceful=False)

        report = self.build("texts", "texts-ray", progress=progress, **TEXTS)
        again = self.build("texts", "texts-ray", **TEXTS)
        return {"built": report.built, "killed": any(seen), "again": again.built}

    def shuffled_records(self) -> dict[str, Any]:
        """One task has hundreds of files with long names, so that its outcome is long."""
        last: list[Any] = []
        report = self.build(
            "tables", "tables-ray", shuffle=True, seed=3, progress=last.append, columns=["x", "name"]
        )
        shares = [now.input_bytes / max(1, now.total_bytes) for now in last]
        return {"records": report.records, "most_done": max(shares), "bad": report.bad_count}

    def interrupted(self) -> dict[str, Any]:
        """Ctrl-C in the middle of a task that goes on for long."""
        began: list[int] = []

        def progress(now: Any) -> None:
            began.append(now.input_bytes)
            if now.records:
                raise KeyboardInterrupt

        path = self.folder / "long" / "long.txt.gz"
        path.parent.mkdir()
        path.write_bytes(gzip.compress(b"water falls and a turbine turns\n" * 2**23, 1))
        try:
            self.build("long", "long-ray", split="line", progress=progress, **{**TEXTS, "shard_bytes": 2**28})
        except KeyboardInterrupt:
            is_interrupted = True
        has_ended = _wait_until(lambda: not _processes_named("ray::headrace build"))
        left = list((self.folder / "long-ray").glob("shard-*"))
        return {"interrupted": is_interrupted, "jobs_ended": has_ended, "shards": len(left)}

    def other_place(self) -> dict[str, Any]:
        """A node that sees another output under the same name: here, one that loses the mark before the job looks."""
        from headrace.ingest import ray_engine

        @contextlib.contextmanager
        def no_probe(store: Any) -> Any:
            store.create()
            yield "probe-that-is-not-there"

        kept, ray_engine._probe_in = ray_engine._probe_in, no_probe
        try:
            return self.failure(lambda: self.build("texts", "texts-elsewhere", **TEXTS))
        finally:
            ray_engine._probe_in = kept

    def no_tokenizer_library(self) -> dict[str, Any]:
        tokenizer = str(self.folder / "tokenizer.json")
        return self.failure(lambda: self.build("texts", "texts-broken", tokenizer=tokenizer))

    def failure(self, build: Callable[[], Any]) -> dict[str, Any]:
        from headrace.errors import HeadraceError

        try:
            build()
        except HeadraceError as error:
            return {"kind": type(error).__name__, "message": str(error)}
        return {"kind": None, "message": "it did not fail"}


def _processes_named(*beginnings: str) -> list[int]:
    """Processes of this namespace. Ray names its workers after what they do."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        name = os.path.basename((process.info["cmdline"] or [""])[0])
        if name.startswith(beginnings) and _is_in_this_namespace(process):
            found.append(process.pid)
    return found


def _is_in_this_namespace(process: Any) -> bool:
    """Other tests may run clusters of their own, in other namespaces."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net")
    return False


def _wait_until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    main()
