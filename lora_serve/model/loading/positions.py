"""Modules that work a token's position out by the longest row of a call, found by trying them; and rows' own answers.

transformers chooses the factors of LongRoPE, and the base of dynamic NTK, by the largest position of a whole call. Here
a call carries everybody's rows, so such a module is asked twice, as a short and as a long row would ask alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import LongRope
from lora_serve.model.loading.frozen_model import LoadedModel
from lora_serve.model.loading.observation import first_line
from lora_serve.model.step.step_context import Step, StepContext

_NAME = "position_ids"
PositionCall = tuple[nn.Module, inspect.BoundArguments]
_TRIED = 1  # the position whose numbers are looked at, in calls that end at others


@contextmanager
def position_calls(module: nn.Module) -> Iterator[list[PositionCall]]:
    """Records, inside the block, the calls of the modules that turn positions into numbers by no parameters."""
    calls: list[PositionCall] = []

    def note(part: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls.append((part, inspect.signature(part.forward).bind(*arguments, **keywords)))

    parts = [part for part in module.modules() if not any(True for _ in part.parameters())]
    parts = [part for part in parts if _NAME in inspect.signature(part.forward).parameters]
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def find_positions(
    module: PreTrainedModel, calls: Sequence[PositionCall], max_model_len: int, *, generates: bool = True
) -> tuple[LongRope | None, tuple[nn.Module, ...]]:
    """Tries sequences of many lengths up to `max_model_len`; returns too which modules choose by the longest row.

    Raises ModelError if the numbers of a position change more than once with the length, or if nobody can tell how
    `generate` goes on there.
    """
    found: dict[nn.Module, int] = {}
    try:
        for part, call in calls:
            boundary = _last_like(part, call, 2, max_model_len)
            if boundary < max_model_len:
                if found.setdefault(part, boundary) != boundary:
                    raise _refused(module, min(boundary, found[part]))
                if _last_like(part, call, boundary + 1, max_model_len) < max_model_len:
                    raise _refused(module, boundary)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{type(module).__name__} cannot be served: {first_line(error)}") from error
    if not found:
        return None, ()
    boundary = min(found.values())
    if max(found.values()) > boundary:
        raise _refused(module, boundary)
    return LongRope(boundary, not generates or _recomputes(module, boundary)), tuple(found)


def serve_by_row(loaded: LoadedModel, context: StepContext[Step]) -> None:
    """Lets each row choose for itself in the modules that choose by call."""
    for part in loaded.by_call:
        assert loaded.spec.long_rope is not None
        part.forward = _ByRow(part.forward, loaded.spec.long_rope.boundary, context)


@dataclass(frozen=True, slots=True)
class _ByRow(Generic[Step]):
    """A module's numbers for short rows and for long ones, and of these each token's own: a tensor says which, so that
    a captured graph serves both.
    """

    own_forward: Callable[..., Any]
    boundary: int
    context: StepContext[Step]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        bound = inspect.signature(self.own_forward).bind(*arguments, **keywords)
        ids, is_long = bound.arguments[_NAME], self.context.step.is_long
        mask = ids >= self.boundary if is_long is None else (ids >= self.boundary) | (is_long != 0)
        short = _numbers(self.own_forward, bound, ids.clamp(max=self.boundary - 1))
        far = torch.full_like(ids[..., :1], self.boundary)
        long = _numbers(self.own_forward, bound, torch.cat([ids, far], dim=-1))
        found = tuple(_chosen(mask, b[..., :-1, :], a) for a, b in zip(short, long, strict=True))
        return found if len(found) > 1 else found[0]


def _chosen(mask: Tensor, long: Tensor, short: Tensor) -> Tensor:
    while mask.dim() >= short.dim():  # one position for each axis of an image; text has the same on all
        mask = mask[0]
    return torch.where(mask[..., None], long, short)


def _numbers(forward: Callable[..., Any], bound: inspect.BoundArguments, ids: Tensor) -> tuple[Tensor, ...]:
    """The tensors, [..., tokens, size], that the module gives for these positions [..., tokens]."""
    bound.arguments[_NAME] = ids
    found = forward(*bound.args, **bound.kwargs)
    return found if isinstance(found, tuple) else (found,)


def _last_like(part: nn.Module, bound: inspect.BoundArguments, first: int, last: int) -> int:
    """The greatest length of a sequence, from `first` to `last`, with the numbers of one of length `first`."""
    given: Tensor = bound.arguments[_NAME]

    def numbers_at(length: int) -> tuple[Tensor, ...]:
        for end in (_TRIED, length - 1):  # the short one first: dynamic NTK remembers the longest
            ids = given.new_tensor([_TRIED, end]).expand(*given.shape[:-1], 2)
            found = _numbers(part.forward, bound, ids)
        return tuple(value[..., :1, :].clone() for value in found)

    expected, known, step = numbers_at(first), first, 1
    while known < last:
        length = min(known + step, last)
        if all(map(torch.equal, numbers_at(length), expected)):
            known, step = length, 2 * step
        elif step == 1:
            return known
        else:
            last, step = length, 1
    return known


def _recomputes(module: Any, boundary: int) -> bool:
    """True if `generate` drops its cache as the sequence grows beyond the boundary."""
    cache = _FullCache(boundary)
    ids = torch.zeros(1, boundary + 1, dtype=torch.int64, device=module.device)
    try:
        found = module.prepare_inputs_for_generation(ids, past_key_values=cache, next_sequence_length=1, use_cache=True)
    except Exception as error:
        raise _refused(module, boundary) from error
    return found.get("past_key_values") is not cache


@dataclass(frozen=True, slots=True)
class _FullCache:
    """A cache of so many tokens, as far as `generate` asks before it computes the next one."""

    num_tokens: int

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens


def _refused(module: nn.Module, boundary: int) -> ModelError:
    return ModelError(
        f"{type(module).__name__} cannot be served at this length: beyond {boundary} tokens it works a position out by "
        f"the whole sequence, in a way that rows cannot share; give --max-model-len {boundary}"
    )
