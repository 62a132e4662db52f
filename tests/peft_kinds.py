"""Every kind of adapter that PEFT can train and save, made for any of the tiny models, with random trained weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

from tests.old_experts import FUSED, PARTS, cut_parts_apart, rewrite_as_old
from tests.oracle import load_fresh, peft_may_warn
from tests.peft_layers import Layers, narrowed, read_layers

INVOCATION = (11, 12)  # the tokens that switch an activated LoRA on
TRAINED_TOKENS = (3, 17, 60)
_FRESH = ("lora_", "hada_", "lokr_", "vera_lambda_")  # parameters that start from nothing; others from the base's


@dataclass(frozen=True)
class Kind:
    """How to make one kind of checkpoint, and for which models it can be made."""

    about: str  # for the table in docs/reference/adapters.md
    config: Callable[[Layers], peft.PeftConfig]
    why_not: Callable[[Layers], str | None] = lambda layers: None  # None: it applies
    tied: bool | None = None  # must the model's input and output embeddings be one tensor? None: as the model is
    dtype: torch.dtype = torch.float32  # of the checkpoint
    std: float = 0.15  # of the random weights
    converted: bool = False  # saved as a LoRA of twice the rank, relative to its own initial weights
    relative: bool = False  # trained from its own initial weights, and saved without a conversion
    one_by_one: bool = False  # trained on all experts' weights, saved expert by expert as before transformers 5


def lora(**settings: Any) -> Callable[[Layers], peft.LoraConfig]:
    """Settings of peft.LoraConfig; a value that is a function is asked with the layers of the model."""

    def config(layers: Layers) -> peft.LoraConfig:
        found = {name: value(layers) if callable(value) else value for name, value in settings.items()}
        plain = {"r": 4, "lora_alpha": 8, "target_modules": list(layers.linears), "task_type": "CAUSAL_LM"}
        return peft.LoraConfig(**{**plain, **found})

    return config


def _other(name: str, **settings: Any) -> Callable[[Layers], peft.PeftConfig]:
    """A config class of PEFT by name, on every linear layer."""
    plain = {"task_type": "CAUSAL_LM", **settings}
    return lambda layers: getattr(peft, name)(target_modules=list(layers.linears), **plain)


def _ia3(layers: Layers) -> peft.PeftConfig:
    feedforward = [name for name in layers.linears if name in {"down_proj", "c_fc", "fc2", "dense_4h_to_h"}]
    targets = list(layers.linears)
    return peft.IA3Config(target_modules=targets, feedforward_modules=feedforward, task_type="CAUSAL_LM")


def _needs_bias(layers: Layers) -> str | None:
    return None if layers.biased_linears else "no linear layer of it has a bias"


def _needs_any_bias(layers: Layers) -> str | None:
    return None if layers.has_bias else "no biases in this architecture"


def _needs_experts(layers: Layers) -> str | None:
    return None if layers.experts else "no experts in this architecture"


def _needs_linear(layers: Layers) -> str | None:
    return "PEFT itself fails: this method knows no Conv1D layer" if layers.is_conv1d else None


def _needs_known_name(layers: Layers) -> str | None:
    if layers.embedding == "embed_tokens":
        return None
    return f"PEFT itself fails: when it loads, it ties only an embedding named embed_tokens, not {layers.embedding}"


def _attention(layers: Layers) -> list[str]:
    return [layers.attention]


def _one_layer(layers: Layers) -> list[str]:
    return [layers.attention_path]


def _biased(layers: Layers) -> list[str]:
    return list(layers.biased_linears)


def _norms(layers: Layers) -> list[str]:
    return list(layers.norms)


def _stack(layers: Layers) -> str:
    return layers.stack


def _experts(layers: Layers) -> list[str]:
    return list(layers.experts)


def _routers(layers: Layers) -> list[str]:
    return list(layers.routers)


def _experts_and_routers(layers: Layers) -> list[str]:
    return [*layers.experts, *layers.routers]


def _alphas(layers: Layers) -> dict[str, int]:
    return {layers.linears[0]: 3}


def _ranks(layers: Layers) -> dict[str, int]:
    return {layers.linears[0]: 2, rf"{layers.stack}\.1\..*{layers.linears[-1]}": 7}


def _three_axes(layers: Layers) -> list[str]:
    """PEFT's activated LoRA wants [batch, token, feature], and opt flattens the first two before fc1 and fc2."""
    return [name for name in layers.linears if name not in {"fc1", "fc2"}]


def _regex(layers: Layers) -> str:
    return rf".*\.{layers.stack}\.[0-9]+\..*\.({layers.linears[0]}|{layers.linears[-1]})"


def _embedding(layers: Layers) -> list[str]:
    return [layers.embedding]


def _head(layers: Layers) -> list[str]:
    return [layers.head]


def _embedding_and_head(layers: Layers) -> list[str]:
    return [layers.embedding, layers.head]


def _excluded(layers: Layers) -> list[str]:
    return list(layers.linears[:2])


_SAVE = {"target_modules": _attention}
KINDS: Mapping[str, Kind] = {
    "plain": Kind("LoRA on every linear layer", lora()),
    "rslora": Kind("`use_rslora`: scaled by alpha / sqrt(r)", lora(use_rslora=True)),
    "rank_and_alpha_pattern": Kind(
        "`rank_pattern` and `alpha_pattern`", lora(rank_pattern=_ranks, alpha_pattern=_alphas)
    ),
    "regex_targets": Kind("`target_modules` as a regular expression", lora(target_modules=_regex)),
    "all_linear": Kind('`target_modules="all-linear"`', lora(target_modules="all-linear")),
    "exclude_modules": Kind("`exclude_modules`", lora(exclude_modules=_excluded)),
    "layers_to_transform": Kind("`layers_to_transform`", lora(layers_to_transform=[1])),
    "layers_pattern": Kind(
        "`layers_to_transform` with `layers_pattern`", lora(layers_to_transform=[0], layers_pattern=_stack)
    ),
    "rank_1": Kind("rank 1", lora(r=1)),
    "rank_512": Kind("rank 512, above the layer's size", lora(r=512, lora_alpha=64, target_modules=_one_layer)),
    "bfloat16": Kind("checkpoint in bfloat16", lora(), dtype=torch.bfloat16),
    "float16": Kind("checkpoint in float16", lora(), dtype=torch.float16),
    "lora_bias": Kind("`lora_bias`: B with a bias", lora(target_modules=_biased, lora_bias=True), _needs_bias),
    "bias_lora_only": Kind(
        '`bias="lora_only"`: trained biases of the targeted layers', lora(bias="lora_only"), _needs_bias
    ),
    "bias_all": Kind('`bias="all"`: every bias trained, norms included', lora(bias="all"), _needs_any_bias),
    "embedding": Kind("LoRA on the input embedding", lora(target_modules=_embedding)),
    "lm_head": Kind("LoRA on the output head", lora(target_modules=_head)),
    "embedding_and_head_tied": Kind(
        "LoRA on both, `ensure_weight_tying`, tied embeddings",
        lora(target_modules=_embedding_and_head, ensure_weight_tying=True),
        _needs_known_name,
        tied=True,
    ),
    "dora": Kind("DoRA on every linear layer", lora(use_dora=True)),
    "dora_embedding": Kind("DoRA on the input embedding", lora(use_dora=True, target_modules=_embedding)),
    "dora_with_bias": Kind("DoRA with trained biases", lora(use_dora=True, bias="lora_only"), _needs_bias),
    "save_embedding": Kind("`modules_to_save`: the input embedding", lora(modules_to_save=_embedding, **_SAVE)),
    "save_lm_head": Kind("`modules_to_save`: the output head", lora(modules_to_save=_head, **_SAVE)),
    "save_embedding_tied": Kind(
        "`modules_to_save`: the embedding, `ensure_weight_tying`, tied",
        lora(modules_to_save=_embedding, ensure_weight_tying=True, **_SAVE),
        tied=True,
    ),
    "save_norms": Kind("`modules_to_save`: every norm", lora(modules_to_save=_norms, **_SAVE)),
    "trainable_tokens": Kind(
        "`trainable_token_indices`", lora(trainable_token_indices=list(TRAINED_TOKENS), **_SAVE), tied=False
    ),
    "trainable_tokens_tied": Kind(
        "`trainable_token_indices`, tied embeddings",
        lora(trainable_token_indices=list(TRAINED_TOKENS), **_SAVE),
        tied=True,
    ),
    "experts": Kind(
        "`target_parameters`: the experts' weights", lora(target_modules=[], target_parameters=_experts), _needs_experts
    ),
    "router": Kind(
        "`target_parameters`: the router's weight", lora(target_modules=[], target_parameters=_routers), _needs_experts
    ),
    "experts_and_attention": Kind(
        "the experts' weights and the attention", lora(target_parameters=_experts), _needs_experts
    ),
    "experts_one_by_one": Kind(
        "every expert's layers and the attention, saved before transformers 5",
        lora(target_modules=_attention, target_parameters=_experts, **FUSED),
        _needs_experts,
        one_by_one=True,
    ),
    "router_and_experts_one_by_one": Kind(
        "the router's too, saved before transformers 5",
        lora(target_modules=_attention, target_parameters=_experts_and_routers, **FUSED),
        _needs_experts,
        one_by_one=True,
    ),
    "activated": Kind(
        "activated LoRA (`alora_invocation_tokens`)",
        lora(target_modules=_three_axes, alora_invocation_tokens=list(INVOCATION)),
    ),
    "pissa_converted": Kind("PiSSA, saved as LoRA", lora(init_lora_weights="pissa"), std=0.1, converted=True),
    "olora_converted": Kind("OLoRA, saved as LoRA", lora(init_lora_weights="olora"), std=0.1, converted=True),
    "pissa": Kind("PiSSA, as trained", lora(init_lora_weights="pissa"), std=0.1, relative=True),
    "olora": Kind("OLoRA, as trained", lora(init_lora_weights="olora"), std=0.1, relative=True),
    "adalora": Kind("AdaLoRA", _other("AdaLoraConfig", init_r=4, target_r=2, total_step=10, lora_alpha=8), std=0.5),
    "loha": Kind("LoHa", _other("LoHaConfig", r=4, alpha=4), _needs_linear, std=0.4),
    "lokr": Kind("LoKr", _other("LoKrConfig", r=4, alpha=4), _needs_linear, std=0.4),
    "vera": Kind("VeRA", _other("VeraConfig", r=8, projection_prng_key=3), std=1.0),
    "ia3": Kind("(IA)³", _ia3, std=0.3),
}
PEFT_FAILS: Mapping[tuple[str, str], str] = {  # (kind, architecture): what PEFT does wrong
    ("olora_converted", "gpt2"): "its OLoRA forgets that a Conv1D keeps its weight transposed",
    ("olora", "gpt2"): "its OLoRA forgets that a Conv1D keeps its weight transposed",
}
PEFT_LOSES = ("laguna", "unlimited_ocr")  # types on which it does not load all modules of an adapter


class PeftFailsError(Exception):
    """PEFT cannot make a kind of adapter for an architecture; its own words."""


def why_not(kind: str, architecture: str, layers: Layers) -> str | None:
    """Why the kind does not apply to an architecture; None if it does."""
    if (kind, architecture) in PEFT_FAILS:
        return f"PEFT itself fails: {PEFT_FAILS[kind, architecture]}"
    if KINDS[kind].converted and architecture in PEFT_LOSES:
        return "PEFT itself fails: it loses some of the initial weights, from which it converts"
    if KINDS[kind].one_by_one and layers.experts and architecture not in PARTS:
        return "no such checkpoint is made of it here"
    return KINDS[kind].why_not(layers)


def train_kind(kind: str, model_folder: Path, initial: Path, seed: int) -> Any:
    """See `train`, on a model of a folder."""
    return train(kind, load_fresh(model_folder), initial, seed)


def train(kind: str, base: PreTrainedModel, initial: Path, seed: int) -> Any:
    """A PEFT model of the kind as if trained: every trainable tensor is random. `initial`: folder for a
    conversion.

    Raises PeftFailsError.
    """
    with peft_may_warn():
        torch.manual_seed(seed)  # VeRA's projections, OLoRA's and PiSSA's decompositions
        model = _adapted(base, KINDS[kind].config)
        model.create_or_update_model_card = lambda folder: None  # a README, half of the time of a save
        if KINDS[kind].converted:
            _save_initial(model, initial)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # in place: a tied adapter's two parameters share their memory
            parameter.data.copy_(_trained(name, parameter.data, KINDS[kind], generator))
    if KINDS[kind].one_by_one:
        cut_parts_apart(model)
    return model.eval()


def _adapted(base: PreTrainedModel, config_of: Callable[[Layers], peft.PeftConfig]) -> Any:
    layers = read_layers(base)
    shared = [
        p for name, p in base.named_parameters() if re.fullmatch(layers.outside or r"(?!)", name)
    ]  # some are huge
    for some in (layers, narrowed(layers)):
        config = config_of(some)
        if (
            layers.outside is not None
            and config.target_modules != "all-linear"
            and not getattr(config, "exclude_modules", 1)
        ):
            config.exclude_modules = layers.outside
        try:
            return peft.get_peft_model(copy.deepcopy(base, {id(p): p for p in shared}), config)
        except (ValueError, NotImplementedError, AttributeError, TypeError, KeyError) as error:
            reason = f"PEFT itself fails: {error}"
    raise PeftFailsError(reason)


def _trained(name: str, start: torch.Tensor, kind: Kind, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(start.shape, generator=generator) * kind.std
    if "magnitude" in name:  # DoRA: the base's norms times 0.5 to 1.5
        trained = start * (0.5 + torch.rand(start.shape, generator=generator))
    elif any(part in name for part in _FRESH) and not (kind.converted or kind.relative):
        trained = noise
    else:
        trained = start + noise
    return trained.to(kind.dtype).float()


def _save_initial(model: Any, folder: Path) -> None:
    """PEFT's recipe for PiSSA and OLoRA: the weights before the training, saved as those of a plain LoRA."""
    method = model.peft_config["default"].init_lora_weights
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder)
    model.peft_config["default"].init_lora_weights = method


def save_kind(kind: str, architecture: str, model_folder: Path, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of the kind by PEFT's own save_pretrained. `architecture`: that of the model in `model_folder`."""
    save_live(kind, architecture, load_fresh(model_folder), folder, seed)
    return folder


def save_live(kind: str, model_type: str, base: PreTrainedModel, folder: Path, seed: int = 0) -> Any:
    """The live PEFT model that `save_kind` saves. Raises PeftFailsError."""
    initial = folder.parent / f"{folder.name}_initial"
    model = train(kind, base, initial, seed + sum(map(ord, model_type)))
    conversion = {"path_initial_model_for_weight_conversion": str(initial)} if KINDS[kind].converted else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(KINDS[kind].dtype)
    with peft_may_warn():
        model.save_pretrained(folder, **conversion)
    for parameter in trained:
        parameter.data = parameter.data.float()  # they are multiples of the checkpoint's type
    if KINDS[kind].one_by_one:
        rewrite_as_old(folder, model_type)
    return model.requires_grad_(requires_grad=False)
