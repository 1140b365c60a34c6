"""A server on a node of a Ray cluster, as the actor that answers for it sees it.

The server is a process of its own (`front.py`), so it runs like one that was started by hand, and Ray's threads are not
in its way. It ends with the actor. If it dies, the actor ends too, and Ray starts both again, maybe elsewhere.

    starting -> ready -> leaving -> ended
        |
        +-----> failed
"""

import os
import select
import signal
import threading
from typing import Any

import msgspec

import headrace
from headrace.errors import StageError
from headrace.workers import wire
from headrace.workers.process import WorkerProcess, ctrl_c_waits, end_workers


class NodeServer:
    def __init__(self, version: str, settings: bytes, node_address: str) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, Any] = {"phase": "starting", "addresses": [], "state": None}
        self._is_leaving = False
        if version != headrace.__version__:
            self._fail(
                StageError.__name__,
                f"headrace {headrace.__version__} is installed, but the servers were started with {version}; install "
                "the same version everywhere",
            )
            return
        with ctrl_c_waits():
            self._process = WorkerProcess("headrace.serve.ray.front", wire.JSON, own_session=True)
        self._process.send([node_address], settings)
        self._listening = threading.Thread(target=self._listen, name="headrace-serve-front", daemon=True)
        self._listening.start()

    def look(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._seen)

    def leave(self) -> None:
        with self._lock:
            self._is_leaving = True
            if self._seen["phase"] in ("starting", "ready"):
                self._seen["phase"] = "leaving"
                self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End at once."""
        with self._lock:
            self._is_leaving = True
        self._process.signal(signal.SIGKILL)
        self._listening.join()

    def _listen(self) -> None:
        waiting = select.poll()
        waiting.register(self._process.connection, select.POLLIN)
        try:
            while True:
                if self._process.has_unsent:
                    self._process.flush()
                waiting.poll(1000)
                for message in self._process.receive():
                    self._note(*message.head)
        except (EOFError, OSError):
            self._end()

    def _note(self, what: str, *told: Any) -> None:
        if what == "failed":
            self._fail(*told)
            return
        with self._lock:
            if what == "ready":
                self._seen["addresses"] = told[0]
            else:
                self._seen["state"] = told[0]
            if self._seen["phase"] == "starting":
                self._seen["phase"] = "ready"

    def _fail(self, kind: str, problem: str) -> None:
        with self._lock:
            self._seen |= {"phase": "failed", "addresses": [], "kind": kind, "problem": problem}

    def _end(self) -> None:
        """The process of the server is gone."""
        how = self._process.death()
        end_workers([self._process], os.getpid())
        with self._lock:
            phase = self._seen["phase"]
            if self._is_leaving:
                self._seen |= {"phase": "ended", "addresses": []}
                return
        if phase == "starting":
            said = f"the process of the server {how} while it was starting; see the logs of Ray on this node"
            self._fail(StageError.__name__, said)
        elif phase == "ready":
            # Ray starts this actor again, with another server.
            os._exit(1)


class FrontSettings(msgspec.Struct, frozen=True):
    """What a server needs to know, wherever it runs. Certificate and key are the contents of their files."""

    name: str
    loader_settings: dict[str, Any]
    service: dict[str, Any]
    host: str | None
    """Where to listen; None is the node's own address."""
    insecure: bool
    drain_seconds: float
    certificate: bytes | None
    key: bytes | None
    certified_name: str | None
    """The name that the certificate is for, if it is not the node's address."""
    directory: str
    """Where relative paths begin, if it is there."""


encode_settings = msgspec.msgpack.Encoder().encode
decode_settings = msgspec.msgpack.Decoder(FrontSettings).decode
