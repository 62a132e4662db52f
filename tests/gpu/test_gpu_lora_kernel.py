"""The Triton kernel compiled: the contract's formula, rows that stay alone, the same bits in every batch."""

from __future__ import annotations

import pytest
import torch

from lora_serve.core.batch import SlotRef
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.kernels import create_kernel
from tests.contracts.test_lora_kernel import GROUP_ROWS, POPULARITIES, RANKS, expected, filled_group, tokens_of
from tests.model.tiny import MODULE, filled_slots, random_adapter

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [LinearShape(24, 40), LinearShape(65, 7), LinearShape(4096, 1024)])
def test_delta_is_the_formula(
    popularity: str, model_dtype: torch.dtype, adapter_dtype: torch.dtype, shape: LinearShape
) -> None:
    torch.manual_seed(0)
    rows = POPULARITIES[popularity]
    slots = filled_slots(shape, RANKS, adapter_dtype, CUDA)
    num_tokens = sum(int(row[0]) for row in rows)
    x = torch.randn(num_tokens, shape.in_features, device=CUDA).to(model_dtype)
    y = torch.randn(num_tokens, shape.out_features, device=CUDA).to(model_dtype)
    wanted = expected(y, x, slots, rows)
    create_kernel("triton", slots).add(y, x, (slots.module_index[MODULE],), tokens_of(rows))
    tolerance = 1e-3 if model_dtype == adapter_dtype == torch.float32 else 6e-2
    assert torch.allclose(y.double(), wanted, atol=tolerance, rtol=tolerance)


def test_auto_is_triton() -> None:
    slots = filled_slots(LinearShape(24, 40), RANKS, device=CUDA)
    assert type(create_kernel("auto", slots)).__module__.endswith(".triton")


@pytest.mark.parametrize("rank", [1, 16, 64, 1024])
def test_row_has_the_same_bits_alone_and_among_others(rank: int) -> None:
    torch.manual_seed(0)
    shape = LinearShape(4200, 1024)
    slots = filled_slots(shape, (rank, 8, 33), torch.bfloat16, CUDA)
    kernel = create_kernel("triton", slots)
    x = torch.randn(3, 4200, device=CUDA, dtype=torch.bfloat16)
    x[1] = float("nan")
    together, alone = (torch.zeros(n, 1024, device=CUDA, dtype=torch.bfloat16) for n in (3, 1))
    kernel.add(together, x, (slots.module_index[MODULE],), tokens_of([(1, 0), (1, 1), (1, 2)]))
    kernel.add(alone, x[:1], (slots.module_index[MODULE],), tokens_of([(1, 0)]))
    assert torch.equal(together[0], alone[0])
    assert together[1].isnan().all()
    assert not together[2].isnan().any()


@pytest.mark.parametrize("sizes", [(4096, 1024, 1024), (40, 7, 21)])
def test_group_of_layers_is_the_formula_for_each_on_its_columns(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    slots = filled_group(sizes, torch.bfloat16, CUDA)
    kernel, group = create_kernel("triton", slots), (1, 2, 3)
    x = torch.randn(74, 85, device=CUDA, dtype=torch.bfloat16)
    y = torch.randn(74, sum(sizes), device=CUDA, dtype=torch.bfloat16)
    before, alone = y.clone(), y[:1].clone()
    kernel.add(y, x, group, tokens_of(GROUP_ROWS))
    parts = zip(group, slots.columns(before, group), slots.columns(y, group), strict=True)
    for module, old, new in parts:
        wanted = expected(old, x, slots, GROUP_ROWS, module)
        assert torch.allclose(new.double(), wanted, atol=6e-2, rtol=6e-2)
    kernel.add(alone, x[:1], group, tokens_of(GROUP_ROWS[:1]))
    assert torch.equal(alone, y[:1])


def test_new_owner_is_found_through_the_same_memory() -> None:
    slots = filled_slots(LinearShape(24, 40), (4, 4), device=CUDA)
    kernel, records = create_kernel("triton", slots), slots.device_records().tensor
    x, y = torch.randn(1, 24, device=CUDA), torch.zeros(1, 40, device=CUDA)
    slots.load(SlotRef(0, 2, "new"), random_adapter("new", 3, LinearShape(24, 40)))
    kernel.add(y, x, (slots.module_index[MODULE],), tokens_of([(1, 0)]))
    assert slots.device_records().tensor is records
    assert torch.allclose(y.double(), expected(torch.zeros_like(y), x, slots, [(1, 0)]), atol=1e-3)
