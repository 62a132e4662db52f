"""The port that Ray Serve opens in every replica for calls over gRPC: by itself it listens on all of the machine's
addresses. What arrives there is unpickled; it asks for the cluster's token, if the cluster has one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

_MODULE, _OPENS = "ray.serve._private.replica", "add_port_to_grpc_server"


def listen_as_the_node() -> None:
    """Called in a replica while Ray Serve makes it: its port opens on the address of its Ray node alone, which is
    loopback in a cluster of a server's own. Raises RuntimeError if this Ray opens the port in another way.
    """
    module, ray = importlib.import_module(_MODULE), importlib.import_module("ray")
    opens: Callable[[object, str], int] | None = getattr(module, _OPENS, None)
    if opens is None:
        raise RuntimeError(f"Ray has no {_MODULE}.{_OPENS}: another release opens the replicas' port in another way")
    host = str(ray.util.get_node_ip_address())
    address = f"[{host}]:0" if ":" in host else f"{host}:0"

    def open_there(server: object, everywhere: str) -> int:
        return opens(server, address)

    setattr(module, _OPENS, open_there)
