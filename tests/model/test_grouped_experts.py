"""Models with experts whose products are grouped on the device: transformers' own logits, alone and in company, and in
captured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_serve.core.batch import Batch
from lora_serve.model import experts
from tests.model.runner.test_step_graphs import World, decode
from tests.models_table import DOCUMENT, NOT_BUILT, build_tiny, read_table
from tests.oracle import load_fresh
from tests.tiers import mostly_nightly

# The plainest; a router of its own class; weights the other way round, biases, gate and up by turns; no gate; none.
OF_THE_DEFAULT_TIER = ("mixtral", "phimoe", "gpt_oss", "nemotron_h", "llama")
MIXTRAL: dict[str, Any] = {"architecture": "mixtral", "num_hidden_layers": 1}
NEAR = 1e-4  # of a logit
BUILT = [name for name, verdict in read_table(DOCUMENT.read_text()).items() if not verdict.startswith(NOT_BUILT)]


def logits_of(model: Any, implementation: str, ids: Sequence[int]) -> Tensor:
    model.set_experts_implementation(implementation)
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("model_type", mostly_nightly(BUILT, *OF_THE_DEFAULT_TIER))
def test_each_type_gives_the_logits_of_its_own_code(model_type: str) -> None:
    model = build_tiny(model_type)
    if not list(experts.expert_modules(model)):
        assert experts.group_experts(model) == 0
        return
    ids = [(7 * i) % 90 + 3 for i in range(24)]
    wanted = logits_of(model, "eager", ids)
    assert experts.group_experts(model)
    assert torch.allclose(logits_of(model, experts.NAME, ids), wanted, atol=NEAR * float(wanted.abs().max()))


def test_experts_in_a_type_of_number_that_is_not_known_stay_as_they_are() -> None:
    model = build_tiny("mixtral").double()
    before = model.config._experts_implementation
    assert experts.group_experts(model) == 0
    assert model.config._experts_implementation == before != experts.NAME


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("mixtral"), ("q_proj",), **MIXTRAL)


def test_captured_steps_follow_the_experts_that_tokens_choose(world: World) -> None:
    tables = [world.prompt(i, 4 + i) for i in range(3)]
    world.agree([decode(i, 4 + i, table, 9 - i) for i, table in enumerate(tables)])
    num_captured = len(world.recorders)
    for token in (30, 31, 40):
        world.agree([decode(i, 4 + i, table, token + 7 * i) for i, table in enumerate(tables)])
    assert len(world.recorders) == num_captured
    assert not world.graphs.stats().num_failed


def test_the_loop_over_chosen_experts_is_not_captured(world: World) -> None:
    """So the recorder would see it in our own way, too."""
    model = world.plain._model.module
    model.set_experts_implementation("eager")
    try:
        world.graphs._captured.clear()
        world.captured.run(Batch((decode(0, 0, (21,), 9),), ()))
        assert world.graphs.stats().num_failed == 1
    finally:
        model.set_experts_implementation(experts.NAME)
        world.graphs._failed.clear()


def test_served_logits_are_those_of_the_loop_over_experts(world: World) -> None:
    """Of prompts in one step, as plain transformers computes each alone."""
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 3, 22], [50] * 12]
    plain = load_fresh(Path(world.engine.settings.model))
    requests = [world.engine.request(prompt, prompt_logprobs=1, max_tokens=1, logprobs=1) for prompt in prompts]
    for prompt, answer in zip(prompts, world.engine.run(requests), strict=True):
        wanted = logits_of(plain, "eager", prompt).log_softmax(-1)
        assert answer.prompt_logprobs is not None
        for i, found in enumerate(answer.prompt_logprobs[1:]):
            assert found is not None
            assert abs(found.logprob - wanted[i, prompt[i + 1]]) < 1e-3
        assert answer.token_ids == [int(wanted[-1].argmax())]


def test_experts_numbers_of_a_token_are_the_same_bits_alone_and_in_company() -> None:
    model = build_tiny("mixtral")
    (part, *_) = experts.expert_modules(model)
    assert experts.group_experts(model)
    torch.manual_seed(0)
    size = part.down_proj.shape[1]
    x, weights = torch.randn(90, size), torch.rand(90, 2)
    index = torch.stack([torch.randperm(part.num_experts)[:2] for _ in range(90)])
    together = part(x, index, weights)
    for token in (0, 13, 40, 89):
        here = slice(token, token + 1)
        assert torch.equal(part(x[here], index[here], weights[here]), together[here])
