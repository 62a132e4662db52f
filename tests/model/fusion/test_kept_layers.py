"""Layers that stay packed are fused as plain ones are, and a row has the same bits alone, beside others and with
adapters that join the product.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.loading.kept_linear import KeptPanels
from tests.model.fusion.test_fuse import FUSED, fused_kinds
from tests.model.fusion.test_row_alone import SHAPE, assert_rows_are_alone, engine_of, save_adapters
from tests.oracle import save_tiny_model
from tests.tiers import mostly_nightly
from tests.weight_packer import KINDS, save_packed

FEW = ("w4a16_asymmetric", "w8a16", "gptq_desc_act", "fp8_static", "int8_asymmetric")
Folders = tuple[Path, dict[str, Path]]


@pytest.fixture(scope="module", params=mostly_nightly(FEW, "w4a16_asymmetric", "gptq_desc_act"))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp(request.param)
    plain = save_tiny_model("llama", root / "source", **SHAPE)
    return save_packed(KINDS[request.param], plain, root)[0], save_adapters(plain, root)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_layers_read_the_codes_and_a_row_is_alone(folders: Folders, dtype: str) -> None:
    engine = engine_of(folders, 64, dtype)
    assert fused_kinds(engine) == FUSED["llama"]
    layers = [part for part in engine.parts.runner._model.module.modules() if isinstance(part, FrozenLinear)]
    assert sum(isinstance(layer.weight, KeptPanels) for layer in layers) == len(layers) - 1  # but for the head
    assert_rows_are_alone(folders, dtype, (64,))
