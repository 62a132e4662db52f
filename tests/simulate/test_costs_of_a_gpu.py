"""The defaults for CUDA at the costs of a GPU, with users who each send their next request when the last one ended."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import EngineConfig
from lora_serve.core.flags import default_on_cuda
from lora_serve.core.messages import FinishEvent, StepEvent, TokenEvent
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams
from lora_serve.core.settings import Settings
from lora_serve.simulate.profiles import RooflineSteps, read_profile
from lora_serve.simulate.replica import Replica, Timeline

_DEFAULTS = ("max_num_seqs", "max_num_batched_tokens", "speculate")
_WARM, _END = 2.0, 4.0  # seconds: the first are not counted


@dataclass
class Users:
    """Users of one replica: prompts of 32 to 256 tokens, answers of 128; they begin one after the other."""

    num_users: int
    num_adapters: int
    prompt_stretch: float
    captured_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    num_sent: int = 0
    num_tokens: int = 0

    def tokens_per_second(self) -> float:
        profile = read_profile("llama-8b-h200")
        assert isinstance(profile.steps, RooflineSteps)
        profile = replace(profile, steps=replace(profile.steps, captured_tokens=self.captured_tokens))
        on_cuda = {name: default_on_cuda(Settings.model_fields[name]) for name in _DEFAULTS}
        config = EngineConfig(**on_cuda, prompt_stretch=self.prompt_stretch)
        self._draw = random.Random(0)
        self._replica = Replica(0, profile, config, self.timeline, self._take)
        for user in range(self.num_users):
            self.timeline.at(0.02 * user, self._send)
        self.timeline.run()
        return self.num_tokens / (_END - _WARM)

    def _send(self) -> None:
        self.num_sent += 1
        prompt = (self.num_sent,) * self._draw.randint(32, 256)
        number = self.num_sent % max(1, self.num_adapters)
        ref = AdapterRef("t", f"t/a{number}", 1, f"sha256:{number:064x}", 16, 83_886_080)
        uses = (AdapterUse(ref),) if self.num_adapters else ()
        sampling = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True, seed=0)
        self._replica.post(InferenceRequest(str(self.num_sent), prompt, sampling, uses, arrival_time=self.timeline.now))

    def _take(self, replica: Replica, events: list[StepEvent]) -> None:
        self.num_tokens += sum(isinstance(e, TokenEvent) and _WARM <= self.timeline.now < _END for e in events)
        for event in events:
            if isinstance(event, FinishEvent) and self.timeline.now < _END:
                self.timeline.at(self.timeline.now, self._send)


@pytest.mark.many(1)
@pytest.mark.parametrize("num_adapters", [0, 16])
def test_prompts_are_not_cut_small_where_a_step_with_prompts_costs_its_launches(num_adapters: int) -> None:
    """A step with prompts costs two to four others, whatever their tokens are: few and large ones give most tokens."""
    stretched = Users(64, num_adapters, EngineConfig().prompt_stretch).tokens_per_second()
    assert stretched >= 0.98 * Users(64, num_adapters, 0.0).tokens_per_second()


@pytest.mark.many(1)
@pytest.mark.parametrize("num_adapters", [0, 16])
def test_captured_steps_with_prompts_give_half_as_many_tokens_again(num_adapters: int) -> None:
    """Where steps of up to 512 tokens of prompts are captured, the defaults keep to them."""
    eager, captured = (Users(64, num_adapters, EngineConfig().prompt_stretch, size) for size in (0, 512))
    assert captured.tokens_per_second() >= 1.5 * eager.tokens_per_second()
