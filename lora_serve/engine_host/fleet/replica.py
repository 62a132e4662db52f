"""The Ray Serve deployment of a fleet: each replica's actor holds one whole engine."""

from __future__ import annotations

import asyncio
import importlib
import logging
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import ray
from ray import serve

from lora_serve.client.ray.stream import encoded, tls
from lora_serve.client.wire import to_engine
from lora_serve.core.messages import Configure
from lora_serve.engine_host.fleet.gateways import Entrance
from lora_serve.engine_host.fleet.replica_engine import ReplicaEngine

_log = logging.getLogger(__name__)
_MODULE, _OPENS = "ray.serve._private.replica", "add_port_to_grpc_server"


class EngineReplica:
    """Ray Serve makes it, and hands it the calls of the gateways. Once it is made it is warm."""

    _engine: ReplicaEngine

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, configure: bytes, settings: str, roots_key: bytes, warmup: str, step_timeout: float
    ) -> None:
        """`configure`: a frame with a Configure; `settings`: its digest. `step_timeout`: seconds without progress after
        which the engine counts as hung; 0: any number. Raises ModelError, ConfigError.
        """
        from lora_serve.engine_host.fleet.load import load_engine  # torch, which only an actor needs
        from lora_serve.model.system.threads import use_one_core

        listen_as_the_node()
        (message,) = to_engine(configure)
        assert isinstance(message, Configure)
        self._step_timeout = step_timeout
        name = serve.get_replica_context().replica_id.unique_id
        engine, blobs = await asyncio.to_thread(load_engine, message, name, _ray_folder())
        sys.setswitchinterval(0.0005)  # see launch.py
        node = ray.util.get_node_ip_address()
        self._engine = ReplicaEngine(engine, name, settings, roots_key, node, blobs, use_one_core)
        self._entrance = Entrance(node, self._engine)
        await self._entrance.open(tls(ssl.Purpose.CLIENT_AUTH))
        await self._engine.warm_up(warmup, message.engine)
        _log.info("replica %s is warm", name)

    async def place(self, *, replica: str) -> bytes:
        """See `Entrance.place`. `replica` was for the request router."""
        return encoded(self._entrance.place)

    async def __del__(self) -> None:
        """Ray Serve, which asks no more gateways to come, awaits it before the process ends: they leave when their
        requests have ended.
        """
        await self._entrance.emptied()

    async def check_health(self) -> None:
        """Ray Serve asks every few seconds, and replaces a replica that fails. Raises RuntimeError."""
        if self._step_timeout and self._engine.seconds_without_progress > self._step_timeout:
            raise RuntimeError(f"the engine made no progress for {self._step_timeout:g} s")
        if not self._engine.is_reporting:
            raise RuntimeError("the replica's reports to the servers have ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures that `autoscaling.replicas_wanted` decides by."""
        return self._engine.load


def _ray_folder() -> Path:
    """The folder of Ray's files on this machine, of this cluster's session."""
    return Path(importlib.import_module("ray._private.worker")._global_node.get_session_dir_path())  # noqa: SLF001


def listen_as_the_node() -> None:
    """Called in a replica while Ray Serve makes it: its port for calls over gRPC opens on the address of its Ray node
    alone, which is loopback in a cluster of a server's own, and not on all of the machine's. What arrives there is
    unpickled; it asks for the cluster's token, if there is one. Raises RuntimeError if this Ray opens it otherwise.
    """
    module = importlib.import_module(_MODULE)
    opens: Callable[[object, str], int] | None = getattr(module, _OPENS, None)
    if opens is None:
        raise RuntimeError(f"Ray has no {_MODULE}.{_OPENS}: another release opens the replicas' port in another way")
    host = str(ray.util.get_node_ip_address())
    address = f"[{host}]:0" if ":" in host else f"{host}:0"

    def open_there(server: object, everywhere: str) -> int:
        return opens(server, address)

    setattr(module, _OPENS, open_there)
