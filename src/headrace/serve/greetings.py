"""What a client and a server say when they meet, and whether they fit: the same protocol, and the same rows."""

import threading

from headrace.serve import messages
from headrace.serve.description import DamagedDescriptionError, Description, decode, differences
from headrace.serve.messages import Hello, Refused, Request, Welcome


class Greetings:
    """The first server says what all of them must serve, unless the client knows."""

    def __init__(self, token: str | None, expected: Description | None, known_from: str) -> None:
        """`known_from` names what has said what is expected."""
        self._token, self._known_from = token, known_from
        self.description = expected
        self._lock = threading.Lock()

    def hello(self) -> Request:
        fingerprint = None if self.description is None else self.description.fingerprint
        return Hello(messages.VERSION, fingerprint, self._token)

    def problem_of(self, welcome: Welcome, name: str) -> str:
        """Why the server of that name cannot be used; nothing if it can."""
        if welcome.version != messages.VERSION:
            return f"it speaks version {welcome.version} of the protocol, and this client {messages.VERSION}"
        try:
            with self._lock:
                if self.description is None:
                    self.description, self._known_from = decode(welcome.description), name
            if welcome.fingerprint == self.description.fingerprint:
                return ""
            return self._differences(self.description, welcome.description)
        except DamagedDescriptionError as error:
            return str(error)

    def problem_of_refusal(self, refused: Refused) -> str:
        """Why a server does not want this client."""
        if not refused.description or self.description is None:
            return f"it refuses this client: {refused.reason}"
        try:
            return self._differences(self.description, refused.description)
        except DamagedDescriptionError as error:
            return str(error)

    def _differences(self, expected: Description, described: bytes) -> str:
        listed = "; ".join(differences(expected, decode(described)))
        said = (
            f"it does not serve the same rows as {self._known_from}: {listed or 'its fingerprint is another'}"
        )
        return f"{said}; all need the same code, data and settings"
