"""The example for servers on Kubernetes: its parts fit together, and its command is one that can be given."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.serve import command
from headrace.serve.server import Listening

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve" / "kubernetes.yaml"


@pytest.fixture
def parts() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The service, the deployment, and the container of its pods."""
    service, deployment = yaml.safe_load_all(EXAMPLE.read_text())
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return service["spec"], deployment["spec"], container


def options_of(container: dict[str, Any]) -> dict[str, Any]:
    """The options, as the command itself reads them."""
    program, name, *arguments = container["command"]
    assert (program, name) == ("headrace", "serve")
    return command.make_context(name, list(arguments)).params


def test_the_service_finds_the_pods(parts: tuple[dict[str, Any], ...]) -> None:
    service, deployment, container = parts
    options = options_of(container)
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == deployment["selector"]["matchLabels"] == labels
    assert service["clusterIP"] == "None", "a client is to see each pod"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"batches": options["port"], "metrics": options["metrics_port"]}
    (port,) = service["ports"]
    assert ports[port["targetPort"]] == port["port"] == options["port"]


def test_the_server_may_listen_and_is_asked_whether_it_is_ready(parts: tuple[dict[str, Any], ...]) -> None:
    container = parts[2]
    options = options_of(container)
    listening = Listening(
        host=options["host"], port=options["port"], certificate=options["certificate"], key=options["key"]
    )
    listening.check("a token")
    ready, alive = container["readinessProbe"]["httpGet"], container["livenessProbe"]["httpGet"]
    assert (ready, alive) == (
        {"path": "/readyz", "port": "metrics"},
        {"path": "/healthz", "port": "metrics"},
    )
    assert options["metrics_host"] == "0.0.0.0", "probes come from outside of the pod"


def test_there_is_time_to_answer_before_a_pod_is_killed(parts: tuple[dict[str, Any], ...]) -> None:
    _, deployment, container = parts
    word, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    needed = float(seconds) + options_of(container)["drain_seconds"]
    assert deployment["template"]["spec"]["terminationGracePeriodSeconds"] > needed + 5


def test_secrets_are_where_the_command_looks_for_them(parts: tuple[dict[str, Any], ...]) -> None:
    _, deployment, container = parts
    options = options_of(container)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    files = [options[name] for name in ("certificate", "key", "token_file")]
    assert {os.path.dirname(file) for file in files} == set(mounts)
    # As `kubectl create secret tls` and `--from-file=token` name them.
    assert [os.path.basename(file) for file in files] == ["tls.crt", "tls.key", "token"]
    secrets = {
        volume["name"]: volume["secret"]["secretName"] for volume in deployment["template"]["spec"]["volumes"]
    }
    assert secrets == {"tls": "headrace-tls", "token": "headrace-token"}
    assert set(mounts.values()) == set(secrets)


def test_memory_and_processors_fit(parts: tuple[dict[str, Any], ...]) -> None:
    options, asked = options_of(parts[2]), parts[2]["resources"]["requests"]
    assert options["workers"] == int(asked["cpu"])
    assert options["memory_bytes"] < int(asked["memory"].removesuffix("Gi")) * 2**30
