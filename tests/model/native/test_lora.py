"""The LoRA delta in C: what `tests/contracts/test_lora_kernel.py` does not ask of every kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lora_serve.core.batch import BASE_SLOT
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.kernels.native import Kernel
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native import compiler
from lora_serve.model.step_context import PIECE, LoraTokens
from tests.model.tiny import MODULE, filled_slots

pytestmark = pytest.mark.usefixtures("build")
SHAPES = [LinearShape(24, 40), LinearShape(65, 7), LinearShape(70, 99)]
RANKS = (1, 3, 4, 8, 9, 16, 33)


def add(slots: LoraSlots, x: torch.Tensor, y: torch.Tensor, rows: list[tuple[int, int, float]]) -> torch.Tensor:
    """A copy of y with the deltas added."""
    found = y.clone()
    Kernel(slots).add(found, x, (slots.module_index[MODULE],), LoraTokens.of(rows))
    return found


@pytest.mark.crossed
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_token_are_its_own_in_a_segment_of_any_length(
    shape: LinearShape, dtype: torch.dtype, inputs: torch.dtype
) -> None:
    torch.manual_seed(0)
    slots = filled_slots(shape, RANKS, dtype)
    x, y = torch.randn(41, shape.in_features).to(inputs), torch.randn(41, shape.out_features)
    for slot in range(len(RANKS)):
        alone = torch.cat([add(slots, x[i : i + 1], y[i : i + 1], [(1, slot, 0.7)]) for i in range(41)])
        for length in (2, 3, 5, 6, 7, 11, 12, 13, 25, 41):
            assert torch.equal(add(slots, x[:length], y[:length], [(length, slot, 0.7)]), alone[:length])


def test_bits_of_a_token_do_not_depend_on_other_adapters() -> None:
    torch.manual_seed(0)
    slots = filled_slots(LinearShape(70, 99), RANKS)
    x, y = torch.randn(34, 70), torch.randn(34, 99)
    rows = [(1, 0, 1.0), (9, 5, 0.5), (3, BASE_SLOT, 1.0), (20, 6, 1.0), (1, 5, 2.0)]
    together, start = add(slots, x, y, rows), 0
    for length, slot, scale in rows:
        end = start + length
        assert torch.equal(together[start:end], add(slots, x[start:end], y[start:end], [(length, slot, scale)]))
        start = end
    assert torch.equal(together[10:13], y[10:13])


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_of_bfloat16_are_taken_as_the_numbers_they_are(shape: LinearShape) -> None:
    torch.manual_seed(0)
    slots, rows = filled_slots(shape, RANKS), [(1, 0, 1.0), (13, 5, 0.5), (2, BASE_SLOT, 1.0), (20, 6, 1.0)]
    x, y = torch.randn(36, shape.in_features + 3).bfloat16()[:, 3:], torch.randn(36, shape.out_features)
    assert torch.equal(add(slots, x, y, rows), add(slots, x.float(), y, rows))


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 7, 513, 1030])
@pytest.mark.parametrize("shape", SHAPES)
def test_delta_is_the_formula_at_any_rank(shape: LinearShape, rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slots = filled_slots(shape, (rank,), dtype)
    weights = slots.delta(slots.module_index[MODULE], 0)
    assert weights is not None
    x, y = torch.randn(13, shape.in_features), torch.randn(13, shape.out_features)
    wanted = x.double() @ weights.a.double().t() @ weights.b.double() * weights.scale
    wanted += y.double() * (1 if weights.gain is None else weights.gain.double())
    wanted += 0 if weights.shift is None else weights.shift.double()
    for rows in (1, 13):
        found = add(slots, x[:rows], y[:rows], [(rows, 0, 1.0)])
        assert torch.allclose(found.double(), wanted[:rows], atol=1e-3, rtol=1e-4)


def test_inputs_and_outputs_may_be_columns_of_wider_tensors() -> None:
    slots = filled_slots(LinearShape(24, 40), RANKS)
    wide_x, wide_y, rows = torch.randn(15, 50), torch.randn(15, 90), [(1, 1, 1.0), (14, 4, 1.0)]
    wanted = add(slots, wide_x[:, 5:29].contiguous(), wide_y[:, 30:70].contiguous(), rows)
    for x in (wide_x[:, 5:29], wide_x[:, 5:29].t().contiguous().t()):
        found = wide_y.clone()
        Kernel(slots).add(found[:, 30:70], x, (slots.module_index[MODULE],), LoraTokens.of(rows))
        assert torch.equal(found[:, 30:70], wanted)
        assert torch.equal(found[:, :30], wide_y[:, :30])
        assert torch.equal(found[:, 70:], wide_y[:, 70:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_token_that_is_not_finite_reaches_no_other_of_its_segment(bad: float) -> None:
    slots = filled_slots(LinearShape(24, 40), RANKS)
    x, y = torch.randn(14, 24), torch.randn(14, 40)
    clean = add(slots, x, y, [(14, 4, 1.0)])
    x[5, 3] = bad
    found = add(slots, x, y, [(14, 4, 1.0)])
    others = [i for i in range(14) if i != 5]
    assert not found[5].isfinite().any()
    assert torch.equal(found[others], clean[others])


def test_pieces_are_no_longer_than_the_kernel_has_room_for() -> None:
    source = (Path(compiler.__file__).parent / "lora.c").read_text()
    assert re.findall(r"#define CHUNK (\d+)", source) == [str(PIECE)]


@pytest.mark.parametrize(
    ("threads", "length", "wanted"), [(1, 20, [20]), (2, 20, [10, 10]), (2, 96, [32] * 3), (16, 60, [12] * 5)]
)
def test_long_segment_is_cut_once_more_only_where_threads_would_wait(
    monkeypatch: pytest.MonkeyPatch, threads: int, length: int, wanted: list[int]
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    pieces = LoraTokens.of([(5, BASE_SLOT, 1.0), (length, 3, 1.0)]).pieces.tolist()
    assert [count for _, count, _ in pieces] == wanted
    assert [first for first, _, _ in pieces] == [5 + sum(wanted[:i]) for i in range(len(wanted))]
