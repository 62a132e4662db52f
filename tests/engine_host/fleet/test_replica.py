"""What Ray Serve is told of a replica's health."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lora_serve.engine_host.fleet.app import EngineReplica
from tests.client.ray.fake_fleet import FakeReplica, Sink


async def test_replica_whose_reports_have_ended_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, sink = FakeReplica("r"), Sink()
    replica: Any = SimpleNamespace(_engine=fake.engine, _step_timeout=0.0)
    fake.engine.gateways.attach("g", sink, fake.engine.greeting())
    await EngineReplica.check_health(replica)

    def broken(body: bytes) -> None:
        raise RuntimeError("of the connection")

    monkeypatch.setattr(sink, "send", broken)
    async with asyncio.timeout(10):
        await asyncio.wait({fake.engine._reporting})
    with pytest.raises(RuntimeError, match="reports"):
        await EngineReplica.check_health(replica)
    await fake.engine.stop()
