"""What a server says to a client that says hello: whether both speak the same, and want the same."""

import hmac
from dataclasses import dataclass

from headrace.serve import messages
from headrace.serve.counts import ServiceCounts
from headrace.serve.messages import Hello, Refused, Welcome

WRONG_TOKEN = "the token is not the right one; give token= that of the server"
NO_TOKEN = "it asks for a token, and none was given; give token=, or set HEADRACE_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Reception:
    token: str | None
    fingerprint: str
    described: bytes
    """The description of what is served."""
    slots: int
    counts: ServiceCounts

    def reply_to(self, hello: Hello, *, is_trusted: bool) -> Welcome | Refused:
        """`is_trusted` says that the client's token was checked before."""
        if hello.version != messages.VERSION:
            said = f"it speaks version {messages.VERSION}, and this client version {hello.version}"
            return Refused(f"{said}; install the same version of headrace on both")
        if not is_trusted and not self._is_right(hello.token):
            self.counts.refused += 1
            return Refused(WRONG_TOKEN if hello.token else NO_TOKEN)
        if hello.fingerprint not in (None, self.fingerprint):
            return Refused("it serves other rows", self.described)
        described = self.described if hello.fingerprint is None else b""
        return Welcome(messages.VERSION, self.fingerprint, described, self.slots)

    def _is_right(self, token: str | None) -> bool:
        # In constant time, so that nobody can find it out letter by letter.
        return self.token is None or hmac.compare_digest((token or "").encode(), self.token.encode())
