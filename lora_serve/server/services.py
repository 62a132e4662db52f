"""Everything that a handler may use, in one frozen value under one key of the application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from aiohttp import web
from msgspec.structs import asdict

from lora_serve import __version__
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.registration.registry import Registry
from lora_serve.adapters.registration.verification import AdapterVerifier
from lora_serve.adapters.stores.base import StoreFigures
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.client.base import EngineClient
from lora_serve.core.config import AdapterConfig, ServerConfig
from lora_serve.core.errors import LoraServeError, contained
from lora_serve.core.figures import TierStats
from lora_serve.core.messages import Resize
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.stats import EngineStats, ReplicaState, ReplicaStats
from lora_serve.server.background.caller_texts import AdapterTemplates, GrammarChecks
from lora_serve.server.background.tasks import BackgroundTasks, FairThreads, Registering, Staging
from lora_serve.server.large_bodies import LargeBodies
from lora_serve.server.lifecycle import EngineHistory, Lifecycle, ServerState
from lora_serve.server.overflow.decision import Overflow
from lora_serve.server.telemetry.metrics import Activity, Metrics
from lora_serve.server.telemetry.tracing import RequestTraces
from lora_serve.tenancy.audit_log import AuditLog
from lora_serve.tenancy.authenticator import Authenticator, KeyTable
from lora_serve.tenancy.metering import Meter
from lora_serve.tenancy.quotas import Quotas
from lora_serve.text.tokenizer import TextModel

T = TypeVar("T")


class ChangedLimits:
    """The tiers' limits as PUT /admin/engine changed them: used on the event loop, and forgotten at a restart."""

    def __init__(self) -> None:
        self._changes: dict[str, int] = {}  # by the field's name in AdapterConfig

    def change(self, command: Resize) -> None:
        """Note limits that the engine has taken over."""
        self._changes |= {name: value for name, value in asdict(command).items() if value is not None}

    def of(self, config: AdapterConfig) -> AdapterConfig:
        """The settings with the changes."""
        return replace(config, **self._changes) if self._changes else config  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Services:
    """Made by the wiring, used on the event loop. Registrations run on `registrations`, short edits on any thread."""

    client: EngineClient
    catalog: Catalog
    registry: Registry
    verifier: AdapterVerifier
    staging: Staging
    text: TextModel
    grammars: GrammarChecks
    spec: ModelSpec
    config: ServerConfig
    adapter_config: AdapterConfig
    authenticator: Authenticator
    keys: KeyTable
    metrics: Metrics
    store: StoreFigures | None = None  # None: the store's figures are not shown
    store_monitor: StoreMonitor | None = None  # None: the store counts as one that can be written
    traces: RequestTraces | None = None  # None: no request is traced
    limits: ChangedLimits = field(default_factory=ChangedLimits)
    registrations: FairThreads = field(default_factory=lambda: FairThreads("registry", num_threads=4))
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    history: EngineHistory = field(default_factory=EngineHistory)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    quotas: Quotas = field(default_factory=Quotas)
    meter: Meter = field(default_factory=lambda: Meter(None))  # the default: in memory only
    registering: Registering = field(default_factory=Registering)
    activity: Activity = field(default_factory=Activity)
    templates: AdapterTemplates = field(default_factory=AdapterTemplates)
    overflow: Overflow | None = None  # None: nothing leaves this server
    audit: AuditLog = field(default_factory=lambda: AuditLog(None))  # the default: nothing is kept

    async def edit(self, change: Callable[[], T], name: str) -> T:
        """Run a short change of the catalog to its end, even if the caller leaves. Raises what `change` raises, and
        InternalError in place of errors that would end a thread.
        """
        return await self.background.complete(asyncio.to_thread(contained()(change)), name)

    @property
    def adapter_limits(self) -> AdapterConfig:
        """The adapter settings, with the limits that PUT /admin/engine has changed since."""
        return self.limits.of(self.adapter_config)

    async def engine_stats(self) -> EngineStats | None:
        """The engine's figures; None: it cannot be asked."""
        try:
            return await self.client.stats()
        except LoraServeError:
            return None

    async def store_tiers(self) -> dict[str, TierStats]:
        """Figures of the tiers below host memory; empty if the store cannot tell them."""
        if self.store is None:
            return {}
        try:
            return await asyncio.to_thread(self.store.tiers)  # it may have to wait for a loader's thread
        except LoraServeError:
            return {}

    def places_of(self, digest: str) -> tuple[str, ...]:
        """The tiers below host memory that hold the adapter."""
        return ("disk",) if self.store is None else self.store.places_of(digest)

    @property
    def store_problem(self) -> str | None:
        """The reason why the store takes no changes at present; None if it takes them."""
        return None if self.store_monitor is None else self.store_monitor.problem

    async def check_store(self, makes_room: bool) -> None:
        """See `StoreMonitor.check`: called before a change."""
        if self.store_monitor is not None and (makes_room or self.store_problem is not None):
            await asyncio.to_thread(self.store_monitor.check, makes_room)

    @property
    def base_name(self) -> str:
        """The base model's name on the wire."""
        return self.config.base_name


SERVICES = web.AppKey("services", Services)


ONLY_ENGINE = "0"  # as /metrics has it in the label `engine`


_STATES = {
    ServerState.STARTING: ReplicaState.STARTING,
    ServerState.READY: ReplicaState.READY,
    ServerState.DRAINING: ReplicaState.DRAINING,
    ServerState.FAILED: ReplicaState.LOST,
}


def replicas_of(services: Services, stats: EngineStats | None) -> tuple[ReplicaStats, ...]:
    """The fleet's replicas. A server without a fleet has one, which is its own; `stats` None: it does not answer."""
    if stats is not None and stats.replicas is not None:
        return stats.replicas
    lifecycle = services.lifecycle
    return (
        ReplicaStats(
            ONLY_ENGINE,
            "localhost",
            _STATES[lifecycle.state],
            lifecycle.reason,
            __version__,
            services.spec.fingerprint,
            time.monotonic() - lifecycle.engine_since,
            0 if stats is None else stats.num_running + stats.num_waiting,
            stats=stats,
        ),
    )
