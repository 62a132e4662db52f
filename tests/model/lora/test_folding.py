"""What the frozen base contributes to an adapter is worked in once, exactly, and nothing of the base is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.adapters.checkpoint.saved import (
    SavedAdapter,
    SavedDelta,
    SavedEmbedding,
    SavedLinear,
    SavedTokens,
)
from lora_serve.model.lora.changes import EmbeddingDelta, HeadRows, InputGain, ReplacedLinear, TokenRows, Twin
from tests.local_engine import LocalEngine
from tests.oracle import load_fresh, save_tiny_model

UP = "model.layers.0.mlp.up_proj"
Q = "model.layers.0.self_attn.q_proj"
HEAD, EMBEDDING, NORM = "lm_head", "model.embed_tokens", "model.norm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen2", tmp_path_factory.mktemp("fold") / "model", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def engine(folder: Path) -> LocalEngine:
    return LocalEngine(folder, block_size=4, kv_cache_memory="100KiB")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return load_fresh(folder)


def saved(**parts: Any) -> SavedAdapter:
    return SavedAdapter("sha256:x", **{"linears": {}, **parts})


def test_plain_lora_is_handed_on_bit_by_bit_in_one_piece_of_memory(engine: LocalEngine) -> None:
    linear = SavedLinear(torch.randn(4, 32), torch.randn(4, 64), 2.0)
    adapter = engine.parts.fold(saved(linears={UP: linear}))
    delta = adapter.deltas[UP]
    assert delta.a is not None
    assert delta.b is not None
    assert torch.equal(delta.a, linear.a)
    assert torch.equal(delta.b, linear.b)
    assert adapter.arena is not None
    assert adapter.arena.data_ptr() == delta.a.data_ptr()
    assert adapter.columns is not None
    assert int(adapter.columns.tables.b.max()) == delta.b.data_ptr()
    assert (delta.scale, delta.gain, delta.shift) == (2.0, None, None)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_dora_gain_is_magnitude_over_the_norm_of_the_whole_weight(
    engine: LocalEngine, plain: Any, scale: float
) -> None:
    layer = plain.get_submodule(Q)
    a, b, magnitude = torch.randn(4, 32), torch.randn(4, 32), torch.rand(32) + 0.5
    delta = engine.parts.fold(saved(linears={Q: SavedLinear(a, b, scale, magnitude=magnitude)})).deltas[Q]
    whole = layer.weight.double() + scale * b.double().t() @ a.double()
    gain = magnitude.double() / whole.norm(dim=1)
    assert torch.allclose(delta.gain.double(), gain, rtol=1e-5)
    x = torch.randn(5, 32)
    wanted = (x.double() @ whole.t()) * gain + layer.bias.double()
    found = layer(x) * delta.gain + delta.shift + scale * (x @ delta.a.t()) @ delta.b
    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_trained_bias_replaces_the_layers_own(engine: LocalEngine, plain: Any) -> None:
    bias = torch.randn(32)
    delta = engine.parts.fold(saved(linears={Q: SavedLinear(bias=bias)})).deltas[Q]
    assert delta.rank == 0
    x = torch.randn(3, 32)
    assert torch.allclose(
        plain.get_submodule(Q)(x) + delta.shift, x @ plain.get_submodule(Q).weight.t() + bias, atol=1e-5
    )


def test_dora_of_an_embedding_divides_by_the_norms_of_its_columns(engine: LocalEngine, plain: Any) -> None:
    table = plain.get_submodule(EMBEDDING).weight.double()
    a, b, magnitude = torch.randn(97, 3), torch.randn(3, 32), torch.rand(32) + 0.5
    embedding = SavedEmbedding(a, b, 0.7, magnitude)
    (change,) = engine.parts.fold(saved(embeddings={EMBEDDING: embedding})).changes[EMBEDDING]
    assert isinstance(change, EmbeddingDelta)
    whole = table + 0.7 * a.double() @ b.double()
    wanted = whole * magnitude.double() / whole.norm(dim=0)
    ids = torch.tensor([[4, 90, 4]])
    y = plain.get_submodule(EMBEDDING)(ids).detach().clone()
    change.apply(y, (ids,), 1.0)
    assert torch.allclose(y.double(), wanted[ids], atol=1e-5)


def test_saved_copy_of_the_base_costs_nothing(engine: LocalEngine, plain: Any) -> None:
    """PEFT's save_embedding_layers writes the embedding and the head beside the LoRA, trained or not."""
    copies = {
        EMBEDDING: {"weight": plain.get_submodule(EMBEDDING).weight.clone()},
        HEAD: {"weight": plain.get_submodule(HEAD).weight.clone()},
    }
    host = engine.parts.fold(saved(parameters=copies))
    assert host.changes == {}
    assert host.num_bytes == 0
    copies[HEAD]["weight"][5, 5] += 1.0
    changed = engine.parts.fold(saved(parameters=copies))
    assert set(changed.changes) == {HEAD}
    assert changed.num_bytes == 32 * 4 + 8, "of a table that is the base's but for one row, that row is kept"
    copies[HEAD]["weight"] += 1.0
    assert engine.parts.fold(saved(parameters=copies)).num_bytes == copies[HEAD]["weight"].nbytes


def test_each_kind_becomes_its_change_and_counts_its_own_bytes(engine: LocalEngine, plain: Any) -> None:
    rows = torch.randn(2, 32)
    host = engine.parts.fold(
        saved(
            linears={UP: SavedLinear(input_gain=torch.rand(32)), Q: SavedLinear(output_gain=torch.rand(32))},
            tokens={EMBEDDING: SavedTokens((3, 7), rows)},
            parameters={NORM: {"weight": torch.rand(32)}, HEAD: {"weight": torch.randn(97, 32)}},
        )
    )
    kinds = {path: [type(change) for change in changes] for path, changes in host.changes.items()}
    assert kinds == {UP: [InputGain], EMBEDDING: [TokenRows], NORM: [Twin], HEAD: [ReplacedLinear]}
    assert host.num_bytes == 4 * (32 + 32 + 2 * 32 + 32 + 97 * 32) + 2 * 8
    assert plain.get_submodule(NORM).weight is not None


def test_trained_tokens_of_a_tied_model_are_the_heads_too(tmp_path: Path) -> None:
    tied = LocalEngine(
        save_tiny_model("qwen2", tmp_path / "tied", tie_word_embeddings=True), block_size=4, kv_cache_memory="100KiB"
    )
    rows = torch.randn(1, 32)
    host = tied.parts.fold(saved(tokens={EMBEDDING: SavedTokens((3,), rows)}))
    (change,) = host.changes[HEAD]
    assert isinstance(change, HeadRows)
    x, y = torch.randn(2, 32), torch.zeros(2, 97)
    change.apply(y, (x,), 1.0)
    assert torch.allclose(y[:, 3], (x @ rows.t())[:, 0])
    assert y.count_nonzero() == 2
    assert host.num_bytes == rows.nbytes + 8, "the rows are one tensor"


def test_base_is_left_as_it_was(engine: LocalEngine, plain: Any) -> None:
    before = engine.run([engine.request([5, 6, 7], None, logprobs=1)])[0]
    engine.parts.fold(
        saved(
            linears={Q: SavedLinear(torch.randn(4, 32), torch.randn(4, 32), 1.0, magnitude=torch.rand(32))},
            parameters={NORM: {"weight": torch.rand(32)}},
            tokens={EMBEDDING: SavedTokens((5,), torch.randn(1, 32))},
        )
    )
    after = engine.run([engine.request([5, 6, 7], None, logprobs=1)])[0]
    assert before.token_ids == after.token_ids
    assert before.logprobs == after.logprobs


def test_delta_of_stacked_experts_is_each_experts_own(tmp_path: Path) -> None:
    moe = LocalEngine(save_tiny_model("mixtral", tmp_path / "moe"), block_size=4, kv_cache_memory="100KiB")
    path = "model.layers.0.mlp.experts"
    delta = SavedDelta(torch.randn(4, 2, 64), torch.randn(4, 2, 32), 0.5)
    (twin,) = moe.parts.fold(saved(deltas={path: {"down_proj": delta}})).changes[path]
    assert twin.num_bytes == delta.a.nbytes + delta.b.nbytes, "no expert's weight is copied"
    base = load_fresh(tmp_path / "moe").get_submodule(path)
    x, index = torch.randn(6, 32), torch.tensor([[0, 1], [2, 3], [1, 0], [3, 3], [0, 2], [2, 2]])
    shares = torch.rand(6, 2)
    with torch.no_grad():
        base.down_proj += 0.5 * delta.b.transpose(1, 2) @ delta.a
        base.config._experts_implementation = "eager"
        wanted = base(x, index, shares)
    y = torch.empty(6, 32)
    twin.apply(y, (x, index, shares), 1.0)
    assert torch.allclose(y, wanted, atol=1e-5)


def test_trained_tokens_may_be_listed_in_any_order(engine: LocalEngine, plain: Any) -> None:
    rows = torch.randn(3, 32)
    (change,) = engine.parts.fold(saved(tokens={EMBEDDING: SavedTokens((40, 3, 7), rows)})).changes[EMBEDDING]
    ids = torch.tensor([[7, 96, 40, 3, 0, 7]])
    y = plain.get_submodule(EMBEDDING)(ids).detach().clone()
    kept = y.clone()
    change.apply(y, (ids,), 1.0)
    assert torch.equal(y[0, [0, 2, 3, 5]], rows[[2, 0, 1, 2]])
    assert torch.equal(y[0, [1, 4]], kept[0, [1, 4]])


def test_own_weights_of_a_transposed_layer_lie_as_its_checkpoint_has_them(tmp_path: Path) -> None:
    folder = save_tiny_model("gpt2", tmp_path / "gpt2")
    gpt2 = LocalEngine(folder, block_size=4, kv_cache_memory="100KiB")
    path = "transformer.h.0.mlp.c_fc"
    layer = load_fresh(folder).get_submodule(path)
    own = {"weight": torch.randn_like(layer.weight), "bias": torch.randn_like(layer.bias)}
    (change,) = gpt2.parts.fold(saved(parameters={path: own})).changes[path]
    x, y = torch.randn(3, 32), torch.empty(3, layer.weight.shape[1])
    change.apply(y, (x,), 1.0)
    assert torch.allclose(y, x @ own["weight"] + own["bias"], atol=1e-4)


def test_what_is_no_delta_refuses_to_be_scaled(engine: LocalEngine) -> None:
    host = engine.parts.fold(
        saved(parameters={NORM: {"weight": torch.rand(32)}, HEAD: {"weight": torch.randn(97, 32)}})
    )
    for path, width in ((NORM, 32), (HEAD, 97)):
        with pytest.raises(AssertionError, match="only deltas can be scaled"):
            host.changes[path][0].apply(torch.empty(2, width), (torch.randn(2, 32),), 0.5)
