"""A sequence: the one mutable record of a request inside the engine, owned by the scheduler; and its events."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import RowAdapter, SlotRef
from lora_serve.core.constraints import TokenConstraint
from lora_serve.core.messages import (
    ErrorEvent,
    Event,
    FinishEvent,
    PooledEvent,
    PromptEvent,
    Timings,
    TokenEvent,
    TokenLogprobs,
)
from lora_serve.core.model_spec import ONE_ROPE, LongRope
from lora_serve.core.request import AdapterUse, FinishReason, InferenceRequest
from lora_serve.engine.drafter import Drafter


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """The blocks of a preempted sequence in host memory: of each kind of layers blocks `first`, first + 1, ... of its
    first `num_tokens` tokens. It had dropped `num_dropped` blocks.
    """

    first: tuple[int, ...]
    host_blocks: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends that a sequence has beside those of its request."""

    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = sys.maxsize
    long_rope: LongRope = ONE_ROPE  # when a sequence is computed anew


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens so far and its resources: KV blocks and slots while it runs, at most host blocks while it
    waits.
    """

    sequence_id: int  # also the order of arrival
    request: InferenceRequest
    seed: int
    token_ids: list[int]  # prompt, then output
    adapters: tuple[AdapterUse, ...]  # that answer: the request's own, or its fallback
    fallback: tuple[AdapterUse, ...] | None = None  # that may still answer in their place
    ends: Ends = field(default_factory=Ends)  # the model's
    wanted: tuple[AdapterRef, ...] = ()  # of the residency, until they are given back
    num_computed: int = 0  # tokens whose K and V are cached
    num_cached: int = 0  # of those, found in the prefix cache at the first admission
    num_published: int = 0  # of those, in blocks that were offered to the prefix cache
    blocks: list[int] = field(default_factory=list)
    windowed_blocks: list[int] = field(default_factory=list)  # of the second kind of layers, as many; see `BlockTables`
    num_dropped: int = 0  # the first in layers with a window, which no later token sees: given back, and 0 there
    swapped: SwappedBlocks | None = None
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were asked for
    slots: tuple[SlotRef, ...] = ()  # while it runs, one per adapter, in their order
    row_adapters: tuple[tuple[SlotRef, ...], tuple[RowAdapter, ...]] | None = None  # as its last row had them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_passed_over: int = 0  # adapter rows admitted from behind it while this one waited for slots
    waited: float = 0.0  # seconds in all, when it last began to run
    waiting_since: float = 0.0  # while it waits: its arrival, moved on by the time that it ran before a preemption
    constraint: TokenConstraint | None = None  # None too: its grammar is being compiled
    compiled_at: float | None = None  # when its constraint was there
    num_new: int = 1  # tokens that its last step brought and that are not computed: the last sampled, those forced then
    drafter: Drafter | None = None  # once it decodes, where guesses are made
    num_served: int = 0  # tokens of its prompt that were computed for it once
    num_preemptions: int = 0
    draws_widely: bool = False  # a graph could not draw a token of it: its steps are not launched ahead
    fell_back: bool = False
    cold_wait_is_over: bool = False  # with its own cold adapters
    was_cold: bool = False
    cold_until: float | None = None  # when its adapters were first seen on this host; None while one is not
    first_scheduled: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def tables(self) -> tuple[list[int], list[int]]:
        """The blocks of it, by kind of layers."""
        return self.blocks, self.windowed_blocks

    @property
    def refs(self) -> tuple[AdapterRef, ...]:
        return tuple(use.ref for use in self.adapters)

    @property
    def is_pooling(self) -> bool:
        """True if one vector answers the request in one step: it needs no KV block and is never cut into chunks."""
        return self.request.pooling is not None

    @property
    def has_run(self) -> bool:
        """True once the sequence was admitted; if it waits after that, it was preempted."""
        return self.first_scheduled is not None

    @property
    def account(self) -> str:
        """The account whose share of the engine the request uses."""
        return self.request.account or self.request.tenant

    @property
    def ready_at(self) -> float:
        """The time since which it could run, seconds of time.monotonic(); infinity while it waits for adapters or for
        its grammar.
        """
        times = [self.request.arrival_time]
        if self.was_cold:
            times.append(math.inf if self.cold_until is None else self.cold_until)
        if self.request.grammar is not None:
            times.append(math.inf if self.compiled_at is None else self.compiled_at)
        return max(times)

    @property
    def is_compiling(self) -> bool:
        """True while it waits for its grammar."""
        return self.request.grammar is not None and self.constraint is None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_long(self) -> bool:
        """True if its positions have the model's long factors; K and V of its tokens are others then."""
        return self.ends.long_rope.is_long(self.num_prompt, len(self.token_ids))

    @property
    def num_remaining(self) -> int:
        """Tokens known but not yet computed: 1 for a sequence that decodes, more if its grammar forced some."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True if nothing but the tokens of its last step is left to compute: no prompt, and no recomputation."""
        return self.num_remaining <= self.num_new

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True before the first token, if they were asked for: after a preemption they are known already."""
        return self.request.sampling.prompt_logprobs is not None and self.num_output == 0

    @property
    def num_steps_left(self) -> int:
        """The most steps left, those of the prompt not counted."""
        return 0 if self.is_pooling else self.request.sampling.max_tokens - self.num_output

    def add_prompt_logprobs(self, start: int, found: tuple[TokenLogprobs, ...]) -> None:
        """Adds log-probabilities of the tokens after position `start`; some are known already after a preemption."""
        self.prompt_logprobs.extend(found[len(self.prompt_logprobs) - start :])

    def newly_served(self, start: int) -> int:
        """Prompt tokens computed since position `start` for the first time: recomputing is no service."""
        before = max(start, self.num_served)
        self.num_served = max(self.num_served, min(self.num_computed, self.num_prompt))
        return max(0, self.num_served - before)

    @property
    def step_order(self) -> tuple[int, float]:
        """The sort key within a step: rows of one token first, which take the least of it, then those with tokens that
        their grammar forced; among equals those first that were left out of the last step.
        """
        if not self.is_decoding:
            return (2, 0.0)
        return (int(self.num_remaining > 1), self.last_token_at or 0.0)

    def timings(self, now: float) -> Timings:
        """The parts of the time to the first token, which is now, in seconds."""
        arrival = self.request.arrival_time
        scheduled = self.first_scheduled if self.first_scheduled is not None else now
        load = max(0.0, self.cold_until - arrival) if self.was_cold and self.cold_until is not None else 0.0
        return Timings(queue=max(0.0, scheduled - arrival - load), load=load, prefill=max(0.0, now - scheduled))


def is_end(event: Event) -> bool:
    """True for the last event of its request."""
    return isinstance(event, FinishEvent | ErrorEvent)


def pooled_events(sequence: Sequence, values: bytes, now: float) -> list[Event]:
    request_id = sequence.request.request_id
    return [
        _prompt_event(sequence, now), PooledEvent(request_id, values), FinishEvent(request_id, FinishReason.STOP),
    ]  # fmt: skip


def continue_with(sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> list[Event]:
    """Appends the token, and those that follow it without a choice; returns their events, the end's last.

    Raises LoraServeError if the sequence's grammar fails; then the token is appended all the same.
    """
    num_before = len(sequence.token_ids)
    events = _token_events(sequence, token, logprobs, now)
    finish = _finish_of(sequence, token)
    if sequence.constraint is not None and len(sequence.token_ids) > num_before:
        finish = _constrained(sequence, sequence.constraint, events, finish, now)
    sequence.num_new = max(1, len(sequence.token_ids) - num_before)
    return events if finish is None else [*events, finish]


def _constrained(
    sequence: Sequence, constraint: TokenConstraint, events: list[Event], finish: FinishEvent | None, now: float
) -> FinishEvent | None:
    """The end of a sequence that obeys a grammar, whose newest token was sampled. An output that is complete as it
    reaches its greatest length was not cut.
    """
    if finish is not None and finish.reason is FinishReason.STOP:
        return finish
    constraint.advance(sequence.token_ids[-1:])
    if constraint.is_over:
        return _stop(sequence)
    if finish is not None:
        return finish
    forced = constraint.forced()
    for count, token in enumerate(forced, 1):
        events += _token_events(sequence, token, _certain(sequence, token), now)
        finish = _finish_of(sequence, token)
        if finish is not None:
            forced = forced[:count]
            break
    if not forced or (finish is not None and finish.reason is FinishReason.STOP):
        return finish
    constraint.advance(forced)
    return _stop(sequence) if constraint.is_over else finish


def _stop(sequence: Sequence) -> FinishEvent:
    """The end of an output that its grammar completes; also where the request ignores the end of the text."""
    last, request = sequence.token_ids[-1], sequence.request
    is_end = last in sequence.ends.eos_token_ids + request.sampling.eos_token_ids
    return FinishEvent(request.request_id, FinishReason.STOP, last if is_end else None)


def _certain(sequence: Sequence, token: int) -> TokenLogprobs | None:
    """The log-probabilities of a token that nothing else could have been, if they were asked for."""
    num_top = sequence.request.sampling.logprobs
    return None if num_top is None else TokenLogprobs(token, 0.0, 1, ((token, 0.0),) if num_top else ())


def _prompt_event(sequence: Sequence, now: float) -> PromptEvent:
    wanted = sequence.request.sampling.prompt_logprobs is not None
    prompt = (None, *sequence.prompt_logprobs) if wanted else None
    request_id = sequence.request.request_id
    return PromptEvent(request_id, sequence.timings(now), prompt, sequence.num_cached, sequence.fell_back)


def _token_events(sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> list[Event]:
    """Appends the token and returns its events. The end comes from `_finish_of`."""
    request = sequence.request
    events: list[Event] = [_prompt_event(sequence, now)] if sequence.num_output == 0 else []
    if request.sampling.max_tokens > 0:
        sequence.token_ids.append(token)
        events.append(TokenEvent(request.request_id, token, logprobs))
    return events


def _finish_of(sequence: Sequence, token: int) -> FinishEvent | None:
    """The request's end, if its newest token `token` is its last."""
    request, params, ends = sequence.request, sequence.request.sampling, sequence.ends
    if sequence.num_output >= params.min_tokens and params.max_tokens > 0 and token in params.ends(ends.eos_token_ids):
        return FinishEvent(request.request_id, FinishReason.STOP, token)
    if sequence.num_output >= params.max_tokens or len(sequence.token_ids) >= ends.max_model_len:
        return FinishEvent(request.request_id, FinishReason.LENGTH)
    return None
