"""Rotary positions worked out by the whole sequence (LongRoPE, dynamic NTK): found at start, served by row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import ONE_ROPE, LongRope
from lora_serve.model.loading.observation import refused_if_it_fails
from lora_serve.model.step_context import Step, StepContext

_NAME = "position_ids"
_TRIED = 1  # the position whose numbers are looked at, in calls that end at others
PositionCall = tuple[nn.Module, inspect.BoundArguments]


@contextmanager
def position_calls(module: nn.Module) -> Iterator[list[PositionCall]]:
    """Records, inside the block, the calls of the modules that turn positions into numbers by no parameters."""
    calls: list[PositionCall] = []

    def note(part: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls.append((part, inspect.signature(part.forward).bind(*arguments, **keywords)))

    parts = [p for p in module.modules() if not [*p.parameters()] and _NAME in inspect.signature(p.forward).parameters]
    with ExitStack() as hooks:
        for part in parts:
            hooks.enter_context(part.register_forward_pre_hook(note, with_kwargs=True))
        yield calls


@torch.inference_mode()
def find_positions(
    module: PreTrainedModel, calls: Sequence[PositionCall], max_model_len: int, *, generates: bool = True
) -> tuple[LongRope, tuple[nn.Module, ...]]:
    """Tries sequences of many lengths up to `max_model_len`; returns too which modules choose by the longest row.

    Raises ModelError if the numbers of a position change more than once as a sequence grows.
    """
    with refused_if_it_fails(module):
        ends = [_last_like(*call, 2, max_model_len) for call in calls]
        boundary = min(ends, default=max_model_len)
        by_call = [call for call, end in zip(calls, ends, strict=True) if end < max_model_len]
        ends += [_last_like(*call, boundary + 1, max_model_len) for call in by_call]
        is_known = {*ends} <= {boundary, max_model_len}
        recomputes = bool(by_call) and is_known and generates and _recomputes(module, boundary)
    if not is_known:
        raise ModelError(
            f"{type(module).__name__} cannot be served at this length: beyond {boundary} tokens it works a position "
            f"out by the whole sequence, in a way that rows cannot share; give --max-model-len {boundary}"
        )
    return LongRope(boundary, recomputes) if by_call else ONE_ROPE, tuple(dict(by_call))


def serve_by_row(by_call: Iterable[nn.Module], boundary: int, context: StepContext[Step]) -> None:
    """Lets each row choose for itself in the modules that choose by call.

    transformers chooses the factors of LongRoPE, and the base of dynamic NTK, by the largest position of a whole call.
    Here a call carries everybody's rows, so such a module is asked twice, as a short and as a long row would ask alone.
    """
    for part in by_call:
        part.forward = _by_row(part.forward, boundary, context)


def _by_row(forward: Callable[..., Any], boundary: int, context: StepContext[Step]) -> Callable[..., Any]:
    """A module's numbers for short rows and for long ones, and of these each token's own: a tensor says which, so that
    a captured graph serves both.
    """
    signature = inspect.signature(forward)

    def run(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        ids, is_long = bound.arguments[_NAME], context.step.is_long
        mask = ids >= boundary if is_long is None else (ids >= boundary) | (is_long != 0)
        short = _numbers(forward, bound, ids.clamp(max=boundary - 1))
        far = torch.full_like(ids[..., :1], boundary)
        long = _numbers(forward, bound, torch.cat([ids, far], dim=-1))
        found = tuple(torch.where(mask[..., None], b[..., :-1, :], a) for a, b in zip(short, long, strict=True))
        return found if len(found) > 1 else found[0]

    return run


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
            break
        else:
            last, step = length, 1
    return known


def _recomputes(module: Any, boundary: int) -> bool:
    """True if `generate` drops a full cache as the sequence grows beyond the boundary."""
    cache = SimpleNamespace(get_seq_length=lambda *_: boundary)
    ids = torch.zeros(1, boundary + 1, dtype=torch.int64, device=module.device)
    found = module.prepare_inputs_for_generation(ids, past_key_values=cache, next_sequence_length=1, use_cache=True)
    return found.get("past_key_values") is not cache
