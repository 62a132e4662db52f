"""Who may begin, and what it cost: around every answer, whatever way it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from lora_serve.core.request import InferenceRequest
from lora_serve.core.tenant import LOCAL_CALLER, Caller
from lora_serve.engine.queue_gate import WaitingLimit
from lora_serve.server.context import RequestContext
from lora_serve.server.request_use import RequestUse
from lora_serve.server.services import Services
from lora_serve.tenancy.quotas.concurrency import ConcurrencyLimit, ConcurrencyLimiter
from lora_serve.tenancy.quotas.quotas import concurrency_limits, waiting_limits
from lora_serve.tenancy.usage.figures import UsageKey


@dataclass(frozen=True, slots=True)
class Permit:
    """What an answer may do, and where it counts what it does."""

    lines: tuple[WaitingLimit, ...]  # for the engine's gate
    use: RequestUse
    _concurrency: ConcurrencyLimiter
    _limits: tuple[ConcurrencyLimit, ...]

    def row(self, request: InferenceRequest) -> AbstractAsyncContextManager[None]:
        """The place of one of its rows, for as long as the block lasts. Raises RequestTimeoutError."""
        return self._concurrency.held(self._limits, request.deadline)


@asynccontextmanager
async def permitted(
    services: Services, context: RequestContext, requests: Sequence[InferenceRequest]
) -> AsyncIterator[Permit]:
    """Leaving the block is the one way on which tokens are given back and use is metered. Raises RateLimitedError."""
    caller, use = context.caller or LOCAL_CALLER, RequestUse(requests)
    reservation = await services.quotas.reserve(caller, use.max_tokens)
    if reservation is not None:
        context.rate_limits = reservation.standings
    try:
        yield Permit(waiting_limits(caller), use, services.quotas.concurrency, concurrency_limits(caller))
    finally:
        services.quotas.settle(reservation, use.num_tokens)
        _meter(services, context, requests[0] if requests else None, caller, use)


def _meter(
    services: Services, context: RequestContext, request: InferenceRequest | None, caller: Caller, use: RequestUse
) -> None:
    """For whoever asked; who acts for others' tenants is metered as they are."""
    figures, answerer = use.figures(), context.answerer
    if figures is None or answerer is None or request is None:
        return
    tenant = (request.account or caller.tenant) if caller.sees_all else caller.tenant
    version, digest = "+".join(answerer.versions), "+".join(answerer.digests)
    services.meter.record(UsageKey(tenant, answerer.model, version, digest, caller.key_id), figures)
