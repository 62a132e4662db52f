"""The floors of newer kinds of bases count the experts that were chosen, and their shapes are what they say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks.newer_shapes import ADAPTED, BASE, ROWS, SHAPES, experts_of, measure
from benchmarks.performance_tables import newer
from benchmarks.step_model import StepModel, decode_batch
from lora_serve import random_weights
from lora_serve.model.experts import expert_modules
from lora_serve.random_weights.checkpoints import network_of
from tests.oracle import load_plain, save_tiny_model

INNER, HIDDEN, LAYERS = 32, 64, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 16, "max_position_embeddings": 512}
    found = save_tiny_model("qwen3_moe", tmp_path_factory.mktemp("newer") / "model", **shape)
    load_plain(found, torch.bfloat16).save_pretrained(found)
    return found


def test_floor_holds_the_experts_that_the_rows_chose(folder: Path) -> None:
    model = StepModel(folder, 1, 2**22, "float32")
    counts, num_bytes = experts_of(model, decode_batch([None] * ROWS, 9))
    assert len(counts) == LAYERS
    assert all(2 <= count <= 16 for count in counts)
    assert num_bytes == sum(counts) * 3 * INNER * HIDDEN * 2  # gate, up and down in two bytes each
    alone, _ = experts_of(model, decode_batch([None], 9))
    assert alone == [2] * LAYERS


def test_report_has_both_cases_and_makes_a_table(folder: Path) -> None:
    found = measure(folder, "bfloat16", 2, time.perf_counter)
    for case in (BASE, ADAPTED):
        figures = found["cases"][case]
        assert 0 < figures["products_ms"] < figures["floor_ms"]
        assert figures["expert_bytes"] > 0
    assert found["cases"][ADAPTED]["other_bytes"] > found["cases"][BASE]["other_bytes"]
    text = newer({"shapes": {"tiny, bfloat16": found}})
    assert text.count("tiny, bfloat16") == 2


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_exceed_every_cache_and_are_no_larger_than_they_need_to_be(name: str) -> None:
    _, network = network_of(random_weights.SHAPES[name])
    assert 1e8 < sum(parameter.numel() for parameter in network.parameters()) < 3e8
    assert bool(list(expert_modules(network))) == (name != "gemma4")
