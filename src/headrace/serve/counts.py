"""What a server has done so far."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class ServiceCounts:
    asked: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    """Clients with a wrong token."""
    stuck: int = 0
    """Clients that took nothing for too long."""
    made: int = 0
    found: int = 0
    """Requests whose result was there already."""
    shared: int = 0
    """Requests for what was being made already."""
    ahead: int = 0
    """Results that were made before anybody asked."""
    sent_bytes: int = 0
    made_seconds: float = 0.0
    queued_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
