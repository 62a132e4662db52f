"""Tiny models and adapters, and what plain transformers and PEFT make of them: the truth nobody here wrote."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.variants import calculate_alora_offsets
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 6}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOW}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": _WINDOW,
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": _GEMMA,
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "olmo2": {},
    "starcoder2": _WINDOW,
    "stablelm": {},
    "mixtral": {"num_local_experts": 4, **_WINDOW},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "cohere": {},
    "smollm3": {"use_sliding_window": True, **_WINDOW},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, **_WINDOW},
    "deepseek_v3": {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
        "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    },
    "gemma4_text": {
        "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 97, **_WINDOW,
    },
    "llama4_text": {  # chunks and rotary positions in the first layer, in the second neither, and scales by position
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "no_rope_layers": [1, 0],
        "intermediate_size_mlp": 64, "moe_layers": [0], "attention_chunk_size": 6, "floor_scale": 8,
    },
}  # fmt: skip

# By mechanism: the common one, windows and soft caps, experts, a position table, Conv1D with a fused QKV.
REPRESENTATIVE = ("llama", "gemma2", "mixtral", "opt", "gpt2")


def save_tiny_model(architecture: str, folder: Path, **overrides: Any) -> Path:
    """A random float32 model of an architecture, with weights large enough for distinct answers and no bias of zero."""
    config = AutoConfig.for_model(architecture, **{**_SHAPE, **ARCHITECTURES[architecture], **overrides})
    torch.manual_seed(sum(map(ord, architecture)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases: a transformer starts with ones and zeros, which hide mistakes
            parameter.data += torch.randn(parameter.shape) * 0.1
    model.save_pretrained(folder)
    return folder


def load_plain(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers alone serves it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval().requires_grad_(False)


@lru_cache(maxsize=2)
def _loaded(folder: Path) -> PreTrainedModel:
    return load_plain(folder)


def load_fresh(folder: Path) -> PreTrainedModel:
    """`load_plain` for the many who want their own copy of one model: a quarter of the time."""
    return copy.deepcopy(_loaded(folder))


def linear_names(model: PreTrainedModel) -> list[str]:
    """Last names of the linear layers, the output head left out: what "all-linear" means, but for layers that return
    more than a product, which PEFT cannot run.
    """
    head, plain = model.get_output_embeddings(), (torch.nn.Linear.forward, Conv1D.forward)
    linears = {n: m for n, m in model.named_modules() if type(m).forward in plain and m is not head}
    return sorted({name.rpartition(".")[2] for name in linears})


def save_adapter(model_folder: Path, folder: Path, seed: int = 0, std: float = 0.15, **config: Any) -> Path:
    """A PEFT checkpoint with random weights in A and B; `config` as for peft.LoraConfig."""
    with peft_may_warn():
        return _save_adapter(load_plain(model_folder), folder, seed, std, config)


@contextmanager
def peft_may_warn() -> Iterator[None]:
    """PEFT warns of the hub card it does not find and of a name that transformers will drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _save_adapter(base: PreTrainedModel, folder: Path, seed: int, std: float, config: dict[str, Any]) -> Path:
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": linear_names(base), "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(**{**settings, **config}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * std
    model.save_pretrained(folder)
    return folder


def round_adapter(folder: Path) -> Path:
    """Rewrites a checkpoint of `save_adapter` in bfloat16."""
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    return folder


def load_alone(model_folder: Path, folder: Path) -> Any:
    """One adapter on a fresh base: some kinds (trained biases, experts) cannot live beside others in one PEFT model."""
    with peft_may_warn():
        return peft.PeftModel.from_pretrained(load_fresh(model_folder), folder).eval()


@torch.inference_mode()
def logprobs_alone(model: Any, prompt: Sequence[int], generated: Sequence[int] = ()) -> torch.Tensor:
    """log p(. | tokens[:i + 1]) for every i of prompt + generated, of a plain or of a PEFT model: [tokens, vocab].

    One forward without a cache, and yet what PEFT's `generate` does: an activated LoRA acts from the last invocation
    *in the prompt* on (Greenewald et al. 2025, "Activated LoRA"), wherever generated tokens repeat it.
    """
    ids = torch.tensor([[*prompt, *generated]])
    activation = _activation(model, prompt, len(generated)) if isinstance(model, peft.PeftModel) else {}
    logits = model(input_ids=ids, use_cache=False, **activation).logits
    return logits[0].float().log_softmax(-1)


def _activation(model: Any, prompt: Sequence[int], num_generated: int) -> dict[str, Any]:
    if getattr(model.active_peft_config, "alora_invocation_tokens", None) is None:
        return {}
    ids = torch.tensor([list(prompt)])
    (offset,) = calculate_alora_offsets(model.peft_config, model.active_adapter, ids)  # from the prompt's end
    return {"alora_offsets": [None if offset is None else offset + num_generated]}


def load_peft(model_folder: Path, adapters: Mapping[str, Path]) -> Any:
    """PEFT with every adapter loaded; `set_adapter(name)` chooses one, `disable_adapter()` is the base."""
    model: Any = load_plain(model_folder)
    with peft_may_warn():
        for name, folder in adapters.items():
            if isinstance(model, peft.PeftModel):
                model.load_adapter(folder, adapter_name=name)
            else:
                model = peft.PeftModel.from_pretrained(model, folder, adapter_name=name)
    return model.eval()


@torch.inference_mode()
def logprobs_with_peft(model: Any, adapter: str | None, tokens: Sequence[int]) -> torch.Tensor:
    """log p(. | tokens[:i + 1]) for every i by one adapter alone: [len(tokens), vocab]."""
    ids = torch.tensor([list(tokens)])
    if adapter is None:
        with model.disable_adapter():
            logits = model(input_ids=ids, use_cache=False).logits
    else:
        model.set_adapter(adapter)
        logits = model(input_ids=ids, use_cache=False).logits
    return logits[0].float().log_softmax(-1)
