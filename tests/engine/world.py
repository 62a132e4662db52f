"""An engine over the fake runner, driven by hand: time, loads and steps happen when a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import MemoryPlan
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.errors import LoraServeError
from lora_serve.core.messages import (
    AdapterCommand,
    Command,
    ErrorEvent,
    Event,
    FinishEvent,
    PooledEvent,
    PromptEvent,
    TokenEvent,
)
from lora_serve.core.model_spec import ONE_ROPE, LongRope, ModelSpec, PoolingSpec
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.core.setting_groups.engine import BatchLimits
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import build_engine
from lora_serve.engine.loader import LoadFinished
from tests.engine.fake_constraints import FakeConstraints, chosen, steps_of
from tests.engine.fake_launcher import FakeLauncher, OrderedDevice
from tests.engine.fake_runner import FakeRunner, key_of_uses, next_token, pooled_vector

EOS = 1000  # never given by the fake runner


def adapter(name: str, num_bytes: int = 10) -> AdapterRef:
    """A reference whose digest is its name's."""
    return AdapterRef("default", name, 1, f"sha256:{name}", 8, num_bytes)


def key_of(request: InferenceRequest) -> object:
    """What the fake runner answers with: a digest, None, or a set of digests with their scales and starts."""
    return key_of_adapters(request.adapters)


def key_of_adapters(adapters: tuple[AdapterUse, ...]) -> object:
    return key_of_uses(sorted((use.ref.digest, use.scale, use.start) for use in adapters))


@dataclass
class VirtualClock:
    """Time that passes when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def batch_limits(
    rows: int,
    tokens: int,
    batch_wait: float = 0.0,
    preferred: int | None = None,
    ttft_target: float | None = None,
    itl_target: float | None = None,
) -> BatchLimits:
    """Limits of a batch whose times are given in seconds; a step may take as long as it likes."""
    return BatchLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        batch_wait_ms=1000 * batch_wait,
        preferred_batch_size=preferred,
        latency_target_ms=None if ttft_target is None else 1000 * ttft_target,
        inter_token_target_ms=None if itl_target is None else 1000 * itl_target,
        prompt_stretch=0,
    )


class World:
    """`auto_load`: a requested load, and a grammar, is finished before the next step. `clock`: seconds, e.g. of a
    `VirtualClock`. `window`: of all layers, or of the second kind, if that has `num_windowed` blocks.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        auto_load: bool = True,
        max_model_len: int = 200,
        clock: Callable[[], float] = time.monotonic,
        memory: MemoryPlan | None = None,
        pooling: PoolingSpec | None = None,
        constraints: FakeConstraints | None = None,
        next_token: Callable[[object, list[int]], int] = next_token,
        long_rope: LongRope = ONE_ROPE,
        launcher: FakeLauncher | None = None,
        window: int | None = None,
        num_windowed: int | None = None,
        **settings: Any,
    ) -> None:
        windows = (window,) if num_windowed is None else (None, window)
        if num_windowed is not None:
            memory = replace(memory or MemoryPlan(), num_windowed_blocks=num_windowed)
        defaults = {
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_loras": 4,
            "speculate": "off",
        }
        self.settings = Settings(model="fake", **{**defaults, **settings})
        given: dict[str, Any] = {"next_token": next_token, "long_rope": long_rope, "windows": windows}
        self.runner = FakeRunner(self.settings.block_size, **given)
        if launcher is not None:
            self.runner = launcher.device = OrderedDevice(self.settings.block_size, **given)
        spec = ModelSpec(
            "fake", "Fake", 2000, max_model_len, (EOS,), 1, {}, 0, "float32", "cpu", pooling=pooling,
            long_rope=long_rope, windows=windows,
        )  # fmt: skip
        self.loading: list[AdapterRef] = []
        self.engine = build_engine(
            self.runner,
            spec,
            num_blocks,
            self.settings.part(EngineConfig),
            self.settings.part(AdapterConfig),
            self.loading.append,
            clock,
            memory,
            constraints,
            launcher=launcher,
        )
        self.constraints = constraints or FakeConstraints()
        self.scheduler, self.residency = self.engine.scheduler, self.engine.residency
        self.num_blocks = num_blocks
        self.tokens: dict[str, list[int]] = {}
        self.vectors: dict[str, bytes] = {}
        self.ends: dict[str, Event] = {}
        self.prompts: dict[str, PromptEvent] = {}
        self.order: list[str] = []  # request ids in the order of their ends
        self._auto_load = auto_load
        self._clock = clock
        self._requests: dict[str, InferenceRequest] = {}
        self._replies: list[list[Any]] = []  # by call id

    def add(
        self, request_id: str, prompt: list[int], ref: AdapterRef | tuple[AdapterUse, ...] | None = None, **fields: Any
    ) -> InferenceRequest:
        """Submit; sampling fields and request fields are told apart by name."""
        uses = (AdapterUse(ref),) if isinstance(ref, AdapterRef) else ref or ()
        sampling = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__dataclass_fields__}
        request = InferenceRequest(
            request_id, tuple(prompt), SamplingParams(**{"max_tokens": 5, **sampling}), uses,
            **{"arrival_time": self._clock(), **fields},
        )  # fmt: skip
        self._requests[request_id] = request
        self.tokens[request_id] = []
        self.take(self.scheduler.add(request))
        if (sequence := self.scheduler._by_request.get(request_id)) is not None:
            self.runner.tenants[sequence.sequence_id] = request.tenant
        return request

    def command(self, command: AdapterCommand) -> list[Any]:
        """Give a command. The list gets the value or the error of its answer, once there is one."""
        self._replies.append([])
        self.engine.command(Command(len(self._replies) - 1, command))
        self._take_replies()
        return self._replies[-1]

    def step(self) -> bool:
        """One step, loads before it."""
        if self._auto_load:
            while self.loading:
                self.finish_load(self.loading[0])
            for request_id in list(self.constraints.compiling):
                self.finish_grammar(request_id)
        did_run, events = self.engine.step()
        self.take(events)
        self._take_replies()
        return did_run

    def run(self, limit: int = 3000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(limit):
            if not self.step() and not self.loading:
                return
        raise AssertionError("it does not come to an end")

    def run_until(self, request_id: str) -> None:
        """Steps until this request has ended."""
        while request_id not in self.ends:
            assert self.step(), "it stands still"

    def finish_load(self, ref: AdapterRef, error: LoraServeError | None = None, seconds: float = 0.0) -> None:
        """What a loader thread would post."""
        self.loading.remove(ref)
        message = LoadFinished(ref.digest, None if error else ref.digest, error, seconds)
        self.take(self.engine.load_finished(message))
        self._take_replies()

    def finish_grammar(self, request_id: str, error: LoraServeError | None = None) -> None:
        """What a thread that compiles would post."""
        self.take(self.engine.grammar_compiled(self.constraints.finished(request_id, error)))

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case PromptEvent():
                    self.prompts[event.request_id] = event
                case TokenEvent():
                    self.tokens[event.request_id].append(event.token_id)
                case PooledEvent():
                    assert event.request_id in self.prompts, "the prompt's event comes first"
                    self.vectors[event.request_id] = event.values
                case FinishEvent() | ErrorEvent():
                    assert event.request_id not in self.ends, "a request ended twice"
                    self.ends[event.request_id] = event
                    self.order.append(event.request_id)

    def _take_replies(self) -> None:
        for command, reply in self.engine.commands.take_replies():
            self._replies[command.call_id].append(reply.error or reply.value)

    def error(self, request_id: str) -> LoraServeError:
        event = self.ends[request_id]
        assert isinstance(event, ErrorEvent)
        return event.error

    def expected(self, request_id: str) -> list[int]:
        """The tokens the request must get, whoever ran beside it."""
        request, key = self._requests[request_id], self._answering_key(request_id)
        history = list(request.prompt_token_ids)
        steps = None if request.grammar is None else steps_of(request.grammar.text)
        for count in range(request.sampling.max_tokens if steps is None else len(steps)):
            token = self.runner.next_token(key, history)
            history.append(token if steps is None else chosen(token, steps[count]))
        output = history[len(request.prompt_token_ids) :]
        return output[: request.sampling.max_tokens]

    def expected_vector(self, request_id: str) -> bytes:
        """Likewise of a request with `pooling`."""
        request = self._requests[request_id]
        assert request.pooling is not None
        key = self._answering_key(request_id)
        return pooled_vector(key, list(request.prompt_token_ids), request.pooling.token_type_ids)

    def _answering_key(self, request_id: str) -> object:
        request = self._requests[request_id]
        fell_back = request_id in self.prompts and self.prompts[request_id].fell_back
        return key_of_adapters(request.fallback or ()) if fell_back else key_of(request)

    def check_answers(self) -> None:
        """Every request that ended well got its own tokens."""
        for request_id, event in self.ends.items():
            if isinstance(event, FinishEvent) and self._requests[request_id].pooling is not None:
                assert self.vectors[request_id] == self.expected_vector(request_id), request_id
            elif isinstance(event, FinishEvent):
                assert self.tokens[request_id] == self.expected(request_id), request_id
                self._check_prompt_logprobs(request_id)

    def _check_prompt_logprobs(self, request_id: str) -> None:
        request = self._requests[request_id]
        if request.sampling.prompt_logprobs is not None:
            told = self.prompts[request_id].prompt_logprobs or ()
            assert told[:1] == (None,), request_id
            assert [item and item.token_id for item in told[1:]] == list(request.prompt_token_ids[1:]), request_id

    def check_nothing_held(self) -> None:
        """All blocks free, no row on any slot, nothing wanted."""
        assert self.engine.stats().num_free_blocks == self.num_blocks
        assert all(slot.num_rows == 0 for slot in self.residency.slots.infos())
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.residency._wanted
        assert self.engine.stats().swap.num_used == 0
