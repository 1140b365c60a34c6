"""What Ray runs on a node. Ray is sent this module by its content, so that it can say what is missing on a node where
Headrace is missing."""

from typing import Any


def run_on_node(
    versions: dict[str, str], directory: str, settings: bytes, job: bytes, number: int, board: Any
) -> tuple[str, ...] | bytes:
    """Run a job, and return its outcome; or ("Error", message, traceback) if it fails, with the name of the node."""
    import socket
    import traceback

    node = socket.gethostname()
    try:
        from headrace.ingest.ray_node import run_job_here
    except ImportError as error:
        return (
            "BuildError",
            f"the node {node} cannot run a build: {error}. Install headrace {versions['headrace']} on all nodes of the "
            "cluster, or in the image that they are started from",
            "",
        )
    try:
        return run_job_here(versions, directory, settings, job, number, board)
    except BaseException as error:
        return type(error).__name__, f"on the node {node}: {error}", traceback.format_exc()
