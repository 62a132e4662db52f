"""Engine clients over the fake runner, for tests of whatever all of them must do."""

from __future__ import annotations

import queue
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lora_serve.client.process import EngineProcess, ProcessEngineClient, configure_of
from lora_serve.client.thread import ThreadEngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.core.settings import Settings
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.loop import Mail
from lora_serve.engine.queue_gate import QueueGate
from tests.engine.world import World
from tests.engine_host import fake_engine

LIMITS = QueueLimits()


def request(
    name: str, ref: AdapterRef | None = None, max_tokens: int = 4, prompt: Sequence[int] = (1, 2), **fields: Any
) -> InferenceRequest:
    uses = () if ref is None else (AdapterUse(ref),)
    sampling = SamplingParams(max_tokens=max_tokens)
    return InferenceRequest(name, tuple(prompt), sampling, uses, arrival_time=time.monotonic(), **fields)


@asynccontextmanager
async def thread_client(limits: QueueLimits = LIMITS) -> AsyncIterator[ThreadEngineClient]:
    """Not started yet."""
    world, mailbox = World(max_num_seqs=4), queue.SimpleQueue[Mail]()

    def submit(ref: AdapterRef) -> None:
        if ref.name != "slow":
            error = AdapterUnavailableError("it is broken") if ref.name == "broken" else None
            mailbox.put(LoadFinished(ref.digest, None if error else ref.digest, error, 0.0))

    world.residency._submit = submit
    world.engine.execution.runner = fake_engine.FaultyRunner(world.settings.block_size)
    client = ThreadEngineClient(world.engine, mailbox, QueueGate(limits))
    try:
        yield client
    finally:
        await client.stop()


@asynccontextmanager
async def process_client(
    limits: QueueLimits = LIMITS,
    command: Sequence[str] = fake_engine.COMMAND,
    model: str = "fake",
    **settings: Any,
) -> AsyncIterator[ProcessEngineClient]:
    """Not started yet."""
    configure = configure_of(Settings(model=model, **settings))
    client = ProcessEngineClient(
        lambda: EngineProcess.start(command, configure),
        QueueGate(limits),
        DesiredState(4),
        lambda message, send: None,
    )
    try:
        yield client
    finally:
        await client.stop()
