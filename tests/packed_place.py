"""A model with packed weights, and the plain one of the same numbers: mixed batches, and PEFT over the latter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.loading.kept_linear import KeptLinear
from tests.local_engine import Answer, LocalEngine
from tests.oracle import load_alone, load_plain, logprobs_alone, save_adapter
from tests.peft_kinds import save_kind

NEAR = 1e-3  # of a log-probability, where both sides compute the same function in float32
KINDS = ("plain", "all_linear", "dora", "save_lm_head", "save_norms", "embedding")
Answers = Mapping[str | None, tuple[list[int], Answer]]


def as_it_is(model: nn.Module) -> None:
    pass


def numbers_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, those that stay packed dequantised."""
    found = dict(model.state_dict())
    for path, layer in model.named_modules():
        if isinstance(layer, KeptLinear):
            del found[f"{path}.panels"]
            found[f"{path}.weight"] = torch.cat(list(layer.frozen_weight.packed.dequantized()))
    return found


def save_adapters(architecture: str, plain: Path, root: Path, kinds: Sequence[str] = KINDS) -> dict[str, Path]:
    """Adapters of a plain model, by their kind."""
    adapters = {kind: save_kind(kind, architecture, plain, root / kind) for kind in kinds}
    adapters["save_linear"] = save_adapter(
        plain, root / "save_linear", target_modules=["q_proj"], modules_to_save=["down_proj"]
    )
    return adapters


@dataclass(frozen=True)
class PackedPlace:
    """A packed model, the plain one with its numbers, and adapters."""

    model: Path
    dequantized: Path
    adapters: Mapping[str, Path]

    def answers(self, **settings: Any) -> Answers:
        """A prompt and its answer for each adapter and the base, all of them in mixed batches."""
        engine = LocalEngine(
            self.model, self.adapters, dtype="float32", max_model_len=56, block_size=4, kv_cache_memory="400KiB",
            max_num_batched_tokens=32, max_loras=8, max_num_seqs=8, **settings,
        )  # fmt: skip
        names: list[str | None] = [None, *self.adapters]
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(3, 97, (9 + 5 * i,), generator=generator).tolist() for i in range(len(names))]
        pairs = list(zip(prompts, names, strict=True))
        found = engine.run([engine.request(p, name, max_tokens=3, prompt_logprobs=0) for p, name in pairs])
        assert engine.max_adapters_in_batch > 2
        return {name: (prompt, answer) for (prompt, name), answer in zip(pairs, found, strict=True)}

    def differences(self, answers: Answers, change: Callable[[nn.Module], None] = as_it_is) -> Tensor:
        """How far prompts' log-probabilities are from PEFT's over the dequantised base. `change`: of that base."""
        found = []
        for name, (prompt, answer) in answers.items():
            assert answer.error is None
            assert answer.prompt_logprobs is not None
            oracle = load_plain(self.dequantized) if name is None else load_alone(self.dequantized, self.adapters[name])
            change(oracle)
            truth = logprobs_alone(oracle, prompt)[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
            mine = torch.tensor([item.logprob for item in answer.prompt_logprobs if item is not None])
            found.append((mine - truth).abs())
        return torch.cat(found)
