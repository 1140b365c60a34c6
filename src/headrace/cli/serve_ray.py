"""The options of `headrace serve --engine ray`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from headrace.serve.ray.run import RaySettings

Command = TypeVar("Command", bound=Callable[..., Any])

_OF_RAY = ("replicas", "autoscale", "address", "name", "addresses_file", "tls_name")
_NOT_WITH_RAY = {
    "port": "each server takes a free port, and clients find it through the list of servers",
    "socket_path": "servers may run on other machines",
    "metrics_port": "several servers may run on one machine",
    "as_json": "servers come and go; --addresses-file lists them",
}
_FLAGS = {"socket_path": "socket", "as_json": "json"}


def ray_options(command: Command) -> Command:
    """Which cluster, how many servers, and how clients find them."""
    options = (
        click.option(
            "--engine",
            type=click.Choice(["local", "ray"]),
            default="local",
            help="What runs servers: this process, which is one (the default), or a Ray cluster, which places several.",
        ),
        click.option(
            "--replicas",
            metavar="N",
            type=click.IntRange(1),
            help="With --engine ray: how many servers (default: 1).",
        ),
        click.option(
            "--autoscale",
            metavar="MIN:MAX",
            help="With --engine ray: more servers while clients wait for batches, and fewer after a rest.",
        ),
        click.option(
            "--address",
            metavar="HOST:PORT",
            help="The Ray cluster to use with --engine ray (default: RAY_ADDRESS, or Ray is started on this machine).",
        ),
        click.option(
            "--name",
            metavar="NAME",
            help="With --engine ray: clients find the servers as ray:NAME (default: headrace).",
        ),
        click.option(
            "--addresses-file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="With --engine ray: list the servers in this file, for clients given file:// and its full path.",
        ),
        click.option(
            "--tls-name",
            metavar="NAME",
            help="With --engine ray: the name that the certificate is for, if it is not for the address of every node.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_ray_settings(options: dict[str, Any]) -> "RaySettings | None":
    """Take what is about Ray out of the options of the command. None if this process is to be the server."""
    from headrace.errors import SettingsError

    engine = options.pop("engine")
    given = {name: value for name in _OF_RAY if (value := options.pop(name)) is not None}
    if engine != "ray":
        for name in given:
            raise SettingsError(f"--{name.replace('_', '-')}: is for servers on a cluster; add --engine ray")
        return None
    for name, why in _NOT_WITH_RAY.items():
        if options[name] is not None and options[name] is not False:
            flag = _FLAGS.get(name, name.replace("_", "-"))
            raise SettingsError(f"--{flag}: cannot be given with --engine ray: {why}")

    from headrace.serve.autoscale import parse_autoscale
    from headrace.serve.ray.run import RaySettings

    if "autoscale" in given:
        given["autoscale"] = parse_autoscale(given["autoscale"])
    source = click.get_current_context().get_parameter_source("host")
    if source is not ParameterSource.DEFAULT:
        given["host"] = options["host"]
    return RaySettings(**given)
