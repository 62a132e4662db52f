"""What the server does between listening and /ready: `--lora-modules`, warm-up rows, pinned adapters, hot ones."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from lora_serve.adapters.dummy import dummy_adapter_ref
from lora_serve.client.base import EngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import ConfigError, LoraServeError, StoreUnwritableError
from lora_serve.core.messages import Evict, Pin
from lora_serve.core.request import InferenceRequest
from lora_serve.core.settings import Settings
from lora_serve.engine.warmup import warmup_stages
from lora_serve.logs import timed
from lora_serve.model.allocator import return_freed_memory
from lora_serve.server.openai.rehearsal import rehearse
from lora_serve.server.reconciler import pinned_refs
from lora_serve.server.services import Services
from lora_serve.server.tenant_budgets import budgets_of
from lora_serve.warm_set import WarmSetKeeper

LOOK_SECONDS = 1.0  # between two looks whether the store can be written
MODULE_SECONDS = 60.0  # at most between two tries to register what there is not enough room for
PIN_SECONDS = 30.0  # that a new engine's readiness waits for what is pinned
_log = logging.getLogger(__name__)


class Preparation:
    """What each life of the engine begins with. In the first all that there is to do; a later engine has got what the
    last one had (`StandingOrders`) and needs its warm-up.
    """

    def __init__(self, services: Services, settings: Settings) -> None:
        self._services = services
        self._settings = settings
        self._keeping = AsyncExitStack()
        self._is_prepared = False

    async def run(self) -> None:
        """Raises ConfigError, and what the engine's end makes fail."""
        if self._is_prepared:
            with suppress(TimeoutError):  # what is pinned now: a pin that came while there was no engine is among them
                async with asyncio.timeout(PIN_SECONDS):
                    await load_pinned(self._services)
            await warm_up(self._services, self._settings)
            return
        if left := await prepare(self._services, self._settings):
            task = asyncio.create_task(register_later(self._services, left), name="lora modules")
            self._keeping.callback(task.cancel)
        await self._keeping.enter_async_context(await hot_adapters(self._services, self._settings))
        self._is_prepared = True

    async def close(self) -> None:
        """What is hot is noted for the last time."""
        await self._keeping.aclose()


async def prepare(services: Services, settings: Settings) -> tuple[str, ...]:
    """All that /ready waits for but the last run's hot adapters; the modules that are left. Raises ConfigError.

    Registering takes turns between its thread, the disk and the engine, so the warm-up's steps run beside it.
    """
    modules = asyncio.ensure_future(register_modules(services, settings.lora_modules))
    tasks: list[asyncio.Future[Any]] = [modules, asyncio.ensure_future(warm_up(services, settings))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await load_pinned(services)
    return modules.result()


async def register_modules(services: Services, modules: tuple[str, ...]) -> tuple[str, ...]:
    """`--lora-modules NAME=SOURCE`: the operator's own, so any path will do. Raises ConfigError.

    What the store could not take, as it cannot be written now, is given back: what is there is served all the same.
    """
    left = []
    for module in modules:
        name, _, source = module.partition("=")
        try:
            await _register_module(services, name, source)
        except StoreUnwritableError as error:
            left.append(module)
            _log.error("--lora-modules %s waits until the store can be written: %s", name, error)
        except LoraServeError as error:
            raise ConfigError(f"--lora-modules {module}: {error}") from error
        return_freed_memory()  # its files' copies, before the next one's come on top of them
    return tuple(left)


async def register_later(services: Services, modules: tuple[str, ...]) -> None:
    """Those that `register_modules` gave back, once the store can be written."""
    pause = LOOK_SECONDS
    while modules:
        await asyncio.sleep(pause)
        if services.store_problem is not None:
            continue
        try:
            modules = await register_modules(services, modules)
        except ConfigError as error:
            _log.error("%s", error)
            return
        pause = min(MODULE_SECONDS, 2 * pause)  # there is room, and not enough


async def _register_module(services: Services, name: str, source: str) -> None:
    registry = services.registry
    if "://" in source:
        staged = await services.staging.stage(source)
        call = functools.partial(registry.register_staged, name, staged.folder, staged.source)
    else:
        call = functools.partial(registry.register_folder, name, source, trusted=True)
    await services.registrations.run(call)


async def warm_up(services: Services, settings: Settings) -> None:
    """Dummy rows through the ordinary step, and a text through all of it."""
    client, spec = services.client, services.spec
    dummy = dummy_adapter_ref(spec)
    stages = warmup_stages(settings.warmup, spec, settings.engine_slice(), dummy)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("warm-up", total=len(stages))
        for stage in stages:
            progress.update(task, description=f"warm-up: {stage.name}")
            with timed(f"warm-up: {stage.name}"):
                client.gate.enter(stage.requests, limited=False)
                await asyncio.gather(*(_exhaust(client, request) for request in stage.requests))
            progress.advance(task)
        if stages:
            with timed("warm-up: a text"):
                await rehearse(services)
            await client.adapters(Evict(dummy.digest, forget=True))


async def load_pinned(services: Services) -> None:
    """The pinned adapters onto the device, after the engine knows what each tenant may have there."""
    await services.client.adapters(budgets_of(services))
    for ref in pinned_refs(services.catalog.snapshot).values():
        await _pin(services.client, ref)


async def hot_adapters(services: Services, settings: Settings) -> AbstractAsyncContextManager[None]:
    """The last run's hot adapters onto the device; while the context lasts, host memory follows and both are noted."""
    if settings.warmup == "off":
        return nullcontext()
    keeper = WarmSetKeeper(services.client, services.catalog, settings.adapter_slice())
    with timed("hot adapters of the last run"):
        await keeper.warm_device()
    return keeper.keeping()


async def _exhaust(client: EngineClient, request: InferenceRequest) -> None:
    now = time.monotonic()  # else its time to first token, which latency targets follow, would be the machine's age
    async for _ in client.infer(replace(request, arrival_time=now)):
        pass


async def _pin(client: EngineClient, ref: AdapterRef) -> None:
    """A pinned adapter that cannot be had is said and left out: the others are served."""
    with timed(f"pinned adapter {ref.label}"):
        try:
            await client.adapters(Pin(ref))
        except LoraServeError as error:
            _log.error("the pinned adapter %s cannot be loaded: %s", ref.label, error)
