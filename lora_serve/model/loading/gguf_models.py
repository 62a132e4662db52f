"""A GGUF file as transformers has its model: config, and tensors by their names there.

A file says its model by facts under the name of its architecture. One that is not known here is refused, as it may
change what the weights mean; so is a tensor. A family is an entry of `_FAMILIES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lora_serve.core.errors import ModelError, on_one_line
from lora_serve.core.gguf_file import GgufFile, GgufTensor
from lora_serve.model.loading.packed_format import ANY, WHOLE, Fields, Kind, check_fields

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYERS = Kind("a whole number from 1 to 4096", lambda found: type(found) is int and 1 <= found <= 4096)
_FLOAT = Kind("a number above 0", lambda found: type(found) in (int, float) and 0 < found < float("inf"))
_SIZES = {  # facts of every family, and the fields of config.json that they are
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_FIELDS: Fields = {
    **dict.fromkeys(_SIZES, (WHOLE,)),
    "block_count": (_LAYERS,),
    "attention.head_count_kv": (None, WHOLE),
    "attention.layer_norm_rms_epsilon": (_FLOAT,),
    **dict.fromkeys(("attention.key_length", "attention.value_length"), (None, WHOLE)),
    **dict.fromkeys(("rope.dimension_count", "vocab_size"), (None, WHOLE)),
    "rope.freq_base": (None, _FLOAT),
    "rope.scaling.type": (None, "none", "linear", "yarn"),
    "rope.scaling.factor": (None, _FLOAT),
    "rope.scaling.original_context_length": (None, WHOLE),
    "rope.scaling.finetuned": ANY,
    "attention.causal": (None, True),
}  # fmt: skip
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FACTORS = "rope_freqs.weight"  # by which Llama 3.1 and later divide the frequencies of positions
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class _Family:
    """What an architecture has beside or in place of that of all."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)  # further ones that may be there, and their fields
    pairs: bool = False  # a head's rows of q and k lie in pairs, not in halves
    adds_one: bool = False  # norms are stored with 1 added
    more: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda config, facts: {}  # further fields


_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_FACTS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _gemma(largest: int) -> Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]:
    """`largest`: the layers of the one model whose scores are scaled by another size than a head's."""

    def more(config: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        whole = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": whole if config["num_hidden_layers"] == largest else config["head_dim"]}

    return more


def _gemma3(config: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": 10000.0}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return {**_gemma(62)(config, facts), "rope_parameters": ropes}


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("llama", pairs=True),
    "mixtral": _Family(  # a llama with experts
        "mixtral",
        {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.#.w1",
            "ffn_down_exps": "block_sparse_moe.experts.#.w2",
            "ffn_up_exps": "block_sparse_moe.experts.#.w3",
        },
        {**_EXPERTS, "expert_count": "num_local_experts"},
        pairs=True,
    ),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3", _HEAD_NORMS),
    "qwen3moe": _Family(
        "qwen3_moe",
        {
            **_HEAD_NORMS,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.#.gate_proj",
            "ffn_down_exps": "mlp.experts.#.down_proj",
            "ffn_up_exps": "mlp.experts.#.up_proj",
        },
        {**_EXPERTS, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        more=lambda config, facts: {"norm_topk_prob": True},
    ),
    "gemma2": _Family("gemma2", _GEMMA_NAMES, _GEMMA_FACTS, adds_one=True, more=_gemma(46)),
    "gemma3": _Family(
        "gemma3_text", {**_GEMMA_NAMES, **_HEAD_NORMS}, _GEMMA_FACTS, adds_one=True, more=_gemma3
    ),
    "phi3": _Family("phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}  # fmt: skip


def _family(file: GgufFile) -> _Family:
    """Raises ValueError."""
    name = file.architecture
    if name == "llama" and f"{name}.expert_count" in file.facts:
        name = "mixtral"
    elif name == "mixtral" or name not in _FAMILIES:
        raise ValueError(f"its architecture is {name!r}; of GGUF served are {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def config_of(file: GgufFile) -> Any:
    """The config of transformers that the header speaks of. Raises ModelError."""
    try:
        return _config_of(file)
    except Exception as error:  # transformers raises many kinds for a field of another type
        raise ModelError(f"--model {file.path}: {on_one_line(error)}") from error


def _config_of(file: GgufFile) -> Any:
    family, arch = _family(file), file.architecture
    facts = {key.removeprefix(f"{arch}."): value for key, value in file.facts.items() if key.startswith(f"{arch}.")}
    check_fields(arch, facts, {**_FIELDS, **dict.fromkeys(family.facts, (None, WHOLE, _FLOAT))}, f"GGUF's {arch}")
    names = {**_SIZES, **family.facts}
    config = {names[key]: value for key, value in facts.items() if key in names}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["head_dim"] = facts.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.get(key, config["head_dim"]) != config["head_dim"]:
            raise ValueError(f"{arch}.{key} is {facts[key]}, and a head has {config['head_dim']} numbers")
    embeddings = _tensor(file, "token_embd.weight")
    _check_shape(file, "token_embd.weight", (facts.get("vocab_size", embeddings.shape[0]), config["hidden_size"]))
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    is_fused = "attn_qkv" in family.names
    _check_shape(file, "blk.0.attn_qkv.weight" if is_fused else "blk.0.attn_q.weight",
                 (queries + 2 * keys if is_fused else queries, config["hidden_size"]))  # fmt: skip
    types = {one.type for one in file.tensors.values()}
    config |= {
        "vocab_size": embeddings.shape[0],
        "rope_parameters": _rope(file, facts, config["head_dim"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": "float32" if types == {"F32"} else "float16" if types <= {"F32", "F16"} else "bfloat16",
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]],
        "quantization_config": {"quant_method": "gguf"},
        **_token_ids(file, embeddings.shape[0]),
    }
    return AutoConfig.for_model(family.model_type, **{**config, **family.more(config, facts)})


def _token_ids(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    """The ids of tokens with a meaning; those that end an answer may be two."""
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding"}
    ids = {name: file.facts.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    for name, found in ids.items():
        if found is not None and (type(found) is not int or not 0 <= found < vocab_size):
            raise ValueError(f"its {name} token is {found!r}, and there are {vocab_size}")
    ends = list(dict.fromkeys(one for one in (ids["eos"], ids["eot"]) if one is not None))
    eos = ends if len(ends) > 1 else ends[0] if ends else None
    return {"bos_token_id": ids["bos"], "eos_token_id": eos, "pad_token_id": ids["pad"]}


def _rope(file: GgufFile, facts: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Raises ValueError."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base", 10000.0)}
    kind = facts.get("rope.scaling.type", "linear" if "rope.scaling.factor" in facts else "none")
    if kind != "none":
        if "rope.scaling.factor" not in facts:
            raise ValueError(f"its positions are scaled as {kind!r}, and no rope.scaling.factor is there")
        found |= {"rope_type": kind, "factor": facts["rope.scaling.factor"]}
    if kind == "yarn":
        if "rope.scaling.original_context_length" not in facts:
            raise ValueError("its positions are scaled as 'yarn', and no rope.scaling.original_context_length is there")
        found["original_max_position_embeddings"] = facts["rope.scaling.original_context_length"]
    if _FACTORS in file.tensors:
        _check_shape(file, _FACTORS, (head_dim // 2,))
        factors = _Slice(file, file.tensors[_FACTORS])[...].double()
        wanted = _llama3_factors(found["rope_theta"], head_dim, factor := float(factors.max()))
        if kind != "none" or not torch.allclose(factors, wanted, rtol=1e-3):
            raise ValueError(f"{_FACTORS} are not those of Llama 3.1 and later")
        found |= {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return found


def _llama3_factors(base: float, head_dim: int, factor: float) -> Tensor:
    """The numbers by which each frequency is divided: 1 for short waves, `factor` for long ones."""
    waves = 2 * torch.pi * base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / waves
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - share) / factor + share)


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise ValueError(f"it lacks {name}")
    return file.tensors[name]


def _check_shape(file: GgufFile, name: str, wanted: tuple[int, ...]) -> None:
    if (found := _tensor(file, name).shape) != wanted:
        raise ValueError(f"{name} is {list(found)}, and by its other facts {list(wanted)}")


class _Slice:
    """A tensor of the file, read when it is asked for: floats as they are, else the bytes of its blocks, by rows."""

    def __init__(
        self, file: GgufFile, tensor: GgufTensor, heads: int | None = None, less: int = 0, expert: int | None = None
    ) -> None:
        """`heads`: whose rows lie in pairs. `less`: is taken off. `expert`: which of a stack."""
        self._file, self._tensor, self._heads, self._less, self._expert = file, tensor, heads, less, expert

    def get_dtype(self) -> str:
        return self._tensor.type

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape if self._expert is None else self._tensor.shape[1:])

    def __getitem__(self, where: Any) -> Tensor:
        count, shape = self._tensor.num_bytes, self.get_shape()
        if self._expert is not None:
            count //= self._tensor.shape[0]
        found = np.fromfile(self._file.path, np.uint8, count, offset=self._tensor.start + (self._expert or 0) * count)
        if len(found) != count:
            raise ValueError(f"{self._file.path} has become shorter")
        data = torch.from_numpy(found)
        data = data.view(_FLOATS[self._tensor.type]) if self._tensor.type in _FLOATS else data
        data = data.view(shape if self._tensor.type in _FLOATS else (shape[0], -1))
        if self._heads is not None:
            data = data.view(self._heads, -1, 2, *data.shape[1:]).transpose(1, 2).flatten(0, 2)
        return (data - self._less if self._less else data)[where]


def parts_of(file: GgufFile, config: Any) -> dict[str, dict[str, Any]]:
    """The tensors by module and last name in transformers, like the slices of safetensors. Raises ValueError."""
    family, parts = _family(file), dict[str, dict[str, Any]]()
    for name, tensor in file.tensors.items():
        if name == _FACTORS:
            continue
        for path, last, piece in _pieces(name, file, tensor, family, config):
            parts.setdefault(path, {})[last] = piece
    return parts


def _pieces(
    name: str, file: GgufFile, tensor: GgufTensor, family: _Family, config: Any
) -> Iterator[tuple[str, str, _Slice]]:
    """The module's path, last name and slice of a tensor, or of each expert in it. Raises ValueError."""
    found = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)", name)
    names = _OUTSIDE if found is None or found[1] is None else {**_NAMES, **family.names}
    if found is None or found[2] not in names or (found[1] and int(found[1]) >= config.num_hidden_layers):
        raise ValueError(f"{name} has no place in the model {family.model_type}")
    path = names[found[2]] if found[1] is None else f"model.layers.{int(found[1])}.{names[found[2]]}"
    if "#" in path:
        if len(tensor.shape) != 3:
            raise ValueError(f"{name} is {list(tensor.shape)}, no stack of experts")
        for expert in range(tensor.shape[0]):
            yield path.replace("#", str(expert)), found[3], _Slice(file, tensor, expert=expert)
        return
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(found[2])
    if not family.pairs:
        heads = None
    elif heads is not None and tensor.shape[0] % (2 * heads):
        raise ValueError(f"{name} is {list(tensor.shape)}, no pairs of rows of {heads} heads")
    yield path, found[3], _Slice(file, tensor, heads, int(family.adds_one and found[2].endswith("norm")))
