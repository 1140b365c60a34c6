"""Several hosts on one machine: network namespaces with cables between them, which can be slow, lossy or cut.

    python -m tests.serve.hosts FOLDER

is the host that trains, and to be started by `Site`. It has a network and processes of its own: nothing of it reaches
beyond, and when it ends, the kernel ends all servers and takes away all namespaces, devices and addresses.

    training host 10.0.1.1 ---- cable ---- 10.0.1.2 first server
                  10.0.2.1 ---- cable ---- 10.0.2.2 second server, with TLS and a token
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import queue
import shutil
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import trustme

from tests.serve.cable import LONGEST_QUEUE, PACKET_BYTES, PERFECT, Quality
from tests.serve.servers import SECONDS, CommandServer

TARGET = "tests.serve.served:distant"
TOKEN = "a long token"
_NEW_NETWORK = 0x40000000
_SET_TUN, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


class ImpossibleError(Exception):
    """This machine does not permit it."""


class Site:
    """The training host, as tests see it: a process that runs their functions."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "errors"
        command = [*_in_namespaces(), sys.executable, "-W", "error", "-m", "tests.serve.hosts", str(folder)]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, function: "Callable[[Hosts], None]") -> None:
        """Call a function of a module over there; what it raises is raised here, as an AssertionError."""
        assert self._process.stdin is not None
        # If it is gone, the answer is why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{function.__module__}:{function.__name__}\n")
            self._process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        said = self._errors.read_text(errors="replace")[-5000:]
        if not line:
            code = self._process.wait()
            if said.startswith("unshare: "):
                raise ImpossibleError(f"namespaces cannot be made here: {said.strip()}")
            raise AssertionError(f"the training host has ended with code {code}: {said}")
        answer = json.loads(line)
        if "impossible" in answer:
            raise ImpossibleError(answer["impossible"])
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{said}")

    def close(self) -> None:
        """The end of its input is the end of it, and with it of all of its processes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(SECONDS)
        finally:
            self._process.kill()
            self._process.stdout.close()


def _in_namespaces() -> list[str]:
    """The first part of a command that runs in namespaces: its network, processes and mounts are its own."""
    if sys.platform != "linux":
        raise ImpossibleError("network namespaces are a thing of Linux")
    for program, package in (("unshare", "util-linux"), ("ip", "iproute2")):
        if shutil.which(program) is None:
            raise ImpossibleError(f"there is no `{program}` here: it is in the package {package}")
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return command if os.geteuid() == 0 else [*command, "--map-root-user"]


# On the training host


class Wire(Protocol):
    def become(self, quality: Quality) -> None:
        """Be like this from now on."""

    def lost(self) -> int:
        """How many packets were lost so far."""


class Hosts:
    """The hosts of servers, as the training host sees them: their addresses and their cables."""

    def __init__(self, folder: Path) -> None:
        (folder / "token").write_text(TOKEN)
        self.roots = folder / "roots.pem"
        self.plain, self.secured = "grpc://10.0.1.2:9000", "grpc+tls://10.0.2.2:9000"
        run("ip", "link", "set", "lo", "up")
        wire = NetemWire if has_netem() else TunWire
        self._namespaces = [new_namespace() for _ in self.addresses]
        wires = [wire(number, namespace) for number, namespace in enumerate(self._namespaces, start=1)]
        self._wires: dict[str, Wire] = dict(zip(self.addresses, wires, strict=True))
        options = [["--insecure"], _secure_options(folder, self.roots, "10.0.2.2")]
        self._servers = [
            start_server(number, namespace, *chosen)
            for number, (namespace, chosen) in enumerate(zip(self._namespaces, options, strict=True), start=1)
        ]
        for server in self._servers:
            server.wait_for("(grpc\\S*://)")

    @property
    def addresses(self) -> list[str]:
        return [self.plain, self.secured]

    def become(self, quality: Quality, *addresses: str) -> None:
        """Change the cables of these hosts, or of all."""
        for address in addresses or self.addresses:
            self._wires[address].become(quality)

    def lost(self, *addresses: str) -> int:
        """How many packets the cables of these hosts have lost so far."""
        return sum(self._wires[address].lost() for address in addresses)


def _secure_options(folder: Path, roots: Path, host: str) -> list[str]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(roots)
    issued = authority.issue_cert(host)
    issued.cert_chain_pems[0].write_to_path(folder / "server.pem")
    issued.private_key_pem.write_to_path(folder / "server.key")
    options = ["--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")]
    return [*options, "--token-file", str(folder / "token")]


def start_server(number: int, namespace: int, *options: str) -> CommandServer:
    with inside(namespace):
        return CommandServer(
            TARGET, "--host", f"10.0.{number}.2", "--port", "9000", "--workers", "1", *options
        )


# Namespaces

_libc = ctypes.CDLL(None, use_errno=True)


def _check(code: int, what: str) -> None:
    if code:
        raise ImpossibleError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _here() -> int:
    """The network of this thread, which lives as long as the descriptor."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_namespace() -> int:
    home = _here()
    _check(_libc.unshare(_NEW_NETWORK), "unshare")
    try:
        run("ip", "link", "set", "lo", "up")
        return _here()
    finally:
        _check(_libc.setns(home, _NEW_NETWORK), "setns")
        os.close(home)


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """This thread, and what it starts, is on another host for a while."""
    home = _here()
    _check(_libc.setns(namespace, _NEW_NETWORK), "setns")
    try:
        yield
    finally:
        _check(_libc.setns(home, _NEW_NETWORK), "setns")
        os.close(home)


def run(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise ImpossibleError(f"{' '.join(command)}: {ran.stderr.strip()}")
    return ran.stdout


def _set_up(device: str, own: str, peer: str) -> None:
    run("ip", "address", "add", own, "peer", peer, "dev", device)
    # Every packet is one of its own, and not many at once.
    run("ip", "link", "set", device, "mtu", str(PACKET_BYTES), "gso_max_segs", "1", "up")


# Cables


def has_netem() -> bool:
    """Whether this kernel can delay and lose packets itself. It often cannot."""
    try:
        run("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        run("tc", "qdisc", "delete", "dev", "lo", "root")
    except (ImpossibleError, FileNotFoundError):
        return False
    return True


class NetemWire:
    """The two ends of a virtual cable: the kernel makes each slow or lossy on its way out."""

    def __init__(self, number: int, namespace: int) -> None:
        self._near, self._far, self._namespace = f"near{number}", f"far{number}", namespace
        self._lost = 0
        place = f"/proc/{os.getpid()}/fd/{namespace}"
        run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", place)
        _set_up(self._near, f"10.0.{number}.1", f"10.0.{number}.2")
        with inside(namespace):
            _set_up(self._far, f"10.0.{number}.2", f"10.0.{number}.1")

    def become(self, quality: Quality) -> None:
        self._lost = self.lost()
        _set_netem(self._near, quality)
        with inside(self._namespace):
            _set_netem(self._far, quality)

    def lost(self) -> int:
        near = _netem_lost(self._near)
        with inside(self._namespace):
            far = _netem_lost(self._far)
        return self._lost + near + far


def _netem_lost(device: str) -> int:
    (found,) = json.loads(run("tc", "-s", "-j", "qdisc", "show", "dev", device))
    return int(found["drops"]) if found["kind"] == "netem" else 0


def _set_netem(device: str, quality: Quality) -> None:
    """Before and after, there is no queue: a change would keep what it does not name."""
    run("tc", "qdisc", "replace", "dev", device, "root", "pfifo")
    if quality != PERFECT:
        delay = ["delay", f"{quality.seconds * 1e6:.0f}us", f"{quality.jitter_seconds * 1e6:.0f}us"]
        loss = ["loss", f"{quality.loss:%}"]
        rate = ["rate", f"{quality.bytes_per_second:.0f}bps"] if quality.bytes_per_second else []
        queue = ["limit", str(LONGEST_QUEUE)]
        run("tc", "qdisc", "replace", "dev", device, "root", "netem", *queue, *delay, *loss, *rate)


class TunWire:
    """A process that carries the packets of two TUN devices, for kernels without netem."""

    def __init__(self, number: int, namespace: int) -> None:
        device = f"cable{number}"
        near = _open_tun(device)
        _set_up(device, f"10.0.{number}.1", f"10.0.{number}.2")
        with inside(namespace):
            far = _open_tun(device)
            _set_up(device, f"10.0.{number}.2", f"10.0.{number}.1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.cable", str(near), str(far)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(near, far),
        )
        os.close(near)
        os.close(far)

    def become(self, quality: Quality) -> None:
        self._tell(json.dumps(asdict(quality)))

    def lost(self) -> int:
        return self._tell("")

    def _tell(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _open_tun(device: str) -> int:
    """A network device whose packets this process reads and writes."""
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _SET_TUN, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEADER))
    except OSError as error:
        raise ImpossibleError(f"this kernel has no netem, and /dev/net/tun cannot be used: {error}") from None
    return descriptor


def main() -> None:
    """Run the functions that lines of the input name, and print what came of each as a line of JSON."""
    try:
        hosts = Hosts(Path(sys.argv[1]))
    except ImpossibleError as error:
        print(json.dumps({"impossible": str(error)}), flush=True)
        return
    print(json.dumps({}), flush=True)
    for line in _lines():
        module, name = line.strip().split(":")
        answer: dict[str, Any] = {}
        try:
            getattr(importlib.import_module(module), name)(hosts)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


def _lines() -> Iterator[str]:
    """The lines of the input. Its end is the end of this process, whatever that is doing: the tests are gone."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


if __name__ == "__main__":
    main()
