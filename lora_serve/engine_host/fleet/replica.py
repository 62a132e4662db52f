"""The Ray Serve deployment of a fleet: each replica's actor holds one whole engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

from ray import serve

from lora_serve.client.wire import to_engine
from lora_serve.core.messages import Configure
from lora_serve.engine_host.fleet.ports import listen_as_the_node
from lora_serve.engine_host.fleet.replica_engine import ReplicaEngine


class EngineReplica:
    """Ray Serve makes it, and hands it the calls of the gateways. Once it is made it is warm."""

    async def __init__(self, configure: bytes, settings: str, roots_key: bytes, warmup: str) -> None:
        """`configure`: a frame with a Configure; `settings`: its digest. Raises ModelError, ConfigError."""
        from lora_serve.engine_host.fleet.load import load_engine  # torch, which only an actor needs
        from lora_serve.model.system.threads import use_one_core

        listen_as_the_node()
        (message,) = to_engine(configure)
        assert isinstance(message, Configure)
        name = serve.get_replica_context().replica_id.unique_id
        engine, blobs = await asyncio.to_thread(load_engine, message, name, lambda asked: self._engine.send(asked))
        sys.setswitchinterval(0.0005)  # see launch.py
        self._engine = ReplicaEngine(engine, name, settings, roots_key, blobs.answered, use_one_core)
        await self._engine.warm_up(warmup, message.engine)

    async def events(self, gateway: str, *, replica: str) -> AsyncGenerator[bytes, None]:
        """See `Transport.events`. `replica` was for the request router."""
        async for frame in self._engine.events(gateway):
            yield frame

    async def take(self, gateway: str, frame: bytes, *, replica: str) -> None:
        """See `Transport.take`."""
        self._engine.take(gateway, frame)
