"""An engine client without an engine: deterministic answers, scripted errors and delays. For tests of its users.

Unscripted, token ids and vectors are a hash of the prompt, the adapter's digest, the seed and the position, so that any
mix-up of prompts, adapters or rows shows in the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import EngineLostError, LoraServeError, NotReadyError
from lora_serve.core.live import EngineView, name_replica
from lora_serve.core.messages import (
    AdapterCommand,
    Event,
    Evict,
    FinishEvent,
    LostEvent,
    Pin,
    PooledEvent,
    Prefetch,
    PromptEvent,
    Resize,
    SmokeTest,
    SmokeTestResult,
    Timings,
    TokenEvent,
    TokenLogprobs,
    Tune,
    Unpin,
)
from lora_serve.core.request import FinishReason, InferenceRequest
from lora_serve.core.setting_groups.engine import BatchLimits, QueueLimits
from lora_serve.core.stats import (
    AdapterCounters,
    BatcherStats,
    EngineStats,
    ReplicaState,
    ReplicaStats,
    SlotInfo,
    merged,
)
from lora_serve.engine.queue_gate import QueueGate
from tests.mock_view import MockView

MAX_LORAS = 4
TIMINGS = Timings(queue=0.001, load=0.002, prefill=0.003)


@dataclass(frozen=True, slots=True)
class MockReply:
    """The answer to one request. Times are seconds."""

    token_ids: Sequence[int] | None = None  # None: derived by hash, max_tokens of them
    error: LoraServeError | None = None
    error_after: int | None = None  # tokens before the error; None: instead of the PromptEvent
    lost_after: Sequence[int] = ()  # tokens of tries before this one: each ends with a LostEvent
    delay: float = 0.0  # before the PromptEvent and before each token
    gate: asyncio.Event | None = None  # the PromptEvent waits for it
    has_started: bool = False  # while `gate` is closed the request is in no queue: its prompt is being computed
    finish: FinishReason | None = None  # None: by stop ids, then by max_tokens
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    fell_back: bool = False  # the request's fallback answers
    pooled: Sequence[float] | None = None  # of a request with `pooling`; None: derived by hash


@dataclass(slots=True)
class _Row:
    request: InferenceRequest
    produced: int = 0
    waiting: bool = True
    is_answered: bool = False


@dataclass
class MockEngineClient:
    """Fulfils EngineClient. `script` maps a request to its reply."""

    vocab_size: int
    script: Callable[[InferenceRequest], MockReply] = field(default=lambda request: MockReply())
    eos_token_ids: tuple[int, ...] = ()
    gate: QueueGate = field(default_factory=lambda: QueueGate(QueueLimits()))
    is_there: bool = True
    dimension: int = 4  # of unscripted vectors
    requests: list[InferenceRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # request ids whose iterator was closed early
    begun_again: list[str] = field(default_factory=list)  # request ids, once for each LostEvent that was read past
    commands: list[AdapterCommand] = field(default_factory=list)
    command_error: LoraServeError | None = None  # raised by `adapters`
    max_loras: int = MAX_LORAS
    limits: BatchLimits = field(default_factory=lambda: BatchLimits(max_num_seqs=8, max_num_batched_tokens=64))
    running: bool = False
    replicas: tuple[str, ...] = ()  # of the fleet that it plays: pinned adapters are on all of them, others on one

    def __post_init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._resident: dict[str, AdapterRef] = {}
        self._pinned: set[str] = set()
        self._view = MockView()

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        """Record `request` and yield what the script says. Raises NotReadyError, and what the gate raises."""
        if not self.running:
            raise NotReadyError("The engine is stopped.")
        self.gate.enter((request,))
        self.requests.append(request)
        self._rows[request.request_id] = _Row(request)
        return self._events(request, self.script(request))

    def answered(self, request_id: str) -> None:
        if row := self._rows.get(request_id):
            row.is_answered = True

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        self.commands.append(command)
        if self.command_error is not None:
            raise self.command_error
        match command:
            case Prefetch(adapter):
                self._resident[adapter.digest] = adapter
            case Pin(adapter):
                self._resident[adapter.digest] = adapter
                self._pinned.add(adapter.digest)
            case Unpin(digest):
                self._pinned.discard(digest)
            case Evict(digest):
                self._resident.pop(digest, None)
            case Resize(max_loras):
                self.max_loras = max_loras or self.max_loras
            case Tune():
                self.limits = command.applied_to(self.limits)
            case SmokeTest():
                return SmokeTestResult(1.0, 0.0, 1.0)
        return None

    async def stats(self) -> EngineStats:
        if not self.replicas:
            return self._stats(list(self._rows.values()), list(self._resident.values()))
        return merged([self._replica(name) for name in self.replicas])

    async def watch(
        self, seen: Mapping[str, int], tenants: Collection[str] = (), *, in_full: bool = False
    ) -> list[EngineView]:
        """See `EngineClient.watch`; of a fleet the first replica does all that is to be seen. Raises NotReadyError."""
        if not self.running:
            raise NotReadyError("The engine is stopped.")
        name = self.replicas[0] if self.replicas else ""
        rows = [(row.request, row.produced, row.waiting) for row in self._rows.values()]
        look = self._view.look(seen.get(name, 0), rows, self._resident.values(), self._pinned, self.max_loras)
        return [name_replica(look, name)]

    def replica_of(self, digest: str) -> str:
        """The replica that holds the adapter, unless it is pinned."""
        return self.replicas[int(hashlib.sha256(digest.encode()).hexdigest(), 16) % len(self.replicas)]

    def _replica(self, name: str) -> ReplicaStats:
        rows = [row for row in self._rows.values() if self.replica_of(_lead(row.request)) == name]
        pinned, residents = self._pinned, self._resident.items()
        held = [ref for digest, ref in residents if digest in pinned or self.replica_of(digest) == name]
        stats = self._stats(rows, held)
        return ReplicaStats(name, "127.0.0.1", ReplicaState.READY, num_requests=len(rows), stats=stats)

    def _stats(self, rows: list[_Row], held: list[AdapterRef]) -> EngineStats:
        waiting = [row.request for row in rows if row.waiting]
        slots = tuple(
            SlotInfo(index, 1, ref.digest, ref.name, ref.num_bytes, 0, ref.digest in self._pinned)
            for index, ref in enumerate(held)
        )
        return EngineStats(
            num_running=len(rows) - len(waiting),
            num_waiting=len(waiting),
            running_adapters=tuple(ref.name for ref in held),
            waiting_adapters=tuple(ref.name for request in waiting for ref in request.refs),
            max_loras=self.max_loras,
            num_blocks=100,
            num_free_blocks=100 - len(rows),
            block_size=16,
            num_preemptions=0,
            slots=slots,
            host_digests=tuple(ref.digest for ref in held),
            loading_digests=(),
            adapters={ref.digest: AdapterCounters({ref.name: 1}, {ref.name: 1}, loads=1) for ref in held},
            batcher=BatcherStats(
                self.limits, self.limits.max_num_seqs, self.limits.max_num_batched_tokens, self.limits.batch_wait
            ),
        )

    async def _events(self, request: InferenceRequest, reply: MockReply) -> AsyncIterator[Event]:
        row = self._rows[request.request_id]
        reason = "abort"
        try:
            if reply.has_started:
                self.gate.start(request.request_id)
            if reply.gate is not None:
                await reply.gate.wait()
            await asyncio.sleep(reply.delay)
            if reply.error is not None and reply.error_after is None:
                reason = "error"
                raise reply.error
            row.waiting = False
            self.gate.start(request.request_id)
            self._resident.update({ref.digest: ref for ref in request.refs})
            prompt = _prompt_logprobs(request)
            replica = self.replica_of(_lead(request)) if self.replicas else ""
            for num_tokens in reply.lost_after:
                yield PromptEvent(request.request_id, TIMINGS, prompt, reply.num_cached_tokens, replica=replica)
                for token_id in self._tokens(request, reply)[:num_tokens]:
                    await asyncio.sleep(reply.delay)
                    yield TokenEvent(request.request_id, token_id, self._logprobs(request, token_id))
                yield LostEvent(request.request_id, EngineLostError("The engine stopped unexpectedly; try again.", 1.0))
                self.begun_again.append(request.request_id)
            yield PromptEvent(request.request_id, TIMINGS, prompt, reply.num_cached_tokens, reply.fell_back, replica)
            if request.pooling is not None:
                yield self._pooled(request, reply)
            for token_id in self._tokens(request, reply):
                if reply.error is not None and row.produced == reply.error_after:
                    reason = "error"
                    raise reply.error
                await asyncio.sleep(reply.delay)
                row.produced += 1
                self._view.token(request, row.produced)
                yield TokenEvent(request.request_id, token_id, self._logprobs(request, token_id))
                sampling = request.sampling
                if token_id in sampling.ends(self.eos_token_ids) and row.produced >= sampling.min_tokens:
                    reason = FinishReason.STOP.value
                    yield FinishEvent(request.request_id, FinishReason.STOP, token_id)
                    return
            end = reply.finish or (FinishReason.LENGTH if request.pooling is None else FinishReason.STOP)
            reason = end.value
            yield FinishEvent(request.request_id, end, reply.stop_token_id)
        finally:
            del self._rows[request.request_id]
            self._view.ended(request, row.produced, "stop" if reason == "abort" and row.is_answered else reason)
            self.gate.leave(request.request_id)
            if reason == "abort":
                self.aborted.append(request.request_id)

    def _tokens(self, request: InferenceRequest, reply: MockReply) -> list[int]:
        limit = 0 if request.pooling is not None else request.sampling.max_tokens
        if reply.token_ids is not None:
            return list(reply.token_ids)[:limit]
        return [derived_token_id(request, position, self.vocab_size, reply.fell_back) for position in range(limit)]

    def _pooled(self, request: InferenceRequest, reply: MockReply) -> PooledEvent:
        values = reply.pooled
        if values is None:
            values = [
                derived_token_id(request, position, 2001, reply.fell_back) / 1000 - 1
                for position in range(self.dimension)
            ]
        return PooledEvent(request.request_id, struct.pack(f"<{len(values)}f", *values))

    def _logprobs(self, request: InferenceRequest, token_id: int) -> TokenLogprobs | None:
        count = request.sampling.logprobs
        return None if count is None else token_logprobs(token_id, count, self.vocab_size)


def _lead(request: InferenceRequest) -> str:
    """The digest that decides which replica runs the request."""
    return request.refs[0].digest if request.refs else request.request_id


def derived_token_id(request: InferenceRequest, position: int, vocab_size: int, fell_back: bool = False) -> int:
    """The unscripted token at `position` of the answer."""
    uses = request.fallback or () if fell_back else request.adapters
    adapters = "+".join(f"{use.scale}*{use.ref.digest}" for use in uses) or "base"
    words = f"{request.prompt_token_ids}|{adapters}|{request.sampling.seed}|{position}"
    if request.pooling is not None and request.pooling.token_type_ids:
        words += f"|{request.pooling.token_type_ids}"
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") % vocab_size


def token_logprobs(token_id: int, count: int, vocab_size: int) -> TokenLogprobs:
    """The chosen token is the best, with probability 1/2; the next ids follow with 1/4, 1/8, ..."""
    top = tuple(((token_id + index) % vocab_size, -math.log(2) * (index + 1)) for index in range(count))
    return TokenLogprobs(token_id, -math.log(2), 1, top)


def _prompt_logprobs(request: InferenceRequest) -> tuple[TokenLogprobs | None, ...] | None:
    count = request.sampling.prompt_logprobs
    if count is None:
        return None
    ids = request.prompt_token_ids
    return (None, *(token_logprobs(token_id, count, max(ids) + count + 2) for token_id in ids[1:]))
