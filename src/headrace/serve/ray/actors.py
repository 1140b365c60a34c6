"""What Ray runs on its nodes. Ray is sent this module by its content, so that it can say what is missing on a node
where Headrace is missing."""

from typing import Any

NAMESPACE = "headrace"
"""Where the registries are among the named actors of a cluster."""


class Registry:
    """Knows where the servers of one name are."""

    def __init__(self) -> None:
        self._addresses: list[str] = []

    def enter(self, addresses: list[str]) -> None:
        self._addresses = addresses

    def addresses(self) -> list[str]:
        return self._addresses


class Replica:
    """A server, which Ray places, and starts again when it dies."""

    def __init__(self, version: str, settings: bytes) -> None:
        import socket

        import ray

        self._node = socket.gethostname()
        self._server: Any = None
        self._problem = ""
        try:
            from headrace.serve.ray.node_server import NodeServer
        except ImportError as error:
            self._problem = (
                f"cannot run a server: {error}. Install headrace {version} on all nodes of the cluster, or in the "
                "image that they are started from"
            )
            return
        self._server = NodeServer(version, settings, ray.util.get_node_ip_address())

    def look(self) -> dict[str, Any]:
        """What the server does now: its phase, where it listens, and its state."""
        if self._server is None:
            return {"phase": "failed", "node": self._node, "kind": "StageError", "problem": self._problem}
        return {"node": self._node, **self._server.look()}

    def leave(self) -> None:
        """Answer what was asked, and end."""
        if self._server is not None:
            self._server.leave()
