"""The events that a step's output means to a request, and its end. Pure functions."""

from __future__ import annotations

from lora_serve.core.messages import Event, FinishEvent, PooledEvent, PromptEvent, TokenEvent, TokenLogprobs
from lora_serve.core.request import FinishReason
from lora_serve.engine.sequence import Sequence


def prompt_event(sequence: Sequence, now: float) -> PromptEvent:
    """The event that tells that the prompt is computed."""
    wanted = sequence.request.sampling.prompt_logprobs is not None
    prompt = (None, *sequence.prompt_logprobs) if wanted else None
    request_id = sequence.request.request_id
    return PromptEvent(request_id, sequence.timings(now), prompt, sequence.num_cached, sequence.fell_back)


def token_events(sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> list[Event]:
    """Appends the token and returns its events. The end is told by `finish_of`."""
    request = sequence.request
    events: list[Event] = [prompt_event(sequence, now)] if sequence.num_output == 0 else []
    if request.sampling.max_tokens > 0:
        sequence.token_ids.append(token)
        events.append(TokenEvent(request.request_id, token, logprobs))
    return events


def pooled_events(sequence: Sequence, values: bytes, now: float) -> list[Event]:
    """All events of a request with `pooling`."""
    request_id = sequence.request.request_id
    return [
        prompt_event(sequence, now), PooledEvent(request_id, values), FinishEvent(request_id, FinishReason.STOP),
    ]  # fmt: skip


def finish_of(sequence: Sequence, token: int, eos_token_ids: tuple[int, ...], max_model_len: int) -> FinishEvent | None:
    """The request's end, if its newest token `token` is its last."""
    request, params = sequence.request, sequence.request.sampling
    if sequence.num_output >= params.min_tokens:
        is_eos = token in eos_token_ids and not params.ignore_eos
        if params.max_tokens > 0 and (is_eos or token in params.stop_token_ids):
            return FinishEvent(request.request_id, FinishReason.STOP, token)
    if sequence.num_output >= params.max_tokens or len(sequence.token_ids) >= max_model_len:
        return FinishEvent(request.request_id, FinishReason.LENGTH)
    return None
