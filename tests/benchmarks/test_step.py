"""The step benchmark measures what it says: all of the base's products, seams put back, floors in bytes."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import onednn
from benchmarks.alternating import WARM_ROUNDS, median_ratio, time_alternating
from benchmarks.step import ONEDNN, OWN, cases_of, measure
from benchmarks.step_floor import gemms_of, onednn_gemms_of
from benchmarks.step_model import StepModel, blocks_of, decode_batch, prefill_batch
from benchmarks.step_seams import PARTS, PartTimes, parts_of, products_of
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.kv_cache import KVCache

VOCAB, LAYERS, ROWS = 512, 2, 4
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StepModel:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    return StepModel(folder, ROWS, 2**20)


def test_cases_report_a_floor_and_parts_that_add_up(model: StepModel) -> None:
    adapters = model.load([2, 4, 2, 4])
    model.touch(64)
    report = measure(model, cases_of(model, adapters, 20), 3, time.perf_counter)
    names = [f"{ROWS} rows, {users}" for users in ("base", "identical", "distinct")]
    assert set(names) < set(report["cases"])
    for case in report["cases"].values():
        assert 0 < case["gemm_ms"] <= case["floor_ms"]
        assert set(case["gemms_ms"]) == {OWN, ONEDNN}
        assert case["gemm_ms"] == min(case["gemms_ms"].values())  # the floor is the faster one's
    distinct = report["cases"][f"{ROWS} rows, distinct"]
    assert set(distinct["parts_ms"]) == {*PARTS, "total"}
    assert all(distinct["parts_ms"][part] > 0 for part in PARTS)
    assert report["cases"][f"{ROWS} rows, base"]["parts_ms"]["LoRA"] == 0
    assert set(report["ratios"]) == {f"{name} / base" for name in report["cases"] if not name.endswith("base")}
    assert report["operators"][0]["self_ms"] >= report["operators"][-1]["self_ms"]


def test_floor_counts_each_adapter_once_and_every_rows_keys(model: StepModel) -> None:
    one, other = model.load([2, 8])
    assert other.num_bytes == 4 * one.num_bytes  # rank 8 against 2
    assert model.kv_token_bytes == 2 * LAYERS * 2 * 8 * 4  # K and V, 2 heads of 8 in float32
    keys = int(3 * 20 * model.kv_token_bytes)
    assert model.decode_floor_bytes(3, 20, [one, one, other]) == one.num_bytes + other.num_bytes + keys
    assert model.decode_floor_bytes(3, 20, []) == keys


def test_products_of_a_step_are_all_of_the_bases_weights_on_the_steps_rows(model: StepModel) -> None:
    batch = prefill_batch([None], 7)
    products = products_of(lambda: model.parts.runner.run(batch))
    weights = sum(shape.in_features * shape.out_features for shape in model.spec.linears.values())
    assert sum(p.num_weights for p in products) == weights
    assert {p.shape[-2] for p in products if p.layer.out_features != VOCAB} == {7}
    assert {p.shape[-2] for p in products if p.layer.out_features == VOCAB} == {1}  # logits of the last token alone


def test_products_that_bypass_the_seam_are_counted_by_the_layers_paths(
    model: StepModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    original = FrozenLinear.product
    monkeypatch.setattr("benchmarks.step_floor.products_of", lambda run: [])
    monkeypatch.setattr(FrozenLinear, "product", lambda self, x: called.append(x.shape[0]) or original(self, x))
    gemms_of(model, decode_batch([None] * 3, 5))()
    assert len(called) == len(model.spec.linears)
    assert set(called) == {3}


def test_onednn_multiplies_the_same_weights(model: StepModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    original = onednn.prepack
    monkeypatch.setattr(onednn, "prepack", lambda weight: seen.append(weight) or original(weight))
    batch = decode_batch([None] * 3, 5)
    run = onednn_gemms_of(model, batch)
    assert run is not None
    run()
    own = [product.layer.dense() for product in products_of(lambda: model.parts.runner.run(batch))]
    assert len(seen) == len(own)
    assert all(torch.equal(a, b) for a, b in zip(seen, own, strict=True))
    monkeypatch.setattr(onednn, "can_prepack", lambda weight: False)
    assert onednn_gemms_of(model, batch) is None


def test_seams_are_put_back_even_when_a_step_raises(model: StepModel) -> None:
    before = (FrozenLinear.forward, FrozenLinear.product, KVCache.write)

    def fail() -> None:
        raise RuntimeError("no step")

    with pytest.raises(RuntimeError):
        parts_of(fail, VOCAB)
    assert (FrozenLinear.forward, FrozenLinear.product, KVCache.write) == before


def test_time_inside_an_inner_part_is_not_the_outer_parts_too() -> None:
    clock = PartTimes()
    inner = clock.timed(lambda: sum(range(200_000)), lambda _: "inner")
    outer = clock.timed(inner, lambda _: "outer")
    outer()
    assert clock.seconds["outer"] < 0.5 * clock.seconds["inner"]


def test_rows_of_a_batch_have_blocks_of_their_own() -> None:
    batch = decode_batch([None] * 5, 33)
    blocks = [block for row in batch.rows for block in row.block_table]
    assert len(blocks) == len(set(blocks)) == 5 * blocks_of(33) == 15
    assert 0 not in blocks
    assert all(row.start + 1 == 33 for row in batch.rows)


def test_touching_more_blocks_than_there_are_is_an_error_not_a_wrong_figure(model: StepModel) -> None:
    with pytest.raises(AssertionError, match="KV blocks are needed"):
        model.touch(10**6)


def test_cases_alternate_and_warm_rounds_do_not_count() -> None:
    order: list[str] = []
    times = time_alternating({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * (3 + WARM_ROUNDS)
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    assert median_ratio([2.0, 4.0, 90.0], [1.0, 2.0, 3.0]) == 2.0
