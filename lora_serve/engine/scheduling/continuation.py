"""A sequence's newest token, those that its grammar forces after it, and its end if one of them is the last."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.messages import Event, FinishEvent, TokenLogprobs
from lora_serve.core.model_spec import ONE_ROPE, LongRope
from lora_serve.core.request import FinishReason
from lora_serve.engine.constraints import TokenConstraint
from lora_serve.engine.sequence import Sequence, finish_of, token_events


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends that a sequence has beside those of its request."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int
    long_rope: LongRope = ONE_ROPE  # when a sequence is computed anew


def continue_with(
    sequence: Sequence, token: int, logprobs: TokenLogprobs | None, ends: Ends, now: float
) -> list[Event]:
    """Appends the token, and those that follow it without a choice; returns their events, the end's last.

    Raises LoraServeError if the sequence's grammar fails; then the token is appended all the same.
    """
    num_before = len(sequence.token_ids)
    events = token_events(sequence, token, logprobs, now)
    finish = finish_of(sequence, token, ends.eos_token_ids, ends.max_model_len)
    if sequence.constraint is not None and len(sequence.token_ids) > num_before:
        finish = _constrained(sequence, sequence.constraint, events, finish, ends, now)
    sequence.num_new = max(1, len(sequence.token_ids) - num_before)
    return events if finish is None else [*events, finish]


def _constrained(
    sequence: Sequence,
    constraint: TokenConstraint,
    events: list[Event],
    finish: FinishEvent | None,
    ends: Ends,
    now: float,
) -> FinishEvent | None:
    """The end of a sequence that obeys a grammar, whose newest token was sampled. An output that is complete as it
    reaches its greatest length was not cut.
    """
    if finish is not None and finish.reason is FinishReason.STOP:
        return finish
    constraint.advance(sequence.token_ids[-1:])
    if constraint.is_over:
        return _stop(sequence, ends)
    if finish is not None:
        return finish
    forced = constraint.forced()
    for count, token in enumerate(forced, 1):
        events += token_events(sequence, token, _certain(sequence, token), now)
        finish = finish_of(sequence, token, ends.eos_token_ids, ends.max_model_len)
        if finish is not None:
            forced = forced[:count]
            break
    if not forced or (finish is not None and finish.reason is FinishReason.STOP):
        return finish
    constraint.advance(forced)
    return _stop(sequence, ends) if constraint.is_over else finish


def _stop(sequence: Sequence, ends: Ends) -> FinishEvent:
    """The end of an output that its grammar completes; also where the request ignores the end of the text."""
    last, request = sequence.token_ids[-1], sequence.request
    is_end = last in ends.eos_token_ids + request.sampling.eos_token_ids
    return FinishEvent(request.request_id, FinishReason.STOP, last if is_end else None)


def _certain(sequence: Sequence, token: int) -> TokenLogprobs | None:
    """The log-probabilities of a token that nothing else could have been, if they were asked for."""
    num_top = sequence.request.sampling.logprobs
    return None if num_top is None else TokenLogprobs(token, 0.0, 1, ((token, 0.0),) if num_top else ())
