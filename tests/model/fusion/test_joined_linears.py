"""Linear layers of one input that were joined give what they gave one by one, and their adapters are one launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from lora_serve.core.batch import ActivationModel, Row
from lora_serve.model.base_model import BaseModel
from lora_serve.model.lora.adapted_model import LinearGroup, LoraLinear
from lora_serve.model.memory_setup import ActivationProbe
from tests.model.fusion.test_compiled_layers import NEAR, NEAR_ROUNDED, OperatorCounts, World, is_near
from tests.oracle import ARCHITECTURES, load_plain

JOINED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]

JOINED_IN_CHECKPOINTS = ("gpt2", "gpt_neox", "phi3")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("llama", tmp_path_factory.mktemp("joined"), num_layers=2, compiles=False)


@contextmanager
def one_by_one(world: World) -> Iterator[None]:
    """Inside the block each layer computes its own product."""
    for group in world.groups:
        for part in group.parts:
            part.group = LinearGroup((part,), part.base)
    yield
    for group in world.groups:
        for part in group.parts:
            part.group = group


def both_ways(world: World, *rows: Row) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Logits and the cache, one by one and joined."""
    results = []
    for is_joined in (False, True):
        world.runner._cache.zero([block for row in rows if row.start == 0 for block in row.block_table])
        if is_joined:
            logits = world.logits(*rows)
        else:
            with one_by_one(world):
                logits = world.logits(*rows)
        results.append((logits, world.runner._cache._pools[0].clone()))
    return results[0], results[1]


def names_of(world: World) -> list[tuple[str, ...]]:
    paths = {module: path for path, module in world.base.module.named_modules()}
    return [tuple(paths[part].rpartition(".")[2] for part in group.parts) for group in world.groups]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), ("llama", "float16"), ("qwen2", "float32"), ("qwen3", "float32")],
)
def test_joined_layers_give_what_each_gave_alone(architecture: str, dtype: str, tmp_path: Path) -> None:
    world = World(architecture, tmp_path, num_layers=2, dtype=dtype, compiles=False)
    assert names_of(world) == JOINED * 2
    changed = "gains" if architecture == "llama" else "a"
    rows = [world.decode(0, 5, "a"), world.decode(1, 30), world.decode(2, 17, "b", "a"), world.decode(3, 8, changed)]
    for batch in (rows[:1], rows, [*rows, world.prompt(4, 26, "b"), world.prompt(5, 70, changed), world.prompt(6, 3)]):
        near = NEAR if dtype == "float32" else NEAR_ROUNDED
        for expected, found in zip(*both_ways(world, *batch), strict=True):
            assert is_near(found.float(), expected.float(), near)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_of_every_architecture_are_joined(architecture: str, tmp_path: Path) -> None:
    world = World(architecture, tmp_path, num_layers=2, compiles=False)
    assert bool(world.groups) == (architecture not in JOINED_IN_CHECKPOINTS)
    rows = [world.decode(0, 5, "a"), world.decode(1, 20), world.prompt(2, 26, "b")]
    for expected, found in zip(*both_ways(world, *rows), strict=True):
        assert is_near(found, expected)


@torch.inference_mode()
def test_weights_lie_in_one_piece_and_are_still_each_layers_own(world: World) -> None:
    plain = load_plain(Path(world.engine.settings.model))
    paths = {module: path for path, module in world.base.module.named_modules()}
    for group in world.groups:
        whole = group.base.weight.stored
        assert whole is not None
        assert whole.untyped_storage().nbytes() == whole.nbytes
        for part in group.parts:
            assert part.base.weight.stored is not None
            assert part.base.weight.stored.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            own = plain.get_parameter(f"{paths[part]}.weight")
            assert torch.equal(world.base.parameters_of(paths[part])["weight"], own)
            assert torch.allclose(part.base.row_square_norms(), own.square().sum(1))
            x = torch.randn(3, own.shape[1])
            assert torch.allclose(part.base.product(x), x @ own.t(), atol=1e-5)


def test_layer_is_four_products_and_eight_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActivationProbe, "learn", lambda *_: ActivationModel())  # the interpreter takes 10 s for it
    world = World("llama", tmp_path, num_layers=2, lora_kernel="triton", compiles=False)
    programs = world.base.kernel._programs = CountedPrograms(world.base.kernel._programs)
    rows = [world.decode(0, 5, "a"), world.decode(1, 9, "b"), world.decode(2, 7)]
    programs.num_launches = 0
    with OperatorCounts() as counts:
        found = world.logits(*rows)
    assert counts.products == 4 * 2 + 1  # and the output head's
    assert programs.num_launches == 8 * 2  # no adapter touches the output head
    other = World("llama", tmp_path / "loop", num_layers=2, compiles=False)
    same = [other.decode(0, 5, "a"), other.decode(1, 9, "b"), other.decode(2, 7)]
    assert is_near(found, other.logits(*same))


class CountedPrograms:
    """Stands for the module of Triton programs and counts launches."""

    def __init__(self, programs: Any) -> None:
        self._programs, self.num_launches = programs, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._programs, name)
        if not hasattr(found, "__getitem__"):
            return found
        self.num_launches += 1
        return found


def test_part_is_taken_once_in_the_same_step_for_the_same_object(world: World) -> None:
    group = world.groups[0]
    context, (first, second, third) = world.base.context, group.parts
    step, _ = world.runner._packer.pack([world.decode(0, 5)])
    x = torch.randn(1, 1, first.base.in_features)
    expected = [part.base(x) for part in group.parts]

    def computed(part: LoraLinear, x: Tensor) -> tuple[Tensor, int]:
        with OperatorCounts() as counts:
            found = part(x)
        return found, counts.products

    with torch.inference_mode(), context.running(step):
        results = [computed(part, x) for part in group.parts]
        assert [count for _, count in results] == [1, 0, 0]
        assert all(is_near(found, wanted) for (found, _), wanted in zip(results, expected, strict=True))
        results[1][0].zero_()  # what a model does to its own outputs
        assert is_near(computed(second, x)[0], expected[1])
        first(x)
        equal = x.clone()
        assert computed(second, equal)[1] == 1
        assert computed(second, 2 * x)[1] == 1
        assert computed(third, x)[1] == 0
        first(x)
    with torch.inference_mode(), context.running(step):
        x.mul_(2)
        found, count = computed(second, x)
        assert count == 1
        assert is_near(found, second.base(x))


def _changes_its_input(self: Any, x: Tensor) -> Tensor:
    gate = self.act_fn(self.gate_proj(x))
    return self.down_proj(gate * self.up_proj(x.mul_(0.5)))


def _needs_whole_rows(self: Any, x: Tensor) -> Tensor:
    hidden = self.act_fn(self.gate_proj(x).view(-1)) * self.up_proj(x).view(-1)
    return self.down_proj(hidden.view(*x.shape[:-1], -1))


def _gives_copies(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x.clone())) * self.up_proj(x.clone()))


@pytest.mark.many(2)
@pytest.mark.parametrize("forward", [_changes_its_input, _needs_whole_rows, _gives_copies])
def test_layers_that_would_compute_something_else_stay_alone(
    forward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    world = World("llama", tmp_path, num_layers=2, compiles=False)
    assert ("gate_proj", "up_proj") not in names_of(world)
    row = world.prompt(0, 9, "a")
    expected, found = both_ways(world, row)
    assert is_near(found[0], expected[0])


def test_weight_that_another_module_reads_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join = BaseModel.join

    def join_with_another(base: BaseModel) -> list[LinearGroup]:
        mlp = base.module.model.layers[0].mlp
        mlp.also = nn.Parameter(mlp.up_proj.base.weight.stored, requires_grad=False)
        return join(base)

    monkeypatch.setattr(BaseModel, "join", join_with_another)
    world = World("llama", tmp_path, num_layers=2, compiles=False)
    assert names_of(world) == [JOINED[0], *JOINED]
