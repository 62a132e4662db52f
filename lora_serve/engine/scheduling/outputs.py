"""A step's outputs, taken in: each row's tokens, those that its grammar forces, their events and how they count."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lora_serve.core.batch import NextToken, Row, RowOutput
from lora_serve.core.errors import InternalError, LoraServeError
from lora_serve.core.messages import ErrorEvent, Event, FinishEvent, TokenLogprobs
from lora_serve.core.request import FinishReason
from lora_serve.engine.batcher import Batcher
from lora_serve.engine.blocks import PrefixCache
from lora_serve.engine.constraints import TokenConstraint
from lora_serve.engine.policies.base import Policy
from lora_serve.engine.scheduling.drafting import Drafting
from lora_serve.engine.sequence import Ends, Sequence, finish_of, pooled_events, token_events

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Outputs:
    """Takes in the outputs of rows; a sequence that ends so is released by the caller."""

    _prefix_cache: PrefixCache
    _policy: Policy
    _batcher: Batcher
    _drafting: Drafting
    _ends: Ends
    num_forced: int = 0  # tokens that were not sampled, as a grammar left no choice

    def take(self, sequence: Sequence, row: Row, output: RowOutput, now: float) -> list[Event]:
        """The events of one row's output; the last one tells if the sequence is over (`is_end`)."""
        if output.error is not None:
            self._prefix_cache.invalidate(sequence)
            return [ErrorEvent(sequence.request.request_id, output.error)]
        sequence.add_prompt_logprobs(row.start, output.prompt_logprobs)
        sequence.num_computed += len(row.token_ids) - row.num_draft
        self._prefix_cache.publish(sequence)
        self._policy.served(sequence, sequence.newly_served(row.start), int(output.token_id is not None))
        if output.pooled is not None:
            self._note_time(sequence, now)
            return pooled_events(sequence, output.pooled, now)
        if output.token_id is None:
            return []
        self._note_time(sequence, now)
        return self._take_tokens(sequence, row, NextToken(output.token_id, output.logprobs), output.following, now)

    def _take_tokens(
        self, sequence: Sequence, row: Row, first: NextToken, following: tuple[NextToken, ...], now: float
    ) -> list[Event]:
        num_before, num_accepted = len(sequence.token_ids), 0
        events = self._take_token(sequence, first, now)
        for token in following:
            if sequence.num_new > 1 or is_end(events[-1]):
                break  # what was guessed behind the end, or in place of what the grammar forces, is of no use
            num_accepted += 1
            sequence.num_computed += 1  # the guess before it was right: its K and V are there
            self._prefix_cache.publish(sequence)
            self._policy.served(sequence, 0, 1)
            events += self._take_token(sequence, token, now)
        self._drafting.learn(sequence, num_before, row.num_draft, num_accepted, is_last=is_end(events[-1]))
        return events

    def _take_token(self, sequence: Sequence, token: NextToken, now: float) -> list[Event]:
        try:
            events = continue_with(sequence, token.token_id, token.logprobs, self._ends, now)
        except LoraServeError as error:
            return [ErrorEvent(sequence.request.request_id, error)]
        except Exception:  # of the row's grammar, say: the rows beside it go on
            _log.exception("a row's next token could not be taken in")
            return [ErrorEvent(sequence.request.request_id, InternalError("The answer could not be continued."))]
        if num_forced := sequence.num_new - 1:
            self._policy.served(sequence, 0, num_forced)
            self.num_forced += num_forced
        return events

    def _note_time(self, sequence: Sequence, now: float) -> None:
        if sequence.last_token_at is None:
            self._batcher.observe_first_token(now - sequence.ready_at)
            sequence.first_token_at = now
        else:
            self._batcher.observe_token(now - sequence.last_token_at)
        sequence.last_token_at = now


def is_end(event: Event) -> bool:
    """True for the last event of its request."""
    return isinstance(event, FinishEvent | ErrorEvent)


def continue_with(
    sequence: Sequence, token: int, logprobs: TokenLogprobs | None, ends: Ends, now: float
) -> list[Event]:
    """Appends the token, and those that follow it without a choice; returns their events, the end's last.

    Raises LoraServeError if the sequence's grammar fails; then the token is appended all the same.
    """
    num_before = len(sequence.token_ids)
    events = token_events(sequence, token, logprobs, now)
    finish = finish_of(sequence, token, ends)
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
        finish = finish_of(sequence, token, ends)
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
