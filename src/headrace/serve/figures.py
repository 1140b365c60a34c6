"""What the live view and the metrics show of a server."""

from typing import Any

from headrace.serve.service import Service


def state_of(service: Service) -> dict[str, Any]:
    return {
        "clients": [
            {
                "name": session.name,
                "asked": session.asked,
                "answered": session.answered,
                "sent_bytes": session.sent_bytes,
                "waited": session.waited,
            }
            for session in service.sessions
            if session.is_known
        ],
        "workers": service.settings.workers,
        "workers_ready": service.pool.workers_ready,
        "worker_deaths": service.pool.deaths,
        "slots": service.pool.slots,
        "running": service.pool.running,
        "held_bytes": service.results.held_bytes,
        "memory_bytes": service.settings.memory_bytes,
        "is_ready": service.is_ready,
        "is_leaving": service.is_leaving,
        **service.counts.to_json(),
    }
