"""Servers on a real Ray cluster of two nodes, in a network namespace of its own; prints what came out as JSON.

    python -m tests.serve.ray_scenarios FOLDER

There Ray uses 127.0.0.1, and nothing of it reaches beyond.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.ingest.ray_scenarios import enter_namespace

NAME = "lots"
MODULE = """
    import time
    import headrace

    def slow(sample):
        time.sleep(0.01)
        return sample

    def make_loader(epochs=1):
        return headrace.Loader("data", batch_size=4, seed=3, epochs=epochs).map(slow)
"""


def main() -> None:
    try:
        enter_namespace()
    except OSError as error:
        print(json.dumps({"impossible": str(error)}))
        return
    os.chdir(sys.argv[1])
    # Without the token of the user's own cluster.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    prepare()
    print(json.dumps(Scenarios().run()))


def prepare() -> None:
    import headrace

    Path("numbers.csv").write_text("\n".join(["x", *map(str, range(200))]))
    headrace.build("numbers.csv", "data", columns=["x"])
    Path("slow_loader.py").write_text(textwrap.dedent(MODULE))
    sys.path.insert(0, os.getcwd())


class Scenarios:
    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # The head has no processors, so that servers run on the other nodes.
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(2):
            self.cluster.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = self.cluster.address

    def run(self) -> dict[str, Any]:
        found = {
            "actor killed": self.actor_killed(),
            "no such function": self.no_such_function(),
            "autoscale": self.autoscale(),
        }
        self.cluster.shutdown()
        return found

    def actor_killed(self) -> dict[str, Any]:
        """Two clients go on while one of two servers is killed; the command cannot be started twice."""
        import headrace

        with self.serving("--replicas", "2", "--set", "epochs=6") as server:
            remote = headrace.RemoteLoader(f"ray:{NAME}")
            from_file = headrace.RemoteLoader(f"file://{Path('servers').absolute()}")
            _wait_until(lambda: len(listed()) == 2)
            before = listed()
            again = self.command("--replicas", "1", "--addresses-file", "others")
            refused = subprocess.run(again, capture_output=True, text=True)
            batches: dict[str, list[Any]] = {"ray": [], "file": []}
            for number, (one, other) in enumerate(zip(remote, from_file, strict=True)):
                batches["ray"].append(one["x"].tolist())
                batches["file"].append(other["x"].tolist())
                if number == 20:
                    kill_actor(f"{NAME}/1")
            _wait_until(lambda: len(listed()) == 2 and listed() != before)
            after = listed()
            # Clients look every few seconds.
            meets_both = _wait_until(lambda: set(after) <= set(remote.stats().servers))
            ended = end(server)
            for loader in (remote, from_file):
                loader.close()
        return {
            **batches,
            "refused": refused.stderr,
            "kept": len(set(before) & set(after)),
            "meets both": meets_both,
            "ended": ended,
            "listed": listed(),
        }

    def no_such_function(self) -> dict[str, Any]:
        command = self.command("--replicas", "2", target="slow_loader:make_nothing")
        ran = subprocess.run(command, capture_output=True, text=True)
        return {"code": ran.returncode, "said": ran.stderr}

    def autoscale(self) -> dict[str, Any]:
        """A loop that only waits gets a second server, and that one ends when nobody asks any more."""
        import headrace

        most = 0
        with self.serving("--autoscale", "1:2", "--set", "epochs=100") as server:
            remote = headrace.RemoteLoader(f"ray:{NAME}")
            batches = []
            for batch in remote:
                batches.append(batch["x"].tolist())
                most = max(most, len(listed()))
                if most == 2 and len(remote.servers.fleet().stats()) == 2:
                    break
            remote.close()
            fewer = _wait_until(lambda: len(listed()) == 1)
            ended = end(server)
        return {"batches": batches, "most": most, "fewer": fewer, "ended": ended}

    def command(self, *options: str, target: str = "slow_loader:make_loader") -> list[str]:
        run = [sys.executable, "-m", "headrace", "serve", target, "--engine", "ray", "--name", NAME]
        return [*run, "--drain-seconds", "5", *options]

    @contextlib.contextmanager
    def serving(self, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
        command = self.command("--addresses-file", "servers", *options)
        server = subprocess.Popen(command, stdout=sys.stderr)
        try:
            _wait_until(lambda: Path("servers").exists() and bool(listed()))
            yield server
        finally:
            server.kill()
            server.wait()


def end(server: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """What SIGTERM leaves."""
    server.send_signal(signal.SIGTERM)
    code = server.wait()
    return {"code": code, "left": not _wait_until(lambda: not _fronts())}


def listed() -> list[str]:
    lines = Path("servers").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def kill_actor(name: str) -> None:
    """In a process of its own: this one stays a client that knows nothing of Ray."""
    program = (
        "import ray; ray.init(address='auto', logging_level='ERROR', log_to_driver=False); "
        f"ray.kill(ray.get_actor({name!r}, namespace='headrace'), no_restart=False)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=sys.stderr)


def _fronts() -> list[int]:
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error, OSError):
            is_here = os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net")
            if is_here and "headrace.serve.ray.front" in (process.info["cmdline"] or []):
                found.append(process.pid)
    return found


def _wait_until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    main()
