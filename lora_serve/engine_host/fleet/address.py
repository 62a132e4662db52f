"""The address of a Ray cluster that is joined: which one it is, and whether a cluster is there."""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path

from lora_serve.core.errors import ConfigError

CONNECT_SECONDS = 3.0  # for a TCP connection to a cluster's GCS
ANSWER_SECONDS = 5.0  # for its answer
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # noqa: S108  where `ray start` notes the address
_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_ASKS_FOR_A_TOKEN = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_REASONS = {
    "DEADLINE_EXCEEDED": "it does not answer",
    "UNAVAILABLE": "it speaks another protocol, or TLS: RAY_USE_TLS",
    "UNIMPLEMENTED": "it is another gRPC service",
}
_WANTED = "what is wanted is the port of its GCS, which `ray start --head` prints"


def running_address() -> str:
    """The address of the cluster of which a node runs on this machine. Raises ConfigError."""
    try:
        address = os.environ.get("RAY_ADDRESS") or CURRENT_CLUSTER.read_text().strip()
    except OSError:
        address = ""
    if not address:
        raise ConfigError(
            "--ray-address auto: no Ray runs on this machine: start a node (`ray start --address=HOST:PORT`), or give "
            "--ray-address HOST:PORT"
        )
    return address


def check_reachable(address: str) -> None:
    """Raises ConfigError within seconds if no GCS answers at HOST:PORT; Ray itself would wait for minutes. Ray is
    imported, and has its variables.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise ConfigError(
            f"--ray-address {address}: no Ray cluster can be reached there ({reason}); {_WANTED}"
        ) from None
    if reason := _ask(address):
        raise ConfigError(f"--ray-address {address}: what listens there is no Ray cluster ({reason}); {_WANTED}")


def _ask(address: str) -> str:
    """Why the answer is none of a GCS; empty if it is one, or asks for a token."""
    grpc = importlib.import_module("grpc")
    options = importlib.import_module("ray._private.ray_constants").GLOBAL_GRPC_OPTIONS
    with importlib.import_module("ray._private.grpc_utils").init_grpc_channel(address, options) as channel:
        try:
            channel.unary_unary(_QUESTION)(b"", timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            status = error.code().name
            return "" if status in _ASKS_FOR_A_TOKEN else _REASONS.get(status, status)
    return ""
