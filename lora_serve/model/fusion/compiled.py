"""Decoder layers whose Python code is replaced by code that torch compiled, where that is proved to change no result.

Layers that differ in nothing but numbers and index are of one kind and share one compiled function. Each is compared
with its own code on a probe, and replaced only if they agree; others stay as they are, with a line in the log. A step
with a row whose adapter does more than add deltas to linear layers runs a layer's own code.

This is for GPUs, where a layer's dozens of launches become a few; on CPUs this project's own kernels are faster.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from lora_serve.model.attention import over_rows
from lora_serve.model.fusion.layer_operators import Attend, RunningLayer
from lora_serve.model.fusion.parts import (
    ModuleCall,
    cached_of,
    calls_of,
    clear_probe,
    is_close,
    is_close_rounded,
    probe_step,
    repeated,
)
from lora_serve.model.fusion.tracing import (
    INDEX,
    MAX_TOKENS,
    CompiledFunction,
    LayerInputs,
    NotCompiledError,
    compile_layer,
    groups_of,
    tensor_places,
)
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.loading.observation import first_line, registered_attention
from lora_serve.model.lora.adapted_model import LinearGroup
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import StepContext, StepInputs

_log = logging.getLogger(__name__)
PROBES = (7, 1)  # tokens of each
_MAX_KINDS = 8  # more: something of each layer is its own, and each would take seconds to compile
_HELD = frozenset(vars(nn.Module()))  # what every module has
Probe = tuple[ModuleCall, StepInputs]
Result = tuple[Tensor | None, Tensor]  # a layer's output, if its code ran, and K and V
_VARIES = {INDEX, "module", "changes", "weight"}  # of layers of one kind; see `RunningLayer` and `FrozenLinear.place`


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The model and the objects that its layers share."""

    module: PreTrainedModel
    attention: str  # the name under which it finds `attend`
    cache: KVCache
    slots: LoraSlots
    context: StepContext[StepInputs]
    attend: Attend
    chunks: Mapping[nn.Module, int]  # see `Observation`
    run: Callable[[StepInputs], Any]  # a forward pass of the model


@dataclass(slots=True)
class CompiledLayers:
    """The outcome: how many layers run compiled code, of which kinds, and why others do not."""

    num_layers: int = 0
    functions: list[CompiledFunction] = field(default_factory=list)  # one per kind
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class CompiledLayer:
    """A layer's forward by compiled code; by its own in steps of adapters that change more than linear layers add."""

    def __init__(
        self,
        layer: nn.Module,
        function: CompiledFunction,
        inputs: LayerInputs,
        running: RunningLayer,
        parts: LayerParts,
    ) -> None:
        self.own: Callable[..., Any] = layer.forward
        self._function, self._inputs, self._running = function, inputs, running
        self._tensors = list(tensor_places(layer).values())
        self._groups = groups_of(layer)
        self._index: int = getattr(layer.get_submodule(function.attention), INDEX)
        paths = {module: path for path, module in parts.module.named_modules()}
        self._changes = [parts.slots.changes_of(paths[part]) for part in layer.modules()]
        self._context = parts.context

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        given, step = self._inputs.tensors((arguments, keywords)), self._context.step
        if given is None or step.token_ids.shape[1] > MAX_TOKENS or step.changes_any(self._changes):
            return self.own(*arguments, **keywords)
        return self._run(given)

    def of_known_form(self, *arguments: Any, **keywords: Any) -> Any:
        """The layer by compiled code alone. Raises ValueError for arguments of another form."""
        given = self._inputs.tensors((arguments, keywords))
        if given is None:
            raise ValueError("the layer was compiled for other arguments")
        return self._run(given)

    def _run(self, given: Sequence[Tensor]) -> Any:
        self._running.layer, self._running.groups = self._index, self._groups
        return pytree.tree_unflatten(self._function.run(*self._tensors, *given), self._function.out_spec)


@torch.inference_mode()
def compile_layers(parts: LayerParts, vocab_size: int, max_model_len: int) -> CompiledLayers:
    """Compiles and replaces the layers that can be, and logs how many and why not the others."""
    start, done = time.perf_counter(), CompiledLayers()
    layers = decoder_layers(parts.module)
    steps = [probe_step(parts.cache, vocab_size, max_model_len, count) for count in PROBES]
    calls: list[dict[nn.Module, list[ModuleCall]]] = []
    for step in steps:
        with calls_of(layers) as found:
            parts.run(step)
        calls.append(found)
    running = RunningLayer(parts.attend)
    by_kind: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        by_kind.setdefault(_kind(layer, parts.chunks), []).append(layer)
    if len(by_kind) > _MAX_KINDS:
        done.reasons[f"they are of {len(by_kind)} kinds"] += len(layers)
        by_kind = {}
    for members in by_kind.values():
        _compile_kind(parts, running, members, steps, [[one.get(m, []) for one in calls] for m in members], done)
    done.seconds = time.perf_counter() - start
    _report(done)
    return done


def _compile_kind(
    parts: LayerParts,
    running: RunningLayer,
    members: Sequence[nn.Module],
    steps: Sequence[StepInputs],
    calls: Sequence[Sequence[Sequence[ModuleCall]]],
    done: CompiledLayers,
) -> None:
    """Compiles a kind's first layer and tries the function on all. `calls`: by layer and step."""
    try:
        if not all(len(one) == 1 for of_layer in calls for one in of_layer):
            raise NotCompiledError("it does not run once a step")
        first, second = ((call.arguments, dict(call.keywords)) for (call,) in calls[0])
        inputs = LayerInputs.of(first, second)
        example = inputs.tensors(first)
        assert example is not None
        function = compile_layer(members[0], inputs, example, running, functools.partial(_attending, parts))
    except Exception as error:  # whatever a layer's code and the compiler raise
        done.reasons[f"{type(error).__name__}: {first_line(error)}"] += len(members)
        return
    done.functions.append(function)
    for layer, of_layer in zip(members, calls, strict=True):
        compiled = CompiledLayer(layer, function, inputs, running, parts)
        probes = [(call, step) for (call,), step in zip(of_layer, steps, strict=True)]
        try:
            _check_agrees(parts, compiled, probes)
        except Exception as error:  # whatever compiled code raises
            done.reasons[f"{type(error).__name__}: {first_line(error)}"] += 1
        else:
            layer.forward = compiled
            done.num_layers += 1


def _check_agrees(parts: LayerParts, compiled: CompiledLayer, probes: Sequence[Probe]) -> None:
    """Raises NotCompiledError unless the compiled code gives the layer's own results, and writes the same K and V."""
    expected, found = (results_of(parts, forward, probes) for forward in (compiled.own, compiled.of_known_form))
    if any(output is None for output, _ in expected + found):
        raise NotCompiledError("it does not run by itself")
    if not agree(expected, found):
        raise NotCompiledError("compiled code computes something else")


def results_of(parts: LayerParts, forward: Callable[..., Any], probes: Sequence[Probe]) -> list[Result]:
    """The results of a layer's code for the arguments of calls, each in its step."""
    found = []
    for call, step in probes:
        with parts.context.running(step):
            clear_probe(parts.cache, step)
            found.append((repeated(call, forward), cached_of(parts.cache, step)))
    return found


def agree(expected: Sequence[Result], found: Sequence[Result]) -> bool:
    """True if two ways to compute a layer give the same results, but for what rounding may do."""
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    return all(
        one is not None
        and other is not None
        and (is_close if one.dtype == torch.float32 else is_close_rounded)(one, other)
        for one, other in pairs
    )


def _kind(layer: nn.Module, chunks: Mapping[nn.Module, int]) -> tuple[Any, ...]:
    """All that a layer's code can see of it but numbers of tensors and indices: layers of one kind have the same."""
    facts: list[Any] = []
    for path, part in layer.named_modules():
        own = vars(part)
        held = {**{n: v for n, v in own.items() if n not in _HELD | _VARIES}, **own["_parameters"], **own["_buffers"]}
        if isinstance(part, LinearGroup):  # all of it follows from its parts
            held = {}
        facts.append((path, type(part), chunks.get(part), tuple((name, _fact(value)) for name, value in held.items())))
    return tuple(facts)


def _fact(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_fact, value))
    if isinstance(value, functools.partial):
        return _fact((value.func, value.args, *value.keywords.items()))
    is_plain = value is None or isinstance(value, str | int | float | torch.dtype | torch.device)
    return (type(value), value) if is_plain else id(value)


@contextmanager
def _attending(parts: LayerParts, attend: Callable[..., Any]) -> Iterator[None]:
    """Inside the block the model calls this function in place of its attention."""
    parts.module.set_attn_implementation(registered_attention(over_rows(attend, parts.chunks)))
    try:
        yield
    finally:
        parts.module.set_attn_implementation(parts.attention)


def _report(done: CompiledLayers) -> None:
    kernels = ", ".join(str(function.num_kernels) for function in done.functions)
    _log.info(
        "layers compiled: %d, of %d kinds (kernels beside products and attention: %s), in %.1f s",
        done.num_layers, len(done.functions), kernels or "none", done.seconds,
    )  # fmt: skip
    for reason, count in done.reasons.items():
        _log.info("layers that are not compiled: %d, because %s", count, reason)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The members of the lists of modules that attend, each once."""
    found: dict[nn.Module, None] = {}
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) and all(map(_attends, part)):
            inside = any(part in layer.modules() for layer in found)
            found |= {} if inside else dict.fromkeys(part)
    return list(found)


def _attends(layer: nn.Module) -> bool:
    return any(isinstance(vars(part).get(INDEX), int) for part in layer.modules())
