"""One vector per row from packed or padded rows, by the model's own code.

The backbone runs on tokens, all layers after it on rows. A forward hook on the backbone exchanges its hidden states for
the rows' pooled ones, [num_rows, 1, hidden], so that a head's own code (`features[:, 0]`, or a mean) finds each row's
vector where it looks for it. A pooler inside of the backbone gets the rows' first tokens likewise.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lora_serve.core.batch import RowAdapter
from lora_serve.core.request import Task
from lora_serve.model.attention.sdpa import attend_masked
from lora_serve.model.pooling.plan import PoolingPlan, normalize
from lora_serve.model.step_context import AdapterStep, OutputWidths, StepContext, passes_of


@dataclass(frozen=True, slots=True)
class PoolingRow:
    """One prompt, never cut."""

    token_ids: tuple[int, ...]
    token_type_ids: tuple[int, ...] = ()  # empty: all 0
    adapters: tuple[RowAdapter, ...] = ()
    is_long: bool = False  # see `LongRope`
    is_unit: bool | None = None  # an embedding's length is made 1, or left; None: as the model says


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Packed rows of like lengths, which attend in one call: `length` is the longest."""

    index: Tensor  # [num_rows, length] packed positions; beyond a row's end its first token again
    lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.index.shape[1]

    @property
    def is_even(self) -> bool:
        return min(self.lengths) == self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingStep(AdapterStep):
    """Everything one forward pass reads besides weights.

    Rows lie end to end ([1, num_tokens], `groups` says which tokens attend to each other) or padded
    ([num_rows, length], with an attention mask). Flat positions count tokens row after row in either.
    """

    token_ids: Tensor  # [1, num_tokens] or [num_rows, length] int64, as all of the same shape below
    position_ids: Tensor
    token_type_ids: Tensor | None  # None: the model has none
    attention_mask: Tensor | None  # None: packed
    groups: tuple[RowGroup, ...]  # empty: padded
    token_index: Tensor | None  # [num_tokens] flat positions of the tokens that are no padding; None: all
    lengths: Tensor  # [num_rows] int64
    firsts: Tensor  # [num_rows] flat positions
    lasts: Tensor  # [num_rows] flat positions
    are_unit: tuple[bool | None, ...]  # of each row, as in PoolingRow
    masks: dict[tuple[int, bool, int | None], Tensor | None] = field(default_factory=dict)  # attention's own


@dataclass(frozen=True, slots=True)
class Layout:
    """The way in which a model's rows become tensors."""

    is_ragged: bool
    has_types: bool
    first_position: int  # RoBERTa's begin after its padding token's id, which is the position of such tokens
    ignored_last: int | None  # a token that is never a row's last one (a decoder's classifier); None: any may be
    device: torch.device

    def step(self, rows: Sequence[PoolingRow], own_labels: OutputWidths | None = None) -> PoolingStep:
        lengths = [len(row.token_ids) for row in rows]
        widths = lengths if self.is_ragged else [max(lengths)] * len(rows)
        starts = [0, *itertools.accumulate(widths)][:-1]
        adapters = [row.adapters for row in rows]
        long = [(int(row.is_long),) * len(row.token_ids) for row in rows]
        types = [row.token_type_ids or (0,) * len(row.token_ids) for row in rows]
        return PoolingStep(
            token_ids=self._laid([row.token_ids for row in rows], widths),
            position_ids=self._laid([self._positions(row.token_ids) for row in rows], widths),
            token_type_ids=self._laid(types, widths) if self.has_types else None,
            attention_mask=None if self.is_ragged else self._laid([(1,) * length for length in lengths], widths),
            groups=self._groups(starts, lengths) if self.is_ragged else (),
            token_index=None if self.is_ragged else self._tensor(_spans(starts, lengths)),
            lengths=self._tensor(lengths),
            firsts=self._tensor(starts),
            lasts=self._tensor([start + self._last(row.token_ids) for start, row in zip(starts, rows, strict=True)]),
            are_unit=tuple(row.is_unit for row in rows),
            lora=passes_of(adapters, [(0, width) for width in widths], self.device),
            lora_logits=passes_of(adapters, [(length - 1, length) for length in lengths], self.device),
            vocabularies=own_labels,
            is_long=self._laid(long, widths) if any(row.is_long for row in rows) else None,
        )

    def _laid(self, rows: Sequence[Sequence[int]], widths: Sequence[int]) -> Tensor:
        padded = [(*row, *[0] * (width - len(row))) for row, width in zip(rows, widths, strict=True)]
        return self._tensor(list(itertools.chain(*padded))).view(1 if self.is_ragged else len(rows), -1)

    def _positions(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self.first_position == 0:
            return range(len(token_ids))
        padding, found, position = self.first_position - 1, list[int](), self.first_position - 1
        for token in token_ids:
            position += token != padding
            found.append(padding if token == padding else position)
        return found

    def _last(self, token_ids: Sequence[int]) -> int:
        ends = range(len(token_ids) - 1, -1, -1)
        return next((i for i in ends if token_ids[i] != self.ignored_last), 0)

    def _groups(self, starts: Sequence[int], lengths: Sequence[int]) -> tuple[RowGroup, ...]:
        """Rows whose lengths have the same next power of two."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        found = []
        for _, group in itertools.groupby(order, key=lambda i: max(16, 1 << (lengths[i] - 1).bit_length())):
            rows = list(group)
            length = max(lengths[i] for i in rows)
            index = [[starts[i] + (j if j < lengths[i] else 0) for j in range(length)] for i in rows]
            found.append(RowGroup(self._tensor(index), tuple(lengths[i] for i in rows)))
        return tuple(found)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _spans(starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]


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
        return torch.where(torch.tensor(are_unit, device=pooled.device), normalize(pooled), pooled)

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


class RaggedAttention:
    """A function for transformers' `AttentionInterface`. Rows of like lengths attend in one call."""

    def __init__(self, context: StepContext[PoolingStep]) -> None:
        self._context = context
        self.num_calls = 0  # a model that never calls this cannot be packed

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """query [1, num_heads, T, D], key, value [1, num_kv_heads, T, D], all after RoPE -> [1, T, num_heads, D].

        With a window w a token sees those less than w away. With `softcap` c scores become c * tanh(score / c).
        """
        self.num_calls += 1
        step = self._context.step
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
        for number, group in enumerate(step.groups):
            window = None if sliding_window is None or sliding_window >= group.length else sliding_window
            where = (number, causal, window)
            if where not in step.masks:
                step.masks[where] = _mask(group, causal, window, q.dtype, q.device)
            _attend(out, (q, k, v), group, step.masks[where], causal and window is None, scale, softcap)
        return out[None], None


def _attend(
    out: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    group: RowGroup,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> None:
    q, k, v = (tensor[group.index].transpose(1, 2) for tensor in qkv)
    if k.shape[1] != q.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    if softcap is None:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    else:
        found = attend_masked(q, k, v, _open_mask(group.length, is_causal, q) if mask is None else mask, scale, softcap)
    found = found.transpose(1, 2)  # [rows, length, heads, D]
    if group.is_even:
        out[group.index] = found
        return
    for index, own, row in zip(group.index, group.lengths, found, strict=True):
        out[index[:own]] = row[:own]


def _mask(group: RowGroup, causal: bool, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive, broadcasting to [num_rows, 1, length, length]; None: all tokens, or with `causal` those before.

    Behind a row's end lies its own first token, which a causal row never reaches.
    """
    keys = torch.arange(group.length, device=device)
    distance = keys[:, None] - keys
    visible = None
    if window is not None:
        visible = (distance < window) & ((distance >= 0) if causal else (distance > -window))
        visible = visible[None, None]
    if not causal and not group.is_even:
        own = keys < torch.tensor(group.lengths, device=device)[:, None]  # [num_rows, length]
        visible = own[:, None, None] if visible is None else visible & own[:, None, None]
    if visible is None:
        return None
    # behind a row's end a window may see nothing: such a token sees itself, and its result is not used
    visible = visible | (distance == 0) if window is not None else visible
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))


def _open_mask(length: int, is_causal: bool, like: Tensor) -> Tensor:
    """The mask that None stands for."""
    mask = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).triu_(1), float("-inf")) if is_causal else mask
