"""The frozen model with its linear layers wrapped for LoRA deltas, and hooks on its other modules for rows' changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lora_serve.core.config import ModelConfig
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.loading.frozen_model import LoadedModel
from lora_serve.model.loading.observation import Site, is_linear
from lora_serve.model.loading.positions import serve_by_row
from lora_serve.model.lora.changes import Change
from lora_serve.model.lora.kernels import LoraKernel, create_kernel
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native.experts import PackedStack
from lora_serve.model.step_context import (
    AdapterStep,
    LoraSegment,
    LoraTokens,
    Step,
    StepContext,
    StepVocabularies,
)


class LoraLinear(nn.Module):
    """y = base(x), then the effect of each token's adapters on y: see `LoraKernel` and `Change`.

    Both are done by its group, which is the layer alone until it joins others of its input.
    """

    def __init__(
        self,
        base: FrozenLinear,
        module: int,
        kernel: LoraKernel,
        changes: Mapping[int, tuple[Change, ...]],
        context: StepContext[Any],
        *,
        sees_outputs: bool,
        is_output_head: bool,
    ) -> None:
        """`changes`: by slot, kept up to date by `LoraSlots`. `sees_outputs`: the inputs are not the step's tokens."""
        super().__init__()
        self.base = base
        self.module = module
        self.kernel = kernel
        self.context = context
        self.sees_outputs = sees_outputs
        self.changes = changes
        self._is_output_head = is_output_head
        self.group = LinearGroup((self,), base)

    @property
    def weight(self) -> Tensor:
        """[out, in] for code that asks the layer for its type, shape or device. Its numbers are none: a model that
        multiplies by it, past this layer and its adapters, is refused at its start.
        """
        number = torch.full((), math.nan, dtype=self.base.dtype, device=self.base.device)
        return number.expand(self.base.out_features, self.base.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, num_tokens, in] (for the output head [1, num_logits, in]) -> [1, ..., out].

        Sums and what adapters add to them are rounded to the type of x once, those of the output head not at all. The
        output head's out is that of the step's largest vocabulary.
        """
        y = self.group.outputs(self, x)
        if not self._is_output_head:
            return y.to(x.dtype)
        step: AdapterStep = self.context.step
        return y if step.vocabularies is None else self._resized(y, x, step)

    def change(self, y: Tensor, x: Tensor, tokens: LoraTokens, step: AdapterStep) -> None:
        """Applies changes to y [tokens, out], the base's outputs for x [tokens, in]; in place."""
        self._change(y, x, self._of_base_size(tokens.segments, step))

    def _resized(self, y: Tensor, x: Tensor, step: AdapterStep) -> Tensor:
        """y [1, num_logits, width]: adapters with their own number of rows have only changes here."""
        assert step.vocabularies is not None
        y = F.pad(y, (0, step.vocabularies.width - y.shape[-1]))
        for tokens in step.lora_logits:
            own = [segment for segment in tokens.segments if segment.slot in step.vocabularies.slots]
            self._change(y.view(-1, y.shape[-1]), x.reshape(-1, self.base.in_features), own)
        return y

    def _of_base_size(self, segments: Sequence[LoraSegment], step: AdapterStep) -> Sequence[LoraSegment]:
        if step.vocabularies is None or not self._is_output_head:
            return segments
        return [segment for segment in segments if segment.slot not in step.vocabularies.slots]

    def _change(self, y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
        for segment in segments:
            here = slice(segment.start, segment.end)
            for change in self.changes.get(segment.slot, ()):
                change.apply(y[here], (x[here],), segment.scale)


class LinearGroup(nn.Module):
    """Layers of one input: y = [x W_1^T + b_1, x W_2^T + b_2, ...], to the columns of which their adapters are applied.

    A layer that is called gets its part of one product, as long as all are called with the same tensor.
    """

    def __init__(self, parts: Sequence[LoraLinear], base: FrozenLinear) -> None:
        """`base`: the parts' own, joined."""
        super().__init__()
        self.base = base
        self.parts = tuple(parts)
        ends = [0, *itertools.accumulate(part.base.out_features for part in parts)]
        self.columns = tuple(slice(*edges) for edges in itertools.pairwise(ends))  # of y, by part
        self._numbers = tuple(part.module for part in parts)
        self._computed: tuple[Tensor, int, dict[LoraLinear, Tensor]] | None = None  # x, the step, what is not taken yet

    @staticmethod
    def of(parts: Sequence[LoraLinear]) -> LinearGroup | None:
        """The joined layers, which are still called one by one; None if their weights cannot lie in one piece."""
        base = FrozenLinear.joined([part.base for part in parts])
        return None if base is None else LinearGroup(parts, base)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out], as it was summed."""
        y = self.base.sums(x)
        self.adapt(y.view(-1, self.base.out_features), x.reshape(-1, self.base.in_features))
        return y

    def adapt(self, y: Tensor, x: Tensor) -> None:
        """Applies adapters to y [tokens, sum of out], the bases' outputs for x [tokens, in]; in place."""
        first = self.parts[0]
        step: AdapterStep = first.context.step
        for tokens in step.lora_logits if first.sees_outputs else step.lora:
            for part, columns in zip(self.parts, self.columns, strict=True):
                if part.changes:
                    part.change(y[:, columns], x, tokens, step)
            first.kernel.add(y, x, self._numbers, tokens)

    def outputs(self, part: LoraLinear, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out of part], as it was summed.

        The first part's call computes what each other's next call returns, if that is in the same step and x the very
        same object; a part that gets another x is computed alone.
        """
        if len(self.parts) == 1:
            return self.forward(x)
        number = part.context.number
        if part is self.parts[0]:
            y = self.forward(x)
            rest = zip(self.parts[1:], self.columns[1:], strict=True)
            self._computed = x, number, {other: y[..., columns] for other, columns in rest}
            return y[..., self.columns[0]]
        if self._computed is not None:
            known, of_step, waiting = self._computed
            if known is x and of_step == number and part in waiting:
                y = waiting.pop(part)
                self._computed = self._computed if waiting else None
                return y
        return LinearGroup((part,), part.base).forward(x)


@dataclass(frozen=True, slots=True)
class ChangedModule:
    """A forward hook for norms, embeddings, routers and experts: corrects the outputs of rows with changes."""

    _site: Site
    _changes: Mapping[int, tuple[Change, ...]]  # by slot, kept up to date by `LoraSlots`
    _context: StepContext[Any]
    _reads_token_ids: bool  # the module is the input embedding

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        if not self._changes:
            return
        step: AdapterStep = self._context.step
        if self._reads_token_ids and isinstance(step.vocabularies, StepVocabularies):
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
            value if dim is None else self._joined(self._cut(value, dim, start, length), dim)
            for value, dim in zip(inputs, self._site.input_dims, strict=True)
        )

    def _cut_output(self, output: Tensor | tuple[Tensor, ...], start: int, length: int) -> Tensor | tuple[Tensor, ...]:
        dim = self._site.output_dim
        if isinstance(output, tuple):
            return tuple(self._cut(tensor, dim, start, length) for tensor in output)
        return self._cut(output, dim, start, length)

    def _cut(self, value: Tensor, dim: int, start: int, length: int) -> Tensor:
        """A view of some tokens; of a value that has several copies of all tokens, [..., copies, length, ...]."""
        if self._site.num_copies > 1:
            copies = value.view(*value.shape[:dim], self._site.num_copies, -1, *value.shape[dim + 1 :])
            return copies.narrow(dim + 1, start, length)
        return _in_one_row(value, dim).narrow(dim, start, length)

    def _joined(self, value: Tensor, dim: int) -> Tensor:
        return value.flatten(dim, dim + 1) if self._site.num_copies > 1 else value


def _in_one_row(value: Tensor, dim: int) -> Tensor:
    """A view in which all tokens lie along `dim`: padded rows [num_rows, length, ...] become [1, tokens, ...]."""
    return value.view(1, -1, *value.shape[2:]) if dim == 1 and value.shape[0] > 1 else value


class AdaptedModel(Generic[Step]):
    """The base of generating and pooling models: all modules that adapters touch."""

    def __init__(self, loaded: LoadedModel, slots: LoraSlots, config: ModelConfig, context: StepContext[Step]) -> None:
        self.module = loaded.module
        self.spec = loaded.spec
        self.device = loaded.device
        self.context = context
        serve_by_row(loaded.by_call, loaded.spec.long_rope.boundary, context)
        self.module_index: Mapping[str, int] = slots.module_index  # of linear layers and stacks of experts
        self._linears: dict[str, FrozenLinear] = {}
        self.kernel = create_kernel(config.lora_kernel, slots)
        self._wrap_linears(loaded, self.kernel, slots)
        for path, site in loaded.observation.sites.items():
            if path not in self._linears:
                hook = ChangedModule(site, slots.changes_of(path), self.context, path == self.spec.input_embedding)
                self.module.get_submodule(path).register_forward_hook(hook)

    def linear(self, path: str) -> FrozenLinear:
        """The frozen layer inside a linear layer's wrapper."""
        return self._linears[path]

    def parameters_of(self, path: str) -> dict[str, Tensor]:
        """A module's own parameters in its checkpoint's form; a quantised weight is left out."""
        if path not in self._linears:
            module = self.module.get_submodule(path)
            packed = {name: value.dense() for name, value in vars(module).items() if isinstance(value, PackedStack)}
            return {**dict(module.named_parameters(recurse=False)), **packed}
        linear = self._linears[path]
        weight, bias = linear.dense(), linear.bias
        found = {} if weight is None else {"weight": weight.t() if linear.is_transposed else weight}
        return found if bias is None else {**found, "bias": bias}

    def _wrap_linears(self, loaded: LoadedModel, kernel: LoraKernel, slots: LoraSlots) -> None:
        embedding = self.module.get_parameter(f"{self.spec.input_embedding}.weight")
        head = self.spec.output_head if self.spec.pooling is None else self.spec.pooling.label_layer
        for path, index in slots.module_index.items():
            linear = self.module.get_submodule(path)
            assert is_linear(linear)
            base = self._linears[path] = FrozenLinear(linear, shared_weight=linear.weight is embedding)
            wrapped = LoraLinear(
                base,
                index,
                kernel,
                slots.changes_of(path),
                self.context,
                sees_outputs=loaded.observation.sites[path].is_output_head,
                is_output_head=path == head,
            )
            self.module.set_submodule(path, wrapped)
