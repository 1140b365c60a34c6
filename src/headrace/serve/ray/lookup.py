"""The process of a client that asks Ray where servers are.

client                              this process
connect, address or null       ->
look, name                     ->
                               <-   servers, addresses; or unknown, name;
                                    or unavailable, why; or failed, why
"""

import os
import sys
from typing import Any, NoReturn

from headrace.errors import HeadraceError, StageError
from headrace.serve.ray.actors import NAMESPACE
from headrace.workers import wire
from headrace.workers.ray_cluster import connect, import_ray
from headrace.workers.worker import attach

_ANSWER_SECONDS = 20.0


def main() -> NoReturn:
    link = attach(sys.argv[1:], wire.JSON)
    _, address = link.messages.get().head
    problem, ray = "", None
    try:
        ray = import_ray("an address like ray:NAME")
        # Like "auto": the cluster of RAY_ADDRESS, or the one that was started on this machine; never a new one.
        connect(ray, address or os.environ.get("RAY_ADDRESS") or "auto", None, StageError)
    except HeadraceError as error:
        problem = str(error)
    while True:
        _, name = link.messages.get().head
        link.send(["failed", problem] if ray is None or problem else _look(ray, name))


def _look(ray: Any, name: str) -> list[Any]:
    try:
        registry = ray.get_actor(name, namespace=NAMESPACE)
        return ["servers", ray.get(registry.addresses.remote(), timeout=_ANSWER_SECONDS)]
    except ValueError:
        return ["unknown", name]
    except ray.exceptions.RayActorError as error:
        return ["unavailable", f"the list of servers is being moved to another node ({type(error).__name__})"]
    except Exception as error:
        return ["failed", f"{type(error).__name__}: {error}"]


if __name__ == "__main__":
    main()
