"""Requests and answers of HTTP, and how they are written."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Host:
    name: str
    port: int
    is_secure: bool = False

    def __str__(self) -> str:
        """As the header `Host` wants it."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port == (443 if self.is_secure else 80) else f"{name}:{self.port}"


@dataclass(frozen=True)
class Request:
    host: Host
    method: str
    target: str
    """The path and the query, encoded."""
    headers: Mapping[str, str] = field(repr=False)
    """With what proves who asks."""
    most_bytes: int
    """A longer body is not read."""

    def encoded(self) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {self.host}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    content: memoryview
    is_whole: bool
    """False if the body was longer than the request allows; then there is no content."""
    seconds: float = 0.0
    """From the request to the end of the answer."""


def parsed_head(head: bytes) -> tuple[int, dict[str, str]]:
    """The status and the headers; 0 if it is not HTTP."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        return 0, {}
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status), headers
