"""Choices of one answer, run together: what every generating API does."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from lora_serve.core.errors import AdapterUnavailableError, InternalError
from lora_serve.core.messages import ErrorEvent, Event, FinishEvent, PooledEvent, PromptEvent, TokenEvent
from lora_serve.core.request import InferenceRequest
from lora_serve.server.context import RequestContext
from lora_serve.server.openai.answer import Admitted, Answer, Piece, StopRules
from lora_serve.server.openai.merge import merge
from lora_serve.server.permits import Permit, permitted
from lora_serve.server.services import Services
from lora_serve.server.telemetry.metrics import SequenceTimer

ChoiceEvents = AsyncGenerator[tuple[int, Admitted | Piece], None]


async def run_choices(
    services: Services, context: RequestContext, requests: Sequence[InferenceRequest], rules: StopRules
) -> ChoiceEvents:
    """(number of the choice, Admitted or Piece) as they come; each choice ends with a Piece with a finish_reason.

    Either all choices may wait for their turn or none is begun: RateLimitedError, QueueFullError, TenantQueueFullError.
    Leaving early, or an error of one choice, aborts all of them. The engine lets the same adapters answer all choices
    that may fall back; should it ever not, no answer is given, as its headers could not tell who it is of.
    """
    admitted_at: float | None = None
    outcomes: set[bool] = set()
    async with permitted(services, context, requests) as permit:
        sources = [_run_choice(services, context, request, rules, permit) for request in requests]
        with services.client.gate.entered(requests, permit.lines, permit.use.started):
            async with aclosing(merge(sources)) as events:
                async for number, event in events:
                    if isinstance(event, Admitted):
                        admitted_at = admitted_at or time.monotonic()
                        permit.use.admitted(number, event.timings, event.num_cached_tokens)
                        yield number, note_admitted(context, event, outcomes)
                    else:
                        context.num_output_tokens += len(event.token_ids)
                        permit.use.generated(len(event.token_ids))
                        if event.finish_reason is not None:
                            permit.use.ended(number)
                        yield number, event
    context.decode = time.monotonic() - (admitted_at or time.monotonic())


def note_admitted(context: RequestContext, event: Admitted, outcomes: set[bool]) -> Admitted:
    """Note who answers; `outcomes` collects whether the choices fell back."""
    if event.fell_back is not None:
        outcomes.add(event.fell_back)
    if len(outcomes) > 1:
        raise AdapterUnavailableError("The adapter arrived while its fallback was answering; try again.")
    context.admitted(event.timings, event.fell_back is True)
    return replace(event, model=context.answerer.model if context.answerer else "")


async def _run_choice(
    services: Services, context: RequestContext, request: InferenceRequest, rules: StopRules, permit: Permit
) -> AsyncGenerator[Admitted | Piece, None]:
    adapter = request.adapters[0].ref if request.adapters else None  # one with tokens of its own is alone
    answer = Answer(services.text_of(adapter), request, rules, services.spec.eos_token_ids)
    with services.metrics.sequence(request.tenant, context.started, len(request.prompt_token_ids)) as timer:
        # Leaving the engine's iterator is the abort, so it must be closed here and now, not by the garbage collector.
        async with permit.row(request), aclosing(_inferred(services, request)) as events:
            async for event in events:
                made = _made_of(request, event, answer, timer)
                yield made
                if isinstance(made, Piece) and made.finish_reason is not None:
                    timer.finished(made.finish_reason)
                    return
    raise InternalError(f"The engine left {request.request_id} without an end.")


def _inferred(services: Services, request: InferenceRequest) -> AsyncGenerator[Event, None]:
    return cast(AsyncGenerator[Event, None], services.client.infer(request))


def _made_of(request: InferenceRequest, event: Event, answer: Answer, timer: SequenceTimer) -> Admitted | Piece:
    match event:
        case PromptEvent():
            timer.admitted(event.timings)
            fell_back = None if request.fallback is None else event.fell_back
            return Admitted(event.timings, event.prompt_logprobs, event.num_cached_tokens, fell_back)
        case FinishEvent():
            return answer.finish(event)
        case ErrorEvent():
            raise event.error
        case TokenEvent():
            timer.token()
            return answer.token(event)
        case PooledEvent():
            raise InternalError(f"The engine pooled {request.request_id}, which was to be continued.")
