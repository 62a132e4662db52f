"""The frozen base: a transformers model whose own code runs over packed rows and a paged KV cache.

No model code is copied here. The model's attention is replaced through transformers' public `AttentionInterface`, its
linear layers are wrapped to add LoRA deltas, and it is called with all rows laid end to end (`position_ids` tell where
each begins). What a model leaves in the cache is learned by watching one forward pass. A model whose result then
differs from its plain self is refused (`model/exactness.py`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from lora_serve.core.config import ModelConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.model.attention import Attention, create_attention, over_rows
from lora_serve.model.experts import choose_products, group_experts
from lora_serve.model.fusion import fuse
from lora_serve.model.fusion.compiled import CompiledLayers, LayerParts, compile_layers
from lora_serve.model.fusion.joining import join_linears
from lora_serve.model.fusion.parts import FusionParts
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.loading.frozen_model import (
    FrozenModule,
    LoadedModel,
    check_nothing_missing,
    load_frozen,
    path_of,
    read_model_config,
    spec_of,
)
from lora_serve.model.loading.observation import Observation, layer_index, observe, registered_attention
from lora_serve.model.loading.positions import find_positions, position_calls
from lora_serve.model.lora.adapted_model import AdaptedModel, LinearGroup
from lora_serve.model.lora.expert_stacks import adapt_stacks
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.native import library
from lora_serve.model.native.layer_kernels import LayerKernels
from lora_serve.model.paged_attention import can_run
from lora_serve.model.step_context import AttentionSettings, StepContext, StepInputs

_log = logging.getLogger(__name__)


class BaseModel(AdaptedModel[StepInputs]):
    """The plain model with its attention and linear layers replaced."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, slots: LoraSlots, config: ModelConfig) -> None:
        super().__init__(loaded, slots, config, StepContext())
        self._cache, self._slots, self._sites = cache, slots, loaded.observation.sites
        self._attention: Attention = create_attention(config.attention, cache)
        self._chunks = loaded.observation.chunks
        self._attention_name = registered_attention(over_rows(self._attend, self._chunks))
        self.module.set_attn_implementation(self._attention_name)
        tell_past(self.module, PackedPast(self.context))
        self._settings: dict[int, AttentionSettings] = {}  # by layer, as of its last run
        if config.fuse_layers and library.why_not(self.device, cache.shape.dtype) is None:
            self._fuse(slots)
        if config.fuse_layers and self.device.type == "cuda":
            self.group_experts()
            self.join()
        self.compiled = CompiledLayers()
        if config.compile_layers and self.device.type == "cuda":
            self.compiled = self.compile()

    def group_experts(self) -> int:
        """Has experts, and what adapters add to them, computed without waiting for the device; returns how many modules
        of them there are. Meant for GPUs; done before `join` and `compile`, and before an adapter is loaded.
        """
        count = group_experts(self.module) if can_run(self.device) else 0
        if count and self.kernel.reads_device_tokens:
            adapt_stacks(self.module, self._sites, self._slots, self.kernel, self.context)
        return count

    def join(self) -> list[LinearGroup]:
        """Joins linear layers of one input; meant for GPUs, and done before `compile`."""
        return join_linears(self._layer_parts(), self.spec.vocab_size, self.spec.max_model_len)

    def compile(self) -> CompiledLayers:
        """Has torch compile the decoder layers that it can; meant for GPUs."""
        return compile_layers(self._layer_parts(), self.spec.vocab_size, self.spec.max_model_len)

    def _layer_parts(self) -> LayerParts:
        return LayerParts(
            self.module,
            self._attention_name,
            self._cache,
            self._slots,
            self.context,
            self._attend_rows,
            self._chunks,
            self.logits,
        )

    @property
    def reads_tiles(self) -> bool:
        """True if attention takes `StepInputs.tiled`."""
        return self._attention.reads_tiles

    @torch.inference_mode()
    def _fuse(self, slots: LoraSlots) -> None:
        kernels = LayerKernels.load(self._cache.shape.dtype)
        paths = {module: path for path, module in self.module.named_modules()}
        parts = FusionParts(
            self.module, self._cache, slots, self._attention, self.context, self._settings, kernels, paths
        )
        done = fuse(parts, self.logits, self.spec.vocab_size, self.spec.max_model_len)
        _log.info("layers in fused kernels: %s", ", ".join(f"{n} {kind}" for kind, n in done.items()) or "none")

    @torch.inference_mode()
    def logits(self, step: StepInputs) -> Tensor:
        """Runs one forward pass over the packed rows: logits of `step.logit_positions`, [num_logits, vocab] float32.

        Adapters with vocabularies of their own widen it to the largest; tokens that a row does not have are -inf.
        """
        with self.context.running(step):
            output = self.module(
                input_ids=step.token_ids,
                position_ids=step.position_ids,
                use_cache=False,
                logits_to_keep=step.logit_positions,
            )
        logits: Tensor = output.logits[0].float()
        return logits if step.vocabularies is None else step.vocabularies.cut(logits)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        layer = layer_index(module)
        self._settings[layer] = settings
        return self._attend_rows(layer, query, key, value, settings)

    def _attend_rows(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """query [T, num_heads, D], key, value [T, num_kv_heads, D] -> [T, num_heads, D]."""
        step = self.context.step.of_kind(self._cache.shape.kind_of(layer))
        self._cache.write(layer, key, value, step.cache_positions)
        return self._attention(layer, query, key, value, step, settings)


def load_model(config: ModelConfig) -> LoadedModel:
    """Loads the model of `config.model` (a folder or a hub id) frozen. Raises ModelError."""
    found = load_frozen(config, auto_class_of(read_model_config(config)))
    check_nothing_missing(config.model, found.missing)
    return described(config, found)


def auto_class_of(hf_config: Any) -> Any:
    """transformers' auto class that makes a model which generates text: where a config has a class that reads images
    too, and none for text alone, that.
    """
    sees = type(hf_config) in AutoModelForImageTextToText._model_mapping  # noqa: SLF001 - the only list there is
    reads = type(hf_config) in AutoModelForCausalLM._model_mapping  # noqa: SLF001
    return AutoModelForImageTextToText if sees and not reads else AutoModelForCausalLM


def positions_of(hf_config: Any) -> int:
    """The positions that a model knows by its config."""
    return int(getattr(hf_config.get_text_config(), "max_position_embeddings", 0) or 2048)


def described(config: ModelConfig, found: FrozenModule) -> LoadedModel:
    """A frozen model with the facts that one forward pass of it tells. Raises ModelError."""
    module, device = found.module, found.device
    choose_products(module)
    with position_calls(module) as calls:
        observation = observe(module, device)
    spec = _spec(config, found, observation)
    windows, kinds = _kinds(observation.windows, spec.max_model_len)
    spec, shape = replace(spec, windows=windows), replace(observation.kv_shape, kinds=kinds)
    observation = replace(observation, kv_shape=shape)
    long_rope, by_call = find_positions(module, calls, spec.max_model_len)
    return LoadedModel(module, replace(spec, long_rope=long_rope), observation, device, by_call)


def _spec(config: ModelConfig, found: FrozenModule, observation: Observation) -> ModelSpec:
    module = found.module
    text = module.config.get_text_config()
    eos = module.generation_config.eos_token_id if module.generation_config is not None else None
    eos = eos if eos is not None else getattr(text, "eos_token_id", None)
    head = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    return replace(
        spec_of(config, found, observation, positions_of(module.config)),
        eos_token_ids=tuple(token for token in _listed(eos) if 0 <= token < int(text.vocab_size)),
        output_head=path_of(module, head) or "",
        ties_embeddings=head is not None and head.weight is module.get_input_embeddings().weight,
        saved_paths=_saved_paths(module, observation),
        unmet=observation.unmet,
    )


def _kinds(windows: tuple[int | None, ...], max_model_len: int) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """The kinds of layers as `ModelSpec` has them, and the kind of each layer. All that have a window are of one kind,
    with the widest, but for windows that hide nothing. `windows`: by layer.
    """
    hiding = [None if window is None or window >= max_model_len else window for window in windows]
    widest = [max(found)] if (found := [window for window in hiding if window is not None]) else []
    kinds = (*[None] * (None in hiding), *widest)
    return kinds, tuple(0 if window is None else len(kinds) - 1 for window in hiding)


def _saved_paths(module: PreTrainedModel, observation: Observation) -> dict[str, str]:
    """Module -> its path in checkpoints, where transformers renames it as it loads them."""
    transforms = [one.reverse_transform() for one in reversed(get_model_conversion_mapping(module, add_legacy=False))]
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    saved = {path: apply_renamings(f"{path}.weight", renamings) for path in observation.sites}
    return {path: name.removesuffix(".weight") for path, name in saved.items() if name != f"{path}.weight"}


def _listed(eos: int | list[int] | None) -> list[int]:
    return [] if eos is None else eos if isinstance(eos, list) else [eos]


class PackedPast:
    """Stands for transformers' cache before one layer of attention whose code asks it, and not `position_ids`, how many
    tokens come before: Llama 4's layers without rotary positions scale their queries by it (arXiv 2501.19399).
    """

    def __init__(self, context: StepContext[StepInputs]) -> None:
        self._context = context

    def get_seq_length(self, *_: Any) -> Tensor:
        """How far each packed token's position is from its place in the step, [num_tokens] int64."""
        positions = self._context.step.position_ids[0]
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Returns both as they are."""
        return key, value


def tell_past(module: nn.Module, past: PackedPast) -> None:
    """Hands `past` to the layers of attention whose code asks how long the cache is."""

    def give(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        return arguments, {**keywords, "past_key_values": past}

    for part in module.modules():
        code = getattr(type(part).forward, "__code__", None)
        if hasattr(part, "layer_idx") and code is not None and "get_seq_length" in code.co_names:
            part.register_forward_pre_hook(give, with_kwargs=True)
