"""`lora-serve fleet stop`: the engines of a fleet leave a Ray cluster that its servers had joined."""

from __future__ import annotations

import argparse
import importlib
import sys

from lora_serve.commands.confirmation import confirm_deletion
from lora_serve.commands.failure import CommandError, ExitCode
from lora_serve.commands.flags import CommandParser
from lora_serve.commands.output import Output
from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings, describe

SUMMARY = "Removes a fleet's engines from a Ray cluster. Servers that still run have none then, until one starts again."
EXIT_CODES = """exit codes:
  0    well
  1    not confirmed
  2    the command line is wrong, or no cluster can be reached
  4    there is no such fleet in the cluster"""


def run(arguments: list[str]) -> int:
    """Runs the subcommand; returns the exit code. Raises ConfigError."""
    flags = _parser().parse_args(arguments)
    config = _config(flags)
    try:
        confirm_deletion(flags.yes, f"the engines of the fleet {config.name} at {config.address}")
        _remove(config)
    except CommandError as error:
        Output(False).fail(error)
        return error.code
    print(f"the fleet {config.name} is gone", file=sys.stdout)  # noqa: T201
    return ExitCode.OK


def _parser() -> CommandParser:
    parser = CommandParser("lora-serve fleet stop", SUMMARY, EXIT_CODES)
    parser.add_argument("--ray-address", required=True, metavar="A", help="HOST:PORT of the cluster, or auto")
    parser.add_argument("--fleet-name", default="lora-serve", metavar="N", help="as the servers' (default: lora-serve)")
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where input is no terminal")
    return parser


def _config(flags: argparse.Namespace) -> FleetConfig:
    from pydantic import ValidationError

    if flags.ray_address == "none":
        raise ConfigError("--ray-address none: such a fleet ends with its server")
    try:
        Settings(model="any", engine="ray", ray_address=flags.ray_address, fleet_name=flags.fleet_name)
    except ValidationError as error:
        raise ConfigError(describe(error, {})) from None
    nothing = {"min_replicas": 1, "max_replicas": 1, "num_gpus": 0.0, "num_cpus": 0.0, "wait": 0.0}
    return FleetConfig(address=flags.ray_address, name=flags.fleet_name, **nothing)  # type: ignore[arg-type]


def _remove(config: FleetConfig) -> None:
    """Raises ConfigError, CommandError."""
    from lora_serve.engine_host.fleet.cluster import open_cluster

    with open_cluster(config):
        serve = importlib.import_module("ray.serve")
        app = importlib.import_module("lora_serve.engine_host.fleet.app")
        found = serve.status().applications
        there = sorted(name for name, one in found.items() if app.is_fleet(one.deployments))
        if config.name not in there:
            names = f"; there are {', '.join(there)}" if there else ""
            raise CommandError(ExitCode.NOT_FOUND, f"there is no fleet {config.name} at {config.address}{names}")
        serve.delete(config.name)
