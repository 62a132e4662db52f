"""Lets rows have a module their own way: norms, embeddings, routers and experts (linear layers: `lora_linear.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lora_serve.model.loading.observation import Site
from lora_serve.model.lora.changes import Change
from lora_serve.model.step.step_context import AdapterStep, StepContext
from lora_serve.model.step.vocabularies import OwnVocabularies


class ChangedModule:
    """A forward hook: the base module has run for all rows; the outputs of rows with changes are put right."""

    def __init__(
        self,
        site: Site,
        changes: Mapping[int, tuple[Change, ...]],
        context: StepContext[Any],
        *,
        reads_token_ids: bool = False,
    ) -> None:
        """`changes`: by slot, kept up to date by `LoraSlots`. `reads_token_ids`: it is the input embedding."""
        self._site = site
        self._changes = changes
        self._context = context
        self._reads_token_ids = reads_token_ids

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        if not self._changes:
            return
        step: AdapterStep = self._context.step
        if self._reads_token_ids and isinstance(step.vocabularies, OwnVocabularies):
            inputs = (step.vocabularies.token_ids.view_as(inputs[0]), *inputs[1:])
        for tokens in step.lora_logits if self._site.is_output_head else step.lora:
            for segment in tokens.segments:
                for change in self._changes.get(segment.slot, ()):
                    change.apply(
                        self._cut_output(output, segment.start, segment.num_tokens),
                        self._cut_inputs(inputs, segment.start, segment.num_tokens),
                        segment.scale,
                    )

    def _cut_inputs(self, inputs: tuple[Any, ...], start: int, length: int) -> tuple[Any, ...]:
        return tuple(
            value if dim is None else _in_one_row(value, dim).narrow(dim, start, length)
            for value, dim in zip(inputs, self._site.input_dims, strict=True)
        )

    def _cut_output(self, output: Tensor | tuple[Tensor, ...], start: int, length: int) -> Tensor | tuple[Tensor, ...]:
        dim = self._site.output_dim
        if isinstance(output, tuple):
            return tuple(_in_one_row(tensor, dim).narrow(dim, start, length) for tensor in output)
        return _in_one_row(output, dim).narrow(dim, start, length)


def _in_one_row(value: Tensor, dim: int) -> Tensor:
    """A view in which all tokens lie along `dim`: padded rows [num_rows, length, ...] become [1, tokens, ...]."""
    return value.view(1, -1, *value.shape[2:]) if dim == 1 and value.shape[0] > 1 else value
