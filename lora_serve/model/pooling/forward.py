"""One vector per row from packed or padded rows, by the model's own code.

The backbone runs on tokens, all layers after it on rows. A forward hook on the backbone exchanges its hidden states for
the rows' pooled ones, [num_rows, 1, hidden], so that a head's own code (`features[:, 0]`, or a mean) finds each row's
vector where it looks for it. A pooler inside of the backbone gets the rows' first tokens likewise.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_serve.core.request import Task
from lora_serve.model.pooling.plan import Normalize, PoolingPlan
from lora_serve.model.pooling.step import PoolingStep
from lora_serve.model.step.step_context import StepContext


class PooledForward:
    """Answers steps; `context` holds the running one for attention and for layers with adapters."""

    def __init__(self, module: PreTrainedModel, plan: PoolingPlan, context: StepContext[PoolingStep]) -> None:
        self._module: Any = module
        self._plan = plan
        self._context = context
        backbone = backbone_of(module)
        self._arguments = frozenset(inspect.signature(backbone.forward).parameters)
        # A decoder's classifier is a layer that its own code applies to all tokens, before it chooses one of them.
        self._has_score = plan.task is Task.CLASSIFY and isinstance(getattr(module, "score", None), nn.Module)
        pooler = getattr(backbone, "pooler", None)
        self._hooks = [backbone.register_forward_hook(self._exchange)]
        if isinstance(pooler, nn.Module):
            self._hooks.append(pooler.register_forward_pre_hook(self._take_firsts))

    def detach(self) -> None:
        """Restores the module."""
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def __call__(self, step: PoolingStep) -> Tensor:
        """[num_rows, dimension] float32, or the labels' logits [num_rows, width]."""
        given = {
            "input_ids": step.token_ids,
            "position_ids": step.position_ids,
            "token_type_ids": step.token_type_ids,
            "attention_mask": step.attention_mask,
        }
        arguments = {name: value for name, value in given.items() if value is not None and name in self._arguments}
        with self._context.running(step):
            module = backbone_of(self._module) if self._has_score else self._module
            output = module(**arguments)
            if self._plan.task is Task.CLASSIFY:
                logits: Tensor = self._module.score(output.last_hidden_state) if self._has_score else output.logits
                return logits.reshape(len(step.lengths), -1).float()
            return self._embedding(output.last_hidden_state[:, 0], step)

    def _embedding(self, pooled: Tensor, step: PoolingStep) -> Tensor:
        pooled, plan = pooled.float(), self._plan
        for after in plan.steps[:-1] if plan.is_normalized else plan.steps:
            pooled = after(pooled)
        are_unit = [[plan.is_normalized if is_unit is None else is_unit] for is_unit in step.are_unit]
        return torch.where(torch.tensor(are_unit, device=pooled.device), Normalize()(pooled), pooled)

    def _exchange(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        pooled = pool(output.last_hidden_state.flatten(0, 1), self._context.step, self._plan.pooling)
        output.last_hidden_state = pooled[:, None]
        return output

    def _take_firsts(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = inputs
        return hidden.flatten(0, 1)[self._context.step.firsts][:, None], *others


def backbone_of(module: PreTrainedModel) -> nn.Module:
    """The part of a model with a head that turns tokens into hidden states; the model itself if it has none."""
    return getattr(module, module.base_model_prefix, module)


def takes_types(module: PreTrainedModel) -> bool:
    """True if the model tells tokens of a second text from the first's."""
    arguments = inspect.signature(backbone_of(module).forward).parameters
    return "token_type_ids" in arguments and (getattr(module.config, "type_vocab_size", 0) or 0) > 1


def pool(hidden: Tensor, step: PoolingStep, how: str) -> Tensor:
    """hidden [num_tokens, hidden], padding included -> [num_rows, hidden], means worked out in float32.

    Each row reads its own tokens only, so that a row of NaN spoils no other.
    """
    if how == "cls":
        return hidden[step.firsts]
    if how == "last":
        return hidden[step.lasts]
    tokens = hidden if step.token_index is None else hidden[step.token_index]
    reduced: Tensor = torch.segment_reduce(tokens.float(), how, lengths=step.lengths, axis=0)
    return reduced.to(hidden.dtype)
