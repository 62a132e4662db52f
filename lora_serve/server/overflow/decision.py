"""Which requests leave, and to whom: those that would wait here longer than allowed, and longer than there."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from aiohttp import web
from prometheus_client import CollectorRegistry

from lora_serve.client.base import EngineClient
from lora_serve.core.errors import LoraServeError
from lora_serve.core.model_map import ModelMap
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.overflow import OverflowConfig
from lora_serve.engine.queue_gate import WaitForecast
from lora_serve.server.background.tasks import running
from lora_serve.server.context import CONTEXT, AdapterSet
from lora_serve.server.overflow.neighbour import HEADER, Neighbour, State
from lora_serve.server.overflow.outcome import OverflowMetrics
from lora_serve.server.overflow.reading import can_leave
from lora_serve.server.overflow.way import Asked, Way

LEAST_PATIENCE = 1.0  # seconds
PLACES_INTERVAL = 1.0  # seconds
PROBE_INTERVAL = 0.5  # seconds between two looks for neighbours that have rested
_log = logging.getLogger(__name__)


class Overflow:
    """The neighbours, and who may go there."""

    def __init__(
        self,
        config: OverflowConfig,
        client: EngineClient,
        registry: CollectorRegistry,
        may_leave: Callable[[str], bool],
    ) -> None:
        """`may_leave`: whether a tenant lets neighbours compute its answers, or others' with its adapters."""
        self._config = config
        self._client = client
        self._gate = client.gate
        self._forecast = self._gate.forecast = WaitForecast()
        self._may_leave = may_leave
        self._id = secrets.token_hex(8)
        self._salt = secrets.token_bytes(32)
        self._map = ModelMap(config.overflow_model_map)
        self.neighbours = tuple(
            Neighbour(name, url, config.overflow_api_key, f"{self._id}.{number}")
            for number, (name, url) in enumerate(config.neighbours)
        )
        up = {one.name: lambda one=one: float(one.breaker.state is not State.OPEN) for one in self.neighbours}
        self._metrics = OverflowMetrics(registry, up)

    def may_take(self, request: web.Request, tenant: str) -> bool:
        """True if some neighbour may be asked, unless the body forbids it: then a full queue is no reason to refuse a
        request unread.
        """
        if HEADER in request.headers:
            self._check_sender(request.headers[HEADER])
            return False
        if not self._may_leave(tenant):
            return False
        return any(neighbour.may_be_asked(1, "", "") for neighbour in self.neighbours)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold the neighbours' connections and look after those that failed, for as long as the block lasts."""
        async with AsyncExitStack() as stack:
            for neighbour in self.neighbours:
                await stack.enter_async_context(neighbour.running())
            works = [functools.partial(self._look_after, neighbour) for neighbour in self.neighbours]
            await stack.enter_async_context(running(self._follow_places, *works, name="overflow"))
            yield

    def way_of(
        self,
        request: web.Request,
        adapters: AdapterSet,
        spec: ModelSpec,
        rows: Sequence[InferenceRequest],
        *,
        is_whole: bool,
        stop: tuple[str, ...] = (),
    ) -> Way | None:
        """The way to a neighbour; None: the answer is computed here. See `Asked` for `is_whole` and `stop`."""
        if HEADER in request.headers:
            self._check_sender(request.headers[HEADER])
            return None
        wait = self._gate.predicted_wait(rows)
        if wait <= self._config.overflow_after_ms / 1000:
            return None
        model = self._model_there(adapters, rows)
        if model is None:
            return None
        digests = ",".join(adapters.digests)
        able = [one for one in self.neighbours if one.may_be_asked(len(rows), model, digests) and one.expected < wait]
        if not able:
            return None
        asked = Asked(
            model=model,
            digests=digests,
            vocab_size=spec.vocab_size,
            dimension=0 if spec.pooling is None else spec.pooling.dimension,
            ends=spec.eos_token_ids,
            stop=stop if is_whole else (),
            is_whole=is_whole,
            patience=min(self._config.overflow_timeout_ms / 1000, max(LEAST_PATIENCE, wait)),
            gap=self._config.overflow_gap_ms / 1000,
            whole=self._config.overflow_answer_ms / 1000,
            salt=self._salt,
        )
        return Way(min(able, key=lambda one: one.expected), asked, request[CONTEXT], self._metrics)

    def _model_there(self, adapters: AdapterSet, rows: Sequence[InferenceRequest]) -> str | None:
        """The name of the model at the neighbours; None: the rows stay here."""
        if adapters.is_composed or not all(map(can_leave, rows)):
            return None
        first = rows[0]
        tenants = {first.tenant, first.account or first.tenant, *(member.ref.tenant for member in adapters.members)}
        if not all(map(self._may_leave, tenants)):
            return None
        named = adapters.named
        if named is None:
            return None if adapters.members else self._map.target(adapters.base_name)
        is_only = not named.names_version and named.entry.route.canary is None
        return self._map.target(named.entry.name, named.version.version, is_only=is_only)

    def _check_sender(self, sender: str) -> None:
        """A request that this very server has sent shows that a neighbour is the server itself."""
        for neighbour in self.neighbours:
            if sender == neighbour.sender and not neighbour.is_self:
                neighbour.is_self = True
                _log.error("--overflow: %s is this server itself; it is not asked any more", neighbour.name)

    async def _follow_places(self) -> None:
        """Ask the engine now and then how many rows it runs at once, which may be changed and depends on its load."""
        while True:
            with suppress(LoraServeError):  # it is being restarted
                batcher = (await self._client.stats()).batcher
                self._forecast.places = None if batcher is None else batcher.max_rows
            await asyncio.sleep(PLACES_INTERVAL)

    async def _look_after(self, neighbour: Neighbour) -> None:
        """Look at a neighbour at start, and after each rest of its breaker."""
        started = time.monotonic()
        models = await neighbour.probe()
        if models is not None:
            took = time.monotonic() - started
            _log.info("overflow: the neighbour %s serves %d models (%.0f ms)", neighbour.name, len(models), 1000 * took)
            for target in self._map.targets:
                if target not in models:
                    _log.warning("--overflow-model-map: %r is no model of the neighbour %s", target, neighbour.name)
        while True:
            await asyncio.sleep(PROBE_INTERVAL)
            if neighbour.breaker.wants_probe:
                neighbour.breaker.probed(is_well=await neighbour.probe() is not None)
