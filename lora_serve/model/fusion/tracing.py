"""One layer's Python code as one compiled function of its weights and its inputs, for any number of tokens.

The layer's own forward runs once on tensors without numbers; torch records the operators, and its compiler (inductor)
makes few kernels of them: norms, rotations, activations and sums in C++ or Triton. Python code is not looked at, so
whatever it does is recorded, but a choice by a tensor's numbers, by the number of tokens or by the layer's index ends
the attempt. Inductor keeps its kernels on disk, in $TORCHINDUCTOR_CACHE_DIR or else beside this project's own kernels:
its default, among the temporary files, has a name that any other user of the machine can take first.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lora_serve.model.fusion.layer_operators import RunningLayer, add_lora, attend
from lora_serve.model.lora.adapted_model import LinearGroup
from lora_serve.model.lora.expert_stacks import StackLora
from lora_serve.model.native.library import usable_cache
from lora_serve.model.step_context import AttentionSettings

INDEX = "layer_idx"
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MAX_TOKENS = 2**15  # of a run; larger tensors may need wider indices
_TOKENS = 509  # of the recorded run, a number that choices of block sizes may rest on, but no result
_OPTIONS = {
    "emulate_precision_casts": True,  # rounds where the layer's own code does
    "compile_threads": 1,  # no pool of processes stays beside the server
}
_TENSOR = object()  # stands among a call's constants where a tensor is
TensorPlace = tuple[str, str, str]  # the path of a module in the layer, the name of its table or "", a name in there


class NotCompiledError(Exception):
    """The reason why a layer cannot be compiled."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The form of a layer's arguments: which are tensors, and all others as they must be."""

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]  # by leaf
    token_dims: tuple[int | None, ...]  # by tensor

    @staticmethod
    def of(first: Any, second: Any) -> LayerInputs:
        """The form of arguments, from two calls with different numbers of tokens. Raises NotCompiledError."""
        (leaves, spec), (others, other_spec) = pytree.tree_flatten(first), pytree.tree_flatten(second)
        constants = _constants(leaves)
        if spec != other_spec or constants != _constants(others):
            raise NotCompiledError("its arguments are not always the same")
        pairs = [(a, b) for a, b in zip(leaves, others, strict=True) if isinstance(a, Tensor)]
        return LayerInputs(spec, constants, tuple(_token_dim(a.shape, b.shape) for a, b in pairs))

    def tensors(self, given: Any) -> list[Tensor] | None:
        """The tensors of a call's arguments, contiguous; None if these have another form."""
        leaves, spec = pytree.tree_flatten(given)
        if spec != self.spec or _constants(leaves) != self.constants:
            return None
        return [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor)]

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Arguments with these tensors and everything else as it must be."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if c is _TENSOR else c for c in self.constants], self.spec)


def _constants(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def _token_dim(first: torch.Size, second: torch.Size) -> int | None:
    dims = [dim for dim, sizes in enumerate(zip(first, second, strict=True)) if len({*sizes}) > 1]
    if len(dims) > 1:
        raise NotCompiledError("more than one dimension of an argument counts tokens")
    return dims[0] if dims else None


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A layer's outputs as a function of its tensors and those of its arguments."""

    run: Callable[..., Any]
    out_spec: pytree.TreeSpec
    attention: str  # the path of the module that attends
    num_kernels: int


def tensor_places(layer: nn.Module) -> dict[TensorPlace, Tensor]:
    """All tensors of a layer: parameters, buffers, and those that are plain attributes."""
    found: dict[TensorPlace, Tensor] = {}
    for path, part in layer.named_modules():
        for table in ("", "_parameters", "_buffers"):
            held = _table(part, table)
            found |= {(path, table, name): value for name, value in held.items() if isinstance(value, Tensor)}
    return found


def groups_of(layer: nn.Module) -> tuple[LinearGroup | StackLora, ...]:
    """The groups of linear layers and stacks of experts inside a layer, in the order of every layer of its kind."""
    return tuple(part for part in layer.modules() if isinstance(part, LinearGroup | StackLora))


def compile_layer(
    layer: nn.Module,
    inputs: LayerInputs,
    example: Sequence[Tensor],
    running: RunningLayer,
    attending: Callable[[Callable[..., Any]], Any],
) -> CompiledFunction:
    """Records and compiles a layer. Raises NotCompiledError and whatever its code and the compiler raise.

    `example`: tensors of a call. `attending`: makes the model call another function in place of attention, for a block.
    """
    tracing, shapes = (
        importlib.import_module(f"torch.fx.experimental.{n}") for n in ("proxy_tensor", "symbolic_shapes")
    )
    fakes = importlib.import_module("torch._subclasses.fake_tensor")
    inductor, metrics = importlib.import_module("torch._inductor"), importlib.import_module("torch._inductor.metrics")
    config = importlib.import_module("torch._inductor.config")
    _keep_kernels_private()
    record = _Recording(layer, inputs, running)
    environment = shapes.ShapeEnv()
    mode = fakes.FakeTensorMode(shape_env=environment)
    counted = _counted_tokens(mode, shapes)
    with torch.inference_mode(False), torch.no_grad(), mode:
        given = [_like(tensor) for tensor in record.places.values()]
        for tensor, dim in zip(example, inputs.token_dims, strict=True):
            sizes = [counted if dim == i else size for i, size in enumerate(tensor.shape)]
            given.append(torch.empty(sizes, dtype=tensor.dtype, device=tensor.device))
        with attending(record.attend):
            graph = tracing.make_fx(record.run)(*given)
    _check_any_number(environment.guards)
    if len(record.attended) != 1:
        raise NotCompiledError(f"it attends {len(record.attended)} times")
    before = metrics.generated_kernel_count
    with torch.inference_mode(False), torch.no_grad(), config.patch(_OPTIONS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's about itself
        run = inductor.standalone_compile(graph, given, dynamic_shapes="from_graph")
    _check_any_number(environment.guards)
    assert record.out_spec is not None
    return CompiledFunction(run, record.out_spec, record.attended[0], metrics.generated_kernel_count - before)


def _keep_kernels_private() -> None:
    """Has inductor keep its kernels, which are code, where only this user can write."""
    if not os.environ.get(CACHE_VARIABLE):
        cache = usable_cache()
        os.environ[CACHE_VARIABLE] = tempfile.mkdtemp() if cache is None else str(cache / "inductor")


def _counted_tokens(mode: Any, shapes: Any) -> torch.SymInt:
    """The number of tokens, as the compiler's unknown."""
    source = importlib.import_module("torch._dynamo.source").ConstantSource("num_tokens")
    is_dynamic = shapes.StatelessSymbolicContext(dynamic_sizes=[shapes.DimDynamic.DYNAMIC])
    found = mode.from_tensor(torch.empty(_TOKENS), source=source, symbolic_context=is_dynamic).shape[0]
    assert isinstance(found, torch.SymInt)
    return found


def _check_any_number(guards: Sequence[Any]) -> None:
    """Raises NotCompiledError unless what was decided by the number of tokens holds for all that may run."""
    for guard in guards:
        symbols = guard.expr.free_symbols
        numbers = {*range(1, 300), *(2**power for power in range(9, 16))}
        if any(guard.expr.subs(dict.fromkeys(symbols, number)) != True for number in numbers):  # noqa: E712
            raise NotCompiledError(f"it depends on the number of tokens: {guard.expr}")


def _like(tensor: Tensor) -> Tensor:
    if type(tensor) not in {Tensor, nn.Parameter}:
        raise NotCompiledError(f"it holds a {type(tensor).__name__}")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class _Recording:
    """One run of a layer's forward on given tensors in place of its own."""

    def __init__(self, layer: nn.Module, inputs: LayerInputs, running: RunningLayer) -> None:
        self.places = tensor_places(layer)
        self.attended: list[str] = []  # paths of modules
        self.out_spec: pytree.TreeSpec | None = None
        self._layer, self._inputs, self._running = layer, inputs, running

    def run(self, *given: Tensor) -> list[Tensor]:
        """The layer's outputs. `given`: its tensors, then those of its arguments."""
        own, rest = given[: len(self.places)], given[len(self.places) :]
        arguments, keywords = self._inputs.arguments(rest)
        with _replaced(self._layer, {**dict(zip(self.places, own, strict=True)), **self._without_indices()}):
            leaves, self.out_spec = pytree.tree_flatten(self._layer.forward(*arguments, **keywords))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise NotCompiledError("its outputs are not all tensors")
        return leaves

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Attention over rows, as an operator."""
        self.attended += [path for path, part in self._layer.named_modules() if part is module]
        return attend(query.contiguous(), key.contiguous(), value, self._running, settings)

    def _without_indices(self) -> dict[TensorPlace, Any]:
        groups = {group: place for place, group in enumerate(groups_of(self._layer))}
        found: dict[TensorPlace, Any] = {}
        for path, part in self._layer.named_modules():
            if isinstance(part, LinearGroup | StackLora):
                found[path, "", "adapt"] = functools.partial(add_lora, running=self._running, place=groups[part])
            if INDEX in vars(part):
                found[path, "", INDEX] = _Unknown()
        return found


class _Unknown:
    """A layer's index while it is recorded: any use of it ends the attempt."""

    def __eq__(self, other: object) -> bool:
        raise NotCompiledError("it depends on its index")

    def __hash__(self) -> int:
        raise NotCompiledError("it depends on its index")

    def __bool__(self) -> bool:
        raise NotCompiledError("it depends on its index")


def _table(part: nn.Module, name: str) -> dict[str, Any]:
    found: dict[str, Any] = vars(part)[name] if name else vars(part)
    return found


@contextmanager
def _replaced(layer: nn.Module, values: Mapping[TensorPlace, Any]) -> Iterator[None]:
    """Inside the block these places hold other values."""
    with ExitStack() as after:
        for (path, table, name), value in values.items():
            held = _table(layer.get_submodule(path), table)
            after.callback(held.__setitem__, name, held[name]) if name in held else after.callback(held.pop, name)
            held[name] = value
        yield
