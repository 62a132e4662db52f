"""Layers that torch compiled give what their own code gives, and those that cannot be compiled are left as they are."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from lora_serve.core.batch import Batch, Row, RowAdapter, SlotRef
from lora_serve.model.base_model import BaseModel
from lora_serve.model.fusion import tracing
from lora_serve.model.fusion.compiled import CompiledLayers, decoder_layers
from lora_serve.model.lora.adapted_model import LinearGroup
from lora_serve.model.native import operators
from tests.loading import load_adapter
from tests.local_engine import LocalEngine
from tests.oracle import ARCHITECTURES, load_plain, peft_may_warn, save_adapter, save_tiny_model
from tests.peft_kinds import save_kind
from tests.tiers import mostly_nightly

KINDS: Mapping[str, int] = {"llama": 1, "qwen3": 1, "gemma3_text": 2}  # gemma's: with a window and without
# Loops of a layer, as inductor counts them: a function that is called once has several of them on a CPU.
MOST_KERNELS: Mapping[str, int] = {"llama": 14, "qwen3": 16, "gemma3_text": 20}
LENGTHS = (5, 21, 9)
NEAR, NEAR_ROUNDED = 1e-5, 2e-2  # of the largest logit, in float32 and in bfloat16


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """The compiler writes into it, and what other tests start would have it."""
    with mock.patch.dict(os.environ):
        yield


class World:
    """A model whose layers were joined and compiled, on a CPU with weights as they lie on a GPU, and adapters in its
    slots.
    """

    def __init__(
        self,
        architecture: str,
        root: Path,
        num_layers: int = 3,
        dtype: str = "float32",
        lora_kernel: str = "loop",
        *,
        compiles: bool = True,
    ) -> None:
        layers = {} if architecture == "gpt2" else {"num_hidden_layers": num_layers, "max_position_embeddings": 512}
        if architecture == "gemma3_text":
            layers["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"][:num_layers]
        model = save_tiny_model(architecture, root / "model", **layers)
        folders = {name: save_adapter(model, root / name, seed=i) for i, name in enumerate("ab")}
        if architecture == "llama":
            folders["norms"] = save_kind("save_norms", architecture, model, root / "norms")
            folders["gains"] = save_gains(model, root / "gains")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operators, "why_not", lambda weight: "not on a GPU")
            self.engine = LocalEngine(
                model, folders, block_size=4, max_loras=4, kv_cache_memory="2MiB", lora_kernel=lora_kernel,
                attention="sdpa", fuse_layers=False, max_model_len=120, dtype=dtype,
            )  # fmt: skip
        self.runner: Any = self.engine.parts.runner
        self.base = self.runner._model
        self.layers = decoder_layers(self.base.module)
        self.base.group_experts()
        self.groups: list[LinearGroup] = self.base.join()
        self.outcome: CompiledLayers = self.base.compile() if compiles else CompiledLayers()
        self.adapters = {name: self._load(name, slot) for slot, name in enumerate(folders)}

    def _load(self, name: str, index: int) -> RowAdapter:
        ref = self.engine.refs[name]
        slot = SlotRef(index, 1, ref.digest)
        self.runner.load_slot(slot, self.engine.parts.fold(load_adapter(self.engine._folders[name], ref, self.spec)))
        return RowAdapter(slot)

    @property
    def spec(self) -> Any:
        return self.engine.parts.spec

    def prompt(self, i: int, length: int, *names: str) -> Row:
        """The row of a whole prompt, in blocks of its own."""
        table = tuple(range(1 + 26 * i, 1 + 26 * i + length // 4 + 1))
        tokens = tuple((7 * i + 3 * j) % 90 + 3 for j in range(length))
        return Row(i, tokens, 0, table, tuple(self.adapters[name] for name in names), None, tokens)

    def decode(self, i: int, length: int, *names: str) -> Row:
        """The row of one token after a prompt, which is put into the cache."""
        row = self.prompt(i, length, *names)
        with self.own_code():
            self.runner.run(Batch((row,), row.block_table))
        return Row(i, (5 + i,), length, row.block_table, row.adapters, None, (5 + i,))

    def logits(self, *rows: Row) -> Tensor:
        step, _ = self.runner._packer.pack(rows)
        return self.base.logits(step).clone()

    def agree(self, *rows: Row) -> None:
        """Both ways on the same rows, which write the same K and V."""
        blocks = [block for row in rows if row.start == 0 for block in row.block_table]
        results = []
        for way in (self.own_code, self.compiled_code):
            self.runner._cache.zero(blocks)
            with way():
                results.append((self.logits(*rows), self.runner._cache._pools[0].clone()))
        (expected, cached), (found, also_cached) = results
        near = NEAR if cached.dtype == torch.float32 else NEAR_ROUNDED
        assert is_near(found, expected, near)
        assert is_near(also_cached, cached, near)

    @contextmanager
    def own_code(self) -> Iterator[None]:
        found = {layer: vars(layer).pop("forward") for layer in self.layers if "forward" in vars(layer)}
        try:
            yield
        finally:
            for layer, forward in found.items():
                layer.forward = forward

    @contextmanager
    def compiled_code(self) -> Iterator[None]:
        """Fails if a layer takes another way."""
        before = [layer.forward.own for layer in self.layers]
        for layer in self.layers:
            layer.forward.own = None
        try:
            yield
        finally:
            for layer, own in zip(self.layers, before, strict=True):
                layer.forward.own = own


def save_gains(model: Path, folder: Path) -> Path:
    """(IA)3: gains of the outputs of queries, keys and values, and of the inputs of all layers after a norm."""
    attention, inside = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]
    with peft_may_warn():
        found = peft.get_peft_model(
            load_plain(model),
            peft.IA3Config(target_modules=[*attention, *inside], feedforward_modules=inside, task_type="CAUSAL_LM"),
        )
        for name, parameter in found.named_parameters():
            if "ia3" in name:
                parameter.data = 0.5 + torch.rand(parameter.shape, generator=torch.Generator().manual_seed(3))
        found.save_pretrained(folder)
    return folder


class OperatorCounts(TorchDispatchMode):
    """How often torch's products and the operator of adapters are called inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.adapters = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.products += name in ("aten::linear", "aten::mm", "aten::addmm")
        self.adapters += name == "lora_serve::add_lora_"
        return func(*args, **(kwargs or {}))


def is_near(found: Tensor, expected: Tensor, near: float = NEAR) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= near * expected.abs().max())


@pytest.fixture(scope="module", autouse=True)
def kernels_are_kept_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="module", params=mostly_nightly(KINDS, "llama"))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, tmp_path_factory.mktemp(request.param))


def architecture_of(world: World) -> str:
    return str(world.base.module.config.model_type)


def test_layers_of_a_kind_share_one_function_of_few_kernels(world: World) -> None:
    name = architecture_of(world)
    assert (world.outcome.num_layers, dict(world.outcome.reasons)) == (3, {})
    assert len(world.outcome.functions) == KINDS[name]
    assert len({id(layer.forward._function) for layer in world.layers}) == KINDS[name]
    assert [
        function.num_kernels for function in world.outcome.functions if function.num_kernels > MOST_KERNELS[name]
    ] == []


def test_layer_is_four_products_and_four_additions_of_adapters(world: World) -> None:
    row = world.decode(0, 5, "a")
    with world.compiled_code(), mock.patch.object(type(world.base.kernel), "add"), OperatorCounts() as counts:
        world.logits(row)
    assert counts.products == 4 * len(world.layers) + 1  # and the output head's
    assert counts.adapters == 4 * len(world.layers)


def test_steps_of_all_forms_agree_with_the_layers_own_code(world: World) -> None:
    decoding = [world.decode(i, length, *names) for i, length, names in ((0, 5, "a"), (1, 30, ""), (2, 17, "ba"))]
    world.agree(*decoding)
    world.agree(world.prompt(3, 40, "b"))
    world.agree(world.prompt(3, 40))
    world.agree(*decoding, world.prompt(3, 26, "a"), world.prompt(4, 3), world.prompt(5, 100, "a", "b"))


def test_no_number_of_tokens_compiles_anything(world: World) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    before = (metrics.generated_kernel_count, {name: dict(found) for name, found in counters.items()})
    for length in (1, 2, 3, 16, 63, 64, 100):
        world.agree(world.prompt(0, length, "a"))
    world.agree(*(world.prompt(i, 100) for i in range(3)))  # 300 tokens
    assert before == (metrics.generated_kernel_count, {name: dict(found) for name, found in counters.items()})


def test_rows_have_the_same_bits_in_any_company_in_which_products_have(world: World) -> None:
    """torch's own product on a CPU sums otherwise for one to three rows, which only come near."""
    rows = [world.decode(i, 5 + 3 * i, *"ab"[i % 2 :]) for i in range(6)]
    with world.own_code():
        assert torch.equal(world.logits(*rows[:4]), world.logits(*rows)[:4])
    with world.compiled_code():
        assert torch.equal(world.logits(*rows[:4]), world.logits(*rows)[:4])
        assert is_near(world.logits(rows[0]), world.logits(*rows)[:1])


@pytest.mark.parametrize("world", ["llama"], indirect=True)
def test_step_of_an_adapter_that_changes_norms_takes_the_layers_own_code(world: World) -> None:
    rows = [world.prompt(0, 9, "a"), world.prompt(1, 12, "norms")]
    with world.own_code():
        expected = world.logits(*rows)
    assert torch.equal(world.logits(*rows), expected)
    with world.compiled_code(), pytest.raises(TypeError):
        world.logits(*rows)
    with world.compiled_code():
        world.logits(rows[0])


_mlp = modeling_llama.LlamaMLP.forward
_attention = modeling_llama.LlamaAttention.forward


def _by_numbers(self: Any, x: Tensor) -> Tensor:
    return _mlp(self, x) if x.sum() > 1e9 else _mlp(self, x) * 0.5


def _by_count(self: Any, x: Tensor) -> Tensor:
    return _mlp(self, x) if x.shape[1] > 40 else _mlp(self, x) * 0.5


def _by_index(self: Any, *arguments: Any, **keywords: Any) -> Any:
    out, weights = _attention(self, *arguments, **keywords)
    return (out * 0.5 if self.layer_idx == 1 else out), weights


def _by_how_it_runs(self: Any, x: Tensor) -> Tensor:
    return _mlp(self, x) * (1.01 if type(x).__name__ == "FakeTensor" else 1.0)


def _by_hidden_state(self: Any, x: Tensor) -> Tensor:
    return _mlp(self, x) * HIDDEN["scale"]


HIDDEN = {"scale": torch.tensor(1.5)}
REFUSED: Mapping[str, tuple[type[nn.Module], Callable[..., Any], str]] = {
    "a choice by numbers": (modeling_llama.LlamaMLP, _by_numbers, "GuardOnDataDependentSymNode|data-dependent"),
    "a choice by the number of tokens": (modeling_llama.LlamaMLP, _by_count, "it depends on the number of tokens: "),
    "a choice by the layer": (modeling_llama.LlamaAttention, _by_index, "it depends on its index"),
    "other code where it is recorded": (modeling_llama.LlamaMLP, _by_how_it_runs, "computes something else"),
    "a tensor that is not the layer's": (modeling_llama.LlamaMLP, _by_hidden_state, "FakeTensor"),
}


@pytest.mark.many(3)
@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_compiled_stay_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, forward, reason = REFUSED[name]
    monkeypatch.setattr(owner, "forward", forward)
    with caplog.at_level(logging.INFO, "lora_serve.model.fusion.compiled"):
        world = World("llama", tmp_path, num_layers=2)
    (found,) = (record.getMessage() for record in caplog.records if "not compiled" in record.getMessage())
    assert found.startswith("layers that are not compiled: 2, because ")
    assert re.search(reason, found), found
    assert [layer for layer in world.layers if "forward" in vars(layer)] == []
    row = world.prompt(0, 9, "a")
    (answer,) = world.engine.run([world.engine.request(list(row.token_ids), "a", max_tokens=4, ignore_eos=True)])
    assert answer.error is None
    assert len(answer.token_ids) == 4


def test_layers_of_many_kinds_are_not_compiled_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(99))
    start = modeling_llama.LlamaMLP.__init__

    def number(self: Any, config: Any) -> None:
        start(self, config)
        self.number = next(made)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "__init__", number)
    assert dict(World("llama", tmp_path, num_layers=9).outcome.reasons) == {"they are of 9 kinds": 9}


def test_cpu_compiles_nothing_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[BaseModel] = []
    monkeypatch.setattr(BaseModel, "compile", compiled.append)
    engine = LocalEngine(save_tiny_model("llama", tmp_path / "model"), kv_cache_memory="1MiB")
    assert (engine.settings.compile_layers, compiled) == (True, [])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "deepseek_v3"])  # stays eager
def test_layers_of_every_architecture_are_compiled(architecture: str, dtype: str, tmp_path: Path) -> None:
    world = World(architecture, tmp_path, num_layers=2, dtype=dtype)
    eager = {"llama4_text": 1}.get(architecture, 0)  # it asks the running step for positions
    assert (world.outcome.num_layers, world.outcome.reasons.total()) == (2 - eager, eager)
    world.layers = [layer for layer in world.layers if "forward" in vars(layer)]
    world.agree(world.decode(0, 5, "a"), world.decode(1, 20), world.prompt(2, 26, "b"))


def test_kernels_are_kept_where_no_other_user_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(tracing.CACHE_VARIABLE, "")
    tracing._keep_kernels_private()
    folder = Path(os.environ[tracing.CACHE_VARIABLE])
    assert folder.is_relative_to(tmp_path)
    assert folder.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(tracing.CACHE_VARIABLE, "/mine")
    tracing._keep_kernels_private()
    assert os.environ[tracing.CACHE_VARIABLE] == "/mine"
