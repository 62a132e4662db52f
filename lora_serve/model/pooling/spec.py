"""A loaded model that pools as plain facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import ModelSpec, PoolingSpec
from lora_serve.core.request import Task
from lora_serve.model.loading.frozen_model import FrozenModule, path_of
from lora_serve.model.loading.observation import Observation
from lora_serve.model.loading.quantization import resident_bytes
from lora_serve.model.pooling.plan import PoolingPlan
from lora_serve.model.pooling.step import Layout


def spec_of(
    config: ModelConfig,
    plan: PoolingPlan,
    found: FrozenModule,
    observation: Observation,
    layout: Layout,
    num_positions: int,
) -> ModelSpec:
    """`num_positions`: of the table of positions; 0: there is none. Raises ModelError."""
    module = found.module
    text = module.config.get_text_config()
    known = num_positions - layout.first_position if num_positions else getattr(text, "max_position_embeddings", 0)
    limit = int(min(known or 2048, plan.max_length or known or 2048))
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ModelError(f"--max-model-len {config.max_model_len}: this model knows {limit} positions at most")
    return ModelSpec(
        name=config.model,
        architecture=type(module).__name__,
        vocab_size=int(text.vocab_size),
        max_model_len=config.max_model_len or limit,
        eos_token_ids=(),
        num_layers=text.num_hidden_layers,
        linears=observation.linears,
        num_bytes=resident_bytes(module),
        dtype=str(found.dtype).removeprefix("torch."),
        device=str(found.device),
        embeddings=observation.embeddings,
        modules=observation.parameters(module),
        input_embedding=path_of(module, module.get_input_embeddings()) or "",
        pooling=_pooling_spec(plan, found, observation, layout),
    )


def _pooling_spec(plan: PoolingPlan, found: FrozenModule, observation: Observation, layout: Layout) -> PoolingSpec:
    module = found.module
    config: Any = module.config
    if plan.task is Task.EMBED:
        return PoolingSpec(
            plan.task,
            _dimension(plan, config.get_text_config().hidden_size),
            is_ragged=layout.is_ragged,
            takes_pairs=layout.has_types,
            is_normalized=plan.is_normalized,
            backbone=module.base_model_prefix,
        )
    prefix = module.base_model_prefix + "."
    untrained = tuple(dict.fromkeys(name.rpartition(".")[0] for name in found.missing))
    head = [path for path in observation.linears if not path.startswith(prefix)]
    return PoolingSpec(
        plan.task,
        0,
        labels=() if untrained else tuple(str(config.id2label[i]) for i in range(config.num_labels)),
        is_ragged=layout.is_ragged,
        takes_pairs=layout.has_types,
        is_multi_label=config.problem_type == "multi_label_classification",
        label_layer=_label_layer(head, observation, config.num_labels),
        backbone=module.base_model_prefix,
        untrained=untrained,
    )


def _dimension(plan: PoolingPlan, hidden_size: int) -> int:
    sizes = [len(step.weight) for step in plan.steps if hasattr(step, "weight")]
    return sizes[-1] if sizes else hidden_size


def _label_layer(head: Sequence[str], observation: Observation, num_labels: int) -> str:
    found = [path for path in head if observation.linears[path].out_features == num_labels]
    if not found:
        raise ModelError("the model's head has no linear layer with a row per label")
    return found[-1]
