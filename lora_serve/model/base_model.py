"""The frozen base: loads a transformers model and lets its own code run over packed rows and a paged KV cache.

Nothing of a model is copied here. The model's attention is replaced through transformers' public
`AttentionInterface`, its linear layers are wrapped to add LoRA deltas, and it is called with all rows laid end to
end (`position_ids` tell where each begins). What a model leaves in the cache is learned by watching one forward
pass. A model for which the result is not that of its plain self is refused (`exactness.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import LoraServeError, ModelError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.model import onednn
from lora_serve.model.attention import Attention, create_attention
from lora_serve.model.changed_module import ChangedModule
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.lora_kernels import LoraKernel, create_kernel
from lora_serve.model.lora_linear import LoraLinear
from lora_serve.model.lora_slots import LoraSlots
from lora_serve.model.observation import Observation, first_line, layer_index, observe
from lora_serve.model.quantization import check_quantized, plan_quantization, resident_bytes
from lora_serve.model.step_context import StepContext, StepInputs

_names = itertools.count()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A plain transformers model, frozen, and the facts about it."""

    module: PreTrainedModel
    spec: ModelSpec
    observation: Observation
    device: torch.device


class BaseModel:
    """The plain model with its attention and linear layers replaced."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, slots: LoraSlots, config: ModelConfig) -> None:
        self.module = loaded.module
        self.spec = loaded.spec
        self.device = loaded.device
        self.context = StepContext()
        self._cache = cache
        self._attention: Attention = create_attention(config.attention, cache)
        self._linears: dict[str, FrozenLinear] = {}
        self._wrap_linears(create_kernel(config.lora_kernel, slots), slots)
        for path, site in loaded.observation.sites.items():
            if path not in self._linears:
                is_input = path == self.spec.input_embedding
                hook = ChangedModule(site, slots.changes_of(path), self.context, reads_token_ids=is_input)
                self.module.get_submodule(path).register_forward_hook(hook)
        implementation = f"lora_serve_{next(_names)}"
        AttentionInterface.register(implementation, self._attend)
        self.module.set_attn_implementation(implementation)

    def linear(self, path: str) -> FrozenLinear:
        """The frozen layer inside a linear layer's wrapper."""
        return self._linears[path]

    def parameters_of(self, path: str) -> dict[str, Tensor]:
        """A module's own parameters, as its checkpoint holds them; a quantised weight is left out."""
        if path not in self._linears:
            return dict(self.module.get_submodule(path).named_parameters(recurse=False))
        linear = self._linears[path]
        weight, bias = linear.dense(), linear.bias
        found = {} if weight is None else {"weight": weight.t() if linear.is_transposed else weight}
        return found if bias is None else {**found, "bias": bias}

    def embedding_scale(self, path: str) -> float:
        """What an embedding multiplies its rows by (Gemma 3); 1.0 in most models."""
        return float(getattr(self.module.get_submodule(path), "embed_scale", 1.0))

    @torch.inference_mode()
    def logits(self, step: StepInputs) -> Tensor:
        """One forward pass over the packed rows: logits of `step.logit_positions`, [num_logits, vocab] float32.

        Adapters with vocabularies of their own widen it to the largest; -inf is what a row's own does not have.
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

    def _wrap_linears(self, kernel: LoraKernel, slots: LoraSlots) -> None:
        embedding = self.module.get_parameter(f"{self.spec.input_embedding}.weight")
        for path, index in slots.module_index.items():
            linear = self.module.get_submodule(path)
            assert isinstance(linear, nn.Linear | Conv1D)
            base = self._linears[path] = FrozenLinear(linear, shared_weight=linear.weight is embedding)
            is_head = path == self.spec.output_head
            wrapped = LoraLinear(base, index, kernel, slots.changes_of(path), self.context, is_output_head=is_head)
            self.module.set_submodule(path, wrapped)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention: query [1, num_heads, T, D], key, value [1, num_kv_heads, T, D], all after RoPE."""
        step = self.context.step
        layer = layer_index(module)
        key_rows, value_rows = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self._cache.write(layer, key_rows, value_rows, step.cache_positions)
        out = self._attention(
            layer,
            query[0].transpose(0, 1),
            key_rows,
            value_rows,
            step,
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            window=sliding_window,
            softcap=softcap,
        )
        return out[None], None


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model of `config.model` (a folder or a hub id) frozen. Raises ModelError in words."""
    device = _device(config.device)
    try:
        hf_config = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
        plan = plan_quantization(config, hf_config, device)
        dtype = _dtype(plan.dtype, hf_config, device)
        module = AutoModelForCausalLM.from_pretrained(
            config.model,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",
            **plan.arguments,
        )
    except LoraServeError:
        raise
    except Exception as error:  # transformers raises many kinds for a broken folder
        raise ModelError(f"--model {config.model}: cannot be loaded: {first_line(error)}") from error
    check_quantized(module, config)
    if not plan.arguments.get("device_map"):
        module.to(device)  # type: ignore[arg-type]
    module.eval()  # type: ignore[no-untyped-call]
    module.requires_grad_(False)
    observation = observe(module, device)
    return LoadedModel(module, _spec(config, module, observation, dtype, device), observation, device)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: no CUDA device is visible to torch; use --device cpu")
    return torch.device(name)


def _dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's own type where the device multiplies it natively, else float32."""
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    own = getattr(hf_config, "dtype", None) or torch.float32
    native = device.type == "cuda" or (own == torch.bfloat16 and onednn.multiplies_bfloat16())
    return own if native else torch.float32


def _spec(
    config: ModelConfig,
    module: PreTrainedModel,
    observation: Observation,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelSpec:
    text = module.config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", 0) or 2048)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ModelError(f"--max-model-len {config.max_model_len}: this model knows {limit} positions at most")
    eos = module.generation_config.eos_token_id if module.generation_config is not None else None
    eos = eos if eos is not None else text.eos_token_id
    embedding = module.get_input_embeddings()
    head = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    return ModelSpec(
        name=config.model,
        architecture=type(module).__name__,
        vocab_size=int(text.vocab_size),
        max_model_len=config.max_model_len or limit,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        num_layers=text.num_hidden_layers,
        linears=observation.linears,
        num_bytes=resident_bytes(module),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        embeddings=observation.embeddings,
        modules=observation.parameters(module),
        input_embedding=_path_of(module, embedding) or "",
        output_head=_path_of(module, head) or "",
        ties_embeddings=head is not None and head.weight is embedding.weight,
    )


def _path_of(module: PreTrainedModel, part: nn.Module | None) -> str | None:
    return next((path for path, candidate in module.named_modules() if candidate is part), None)
