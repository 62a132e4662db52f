"""An adapter's PEFT config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lora_serve.adapters.checkpoint.peft_config import OTHER_METHODS, POOLING_TASKS, PeftConfig, parse_config
from lora_serve.adapters.checkpoint.peft_fields import KINDS
from lora_serve.core.errors import InvalidAdapterError
from tests.fuzz.mutating import within, written
from tests.hostile.adapter_files import CONFIG_TEXTS, CONFIGS

ERRORS = (InvalidAdapterError,)
SOUND = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
    "bias": "none", "use_rslora": True, "rank_pattern": {"layers.0.q_proj": 2}, "alpha_pattern": {"v_proj": 3.5},
    "layers_to_transform": [0, 1], "layers_pattern": "layers", "modules_to_save": ["lm_head"], "use_dora": False,
    "trainable_token_indices": {"embed_tokens": [1, 2]}, "alora_invocation_tokens": [3], "init_lora_weights": True,
    "target_parameters": ["mlp.experts.gate_up_proj"], "exclude_modules": ".*lm_head", "lora_bias": False,
}  # fmt: skip


def fuzz(data: bytes) -> None:
    config = parse_config(data, 64, POOLING_TASKS)
    assert isinstance(config, PeftConfig)
    assert config == parse_config(data, 64, POOLING_TASKS)
    assert config.ranks.largest <= 64


def seeds() -> Iterator[bytes]:
    yield written(SOUND)
    yield b"\xef\xbb\xbf" + written(SOUND)
    yield from (written(_saved(made)) for made in _of_peft())
    yield from (seed for change in CONFIGS.values() if len(seed := written(SOUND | change)) < 8192)
    yield from (text for text in CONFIG_TEXTS.values() if len(text) < 8192)


def _of_peft() -> Iterator[Any]:
    """Configs as PEFT writes them."""
    from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, VeraConfig

    yield LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    yield LoraConfig(r=4, target_modules=r".*\.q_proj", use_dora=True, rank_pattern={"a": 2})
    yield IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    yield LoHaConfig(r=4, target_modules=["q_proj"])
    yield LoKrConfig(r=4, target_modules=["q_proj"], decompose_both=True)
    yield AdaLoraConfig(target_r=4, init_r=8, total_step=100, target_modules=["q_proj"])
    yield VeraConfig(r=4, target_modules=["q_proj"])


def _saved(config: Any) -> dict[str, Any]:
    table = config.to_dict()
    return json.loads(json.dumps(table, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


_WORDS = {*SOUND, *KINDS, *(word for method in OTHER_METHODS.values() for word in method.UNDERSTOOD), *OTHER_METHODS}
_WORDS |= {"LORA", "olora", "pissa", "gaussian", "eva", "orthogonal", "all",
           "lora_only", "SEQ_CLS", "FEATURE_EXTRACTION", "all-linear"}  # fmt: skip
mutate = within(json.loads, written, tuple(sorted(_WORDS)))
