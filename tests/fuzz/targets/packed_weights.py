"""A checkpoint with packed weights: `quantization_config`, a line, and its file of weights. No model is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save
from transformers import PretrainedConfig

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import Settings
from lora_serve.model.loading.packed_checkpoints import plan_packed
from tests.fuzz.files import empty_folder
from tests.fuzz.mutating import within
from tests.hostile.adapter_files import built
from tests.weight_packer import KINDS

ERRORS = (ConfigError, ModelError)
_TYPES = ("F32", "F16", "BF16", "U8", "I8", "I32", "I64", "BOOL", "F8_E4M3", "F8_E8M0")


def fuzz(data: bytes) -> None:
    text, _, content = data.partition(b"\n")
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:  # config.json is transformers' own to read
        raise ModelError("it is no JSON") from error
    with empty_folder() as folder:
        (folder / "model.safetensors").write_bytes(content)
        part = Settings(model=str(folder), device="cpu").part(ModelConfig)
        found = PretrainedConfig()
        found.quantization_config = stored
        plan = plan_packed(part, found, torch.device("cpu"))
        if plan is None:
            raise ModelError("it is of another format")
        plan.check()
        for layer in plan.check.__self__.layers:  # type: ignore[attr-defined] # the checkpoint's own
            assert layer.dequantized(torch.float32).shape == layer.size


def seeds() -> Iterator[bytes]:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    for kind in KINDS.values():
        parts = {f"layers.0.{last}": part.contiguous() for last, part in kind.pack(weight)[0].items()}
        yield json.dumps(kind.config).encode() + b"\n" + save({**parts, "norm.weight": torch.ones(4)})


def _load(data: bytes) -> Any:
    text, _, content = data.partition(b"\n")
    size = int.from_bytes(content[:8], "little")
    return [json.loads(text), json.loads(content[8 : 8 + size]), {"content": content[8 + size :]}]


def _dump(tree: Any) -> bytes:
    config, header, content = tree
    return json.dumps(config).encode() + b"\n" + built(header, content["content"])


mutate = within(_load, _dump, ("quant_method", "dtype", "shape", "data_offsets", *_TYPES))
