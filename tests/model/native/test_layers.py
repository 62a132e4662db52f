"""The kernels between a layer's products, against torch and transformers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lora_serve.model.native.layer_kernels import CLAMPED, Gate, LayerKernels

pytestmark = pytest.mark.usefixtures("build")
SIZES = (1, 7, 8, 16, 20, 33, 64, 577)
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
OTHERS = [0, 1, 3, 4, 5, 6, 7, 8]  # all of nine rows but the third


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    torch.manual_seed(0)
    return LayerKernels.load(request.param)


def is_rounded(found: torch.Tensor, wanted: torch.Tensor, error: float = 1e-5) -> bool:
    """True if `found` is `wanted`, float64, but for float32's errors and one rounding to its own type."""
    half_a_place = torch.finfo(found.dtype).eps / 2
    return torch.allclose(found.double(), wanted, atol=error, rtol=error + half_a_place)


@pytest.mark.crossed
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("takes_sums", [False, True])
def test_norm_is_torchs(kernels: LayerKernels, size: int, offset: float, takes_sums: bool) -> None:
    dtype = torch.float32 if takes_sums else kernels.dtype
    x, weight = (torch.randn(2, 9, size) * 3).to(dtype), torch.randn(size)
    found = kernels.rms_norm(x, weight, offset, 1e-5)
    assert found.dtype == dtype
    assert is_rounded(found, F.rms_norm(x.double(), (size,), (weight + offset).double(), 1e-5))
    assert torch.equal(kernels.rms_norm(x[:, 3], weight, offset, 1e-5), found[:, 3])
    strided = torch.randn(9, size + 5).to(dtype)[:, 2 : size + 2]
    assert torch.equal(
        kernels.rms_norm(strided, weight, offset, 1e-5), kernels.rms_norm(strided.clone(), weight, offset, 1e-5)
    )


def test_norm_of_no_tokens_is_empty_and_weights_of_another_size_or_type_are_refused(kernels: LayerKernels) -> None:
    assert kernels.rms_norm(torch.zeros(0, 8), torch.ones(8), 0.0, 1e-5).shape == (0, 8)
    for x, weight in (
        (torch.zeros(3, 8), torch.ones(7)),
        (torch.zeros(3, 8), torch.ones(8, dtype=torch.bfloat16)),
        (torch.zeros(3, 8, dtype=torch.float16), torch.ones(8)),
    ):
        with pytest.raises(ValueError, match="8 features"):
            kernels.rms_norm(x, weight, 0.0, 1e-5)


@pytest.mark.crossed
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_gate_is_torchs(kernels: LayerKernels, activation: str, size: int) -> None:
    both = torch.randn(9, 2 * size) * 4
    found = kernels.gated(both, Gate(activation))
    gate, up = both.double().split(size, -1)
    assert found.dtype == kernels.dtype
    assert is_rounded(found, ACTIVATIONS[activation](gate) * up)
    for first, end in ((0, 1), (3, 4), (2, 9)):
        assert torch.equal(kernels.gated(both[first:end], Gate(activation)), found[first:end])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_of_very_large_numbers_is_torchs(kernels: LayerKernels, activation: str) -> None:
    grid = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([-1e30, -3e4, -0.0, 1e-30, 3e4, 1e30])])
    found = kernels.gated(torch.cat([grid, torch.ones_like(grid)])[None], Gate(activation))[0]
    assert is_rounded(found, ACTIVATIONS[activation](grid).double(), 2e-6)


def test_gate_of_very_negative_numbers_is_as_exact_as_of_others(kernels: LayerKernels) -> None:
    grid = torch.linspace(-85, 0, 4001)
    found = kernels.gated(torch.cat([grid, torch.ones_like(grid)])[None], Gate("silu"))[0]
    half_a_place = torch.finfo(found.dtype).eps / 2
    assert torch.allclose(found.double(), F.silu(grid.double()), rtol=1e-6 + half_a_place, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_clamped_gate_is_gpt_oss_s(kernels: LayerKernels, size: int) -> None:
    both = torch.randn(9, 2 * size) * 9
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=1, intermediate_size=size))
    interleaved = torch.stack(both.double().split(size, -1), -1).flatten(1)
    found = kernels.gated(both, Gate(CLAMPED, experts.alpha, experts.limit, 1.0))
    assert is_rounded(found, experts._apply_gate(interleaved))


def rounded_by_the_kernels(kernels: LayerKernels, x: torch.Tensor) -> torch.Tensor:
    """x [tokens, size] float32 as it lies in the KV cache."""
    pools = torch.zeros(len(x), 1, x.shape[1]).to(kernels.dtype), torch.zeros(len(x), 1, x.shape[1]).to(kernels.dtype)
    nothing, places = torch.zeros(len(x), 0), torch.arange(len(x))
    kernels.rotate_store(x[:, None].clone(), x[:, None].clone(), x[:, None], nothing, nothing, places, pools)
    return pools[1][:, 0]


@pytest.mark.parametrize("size", [16, 33, 7])  # by vectors, by both, one by one
def test_numbers_are_rounded_as_torch_rounds_them(kernels: LayerKernels, size: int) -> None:
    """Ties to even, to infinity where a number is too large, denormal numbers kept."""
    upper = torch.arange(2**16, dtype=torch.int32).sub(2**15) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    every = (upper[:, None] | lower).flatten()
    x = every[: len(every) // size * size].view(torch.float32).view(-1, size)
    found, wanted = rounded_by_the_kernels(kernels, x), x.to(kernels.dtype)
    is_nan = x.isnan()
    assert found[is_nan].isnan().all()
    assert is_nan.any()
    raw = torch.int32 if kernels.dtype == torch.float32 else torch.int16
    assert torch.equal(found[~is_nan].view(raw), wanted[~is_nan].view(raw))


def rotated_by_transformers(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[tokens, heads + kv_heads, size]: the first cos.shape[-1] of each head rotated."""
    both, part = torch.cat([q, k], 1).transpose(0, 1)[None], cos.shape[-1]
    turned, _ = apply_rotary_pos_emb(both[..., :part], both[..., :part], cos[None], sin[None])
    return torch.cat([turned, both[..., part:]], -1)[0].transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "part"), [(4, 2, 16, 16), (3, 1, 20, 8), (1, 1, 6, 6)])
def test_rotation_is_transformers_and_keys_and_values_find_their_places(
    kernels: LayerKernels, heads: int, kv_heads: int, size: int, part: int
) -> None:
    tokens, dtype = 9, kernels.dtype
    y = torch.randn(tokens, (heads + 2 * kv_heads) * size + 3)
    parts = y[:, : (heads + 2 * kv_heads) * size].split([heads * size, kv_heads * size, kv_heads * size], 1)
    q, k, v = (t.unflatten(1, (-1, size)) for t in parts)
    cos, sin = torch.randn(tokens, part), torch.randn(tokens, part)
    wanted, value = rotated_by_transformers(q, k, cos, sin), v.clone()
    places = torch.tensor([5, 19, 4, 0, 1, 12, 13, 7, 6])
    pools = torch.full((20, kv_heads, size), 7.0, dtype=dtype), torch.full((20, kv_heads, size), 7.0, dtype=dtype)
    kernels.rotate_store(q, k, v, cos, sin, places, pools)
    assert torch.allclose(q, wanted[:, :heads], atol=1e-5)
    assert torch.allclose(k, wanted[:, heads:], atol=1e-5)
    assert torch.equal(pools[0][places], k.to(dtype))
    assert torch.equal(pools[1][places], value.to(dtype))
    untouched = sorted(set(range(20)) - set(places.tolist()))
    assert all((pool[untouched] == 7).all() for pool in pools)


def test_bits_of_a_rotation_are_its_tokens_own(kernels: LayerKernels) -> None:
    q, k, v = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    cos, sin, places = torch.randn(9, 16), torch.randn(9, 16), torch.arange(9)

    def run(first: int, end: int) -> tuple[torch.Tensor, ...]:
        pools = torch.zeros(9, 2, 16).to(kernels.dtype), torch.zeros(9, 2, 16).to(kernels.dtype)
        own = slice(first, end)
        turned, keys = q[own].clone(), k[own].clone()
        kernels.rotate_store(turned, keys, v[own], cos[own], sin[own], places[own], pools)
        return turned, pools[0][own], pools[1][own]

    together = run(0, 9)
    for first, end in ((0, 1), (8, 9), (2, 7)):
        alone = run(first, end)
        assert all(torch.equal(a, t[first:end]) for a, t in zip(alone, together, strict=True))


@pytest.mark.parametrize("by_pairs", [True, False])
@pytest.mark.parametrize(("heads", "own", "part", "value"), [(4, 16, 8, 12), (1, 33, 6, 39), (3, 7, 4, 5)])
def test_latent_keys_and_values_are_deepseek_s(
    kernels: LayerKernels, by_pairs: bool, heads: int, own: int, part: int, value: int
) -> None:
    tokens, dtype, size = 9, kernels.dtype, own + part
    q, kv = torch.randn(tokens, heads, size), torch.randn(tokens, heads, own + value)
    latent = torch.randn(tokens, 5 + part)
    angles = torch.randn(tokens, part // 2).repeat(1, 2)
    cos, sin, shared = angles.cos(), angles.sin(), latent[:, 5:]
    rotate = apply_rotary_pos_emb_interleave if by_pairs else apply_rotary_pos_emb
    turned, ends = rotate(q[None, ..., own:].transpose(1, 2), shared[None, None], cos[None], sin[None])
    keys = torch.cat([kv[..., :own], ends[0, 0][:, None].expand(-1, heads, -1)], -1)
    places = torch.tensor([5, 19, 4, 0, 1, 12, 13, 7, 6])
    pools = torch.full((20, heads, size), 7.0, dtype=dtype), torch.full((20, heads, size), 7.0, dtype=dtype)
    before = q.clone()
    kernels.latent_store(q, kv, shared, cos, sin, places, pools, by_pairs=by_pairs)
    assert torch.equal(q[..., :own], before[..., :own])
    assert torch.allclose(q[..., own:], turned[0].transpose(0, 1), atol=1e-5)
    assert is_rounded(pools[0][places], keys.double())
    assert torch.equal(pools[1][places], F.pad(kv[..., own:], (0, size - value)).to(dtype))
    untouched = sorted(set(range(20)) - set(places.tolist()))
    assert all((pool[untouched] == 7).all() for pool in pools)


def test_tables_that_are_too_wide_are_refused(kernels: LayerKernels) -> None:
    """What lies behind a head is another's."""
    q, table, places = torch.randn(2, 1, 8), torch.ones(2, 16), torch.arange(2)
    pools = torch.zeros(2, 1, 8).to(kernels.dtype), torch.zeros(2, 1, 8).to(kernels.dtype)
    with pytest.raises(ValueError, match="16 numbers of 8"):
        kernels.rotate_store(q, q, q, table, table, places, pools)
    with pytest.raises(ValueError, match="by 16"):
        kernels.latent_store(q, q, q[:, 0, 4:], table, table, places, pools, by_pairs=True)


def test_row_that_is_not_a_number_reaches_no_other(kernels: LayerKernels) -> None:
    x = torch.randn(9, 20)
    functions = {
        "norm": lambda t: kernels.rms_norm(t.to(kernels.dtype), torch.ones(20), 0.0, 1e-5),
        "silu": lambda t: kernels.gated(t, Gate("silu")),
        "gelu": lambda t: kernels.gated(t, Gate("gelu_tanh")),
        "clamped": lambda t: kernels.gated(t, Gate(CLAMPED, 1.7, 7.0, 1.0)),
    }
    clean = {name: function(x) for name, function in functions.items()}
    x[2] = float("nan")
    for name, function in functions.items():
        found = function(x)
        assert found[2].isnan().all()
        assert torch.equal(found[OTHERS], clean[name][OTHERS])
