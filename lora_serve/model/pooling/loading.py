"""Loads a model that pools, finds out how its rows can be laid out, and which of its modules adapters may change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import ModelSpec, PoolingSpec
from lora_serve.core.request import Task
from lora_serve.model.kv_cache import KVShape
from lora_serve.model.loading.frozen_model import FrozenModule, LoadedModel, load_frozen, spec_of
from lora_serve.model.loading.observation import (
    NUM_LOGITS,
    NUM_TOKENS,
    ModuleWatch,
    Observation,
    first_line,
    refused_if_it_fails,
    registered_attention,
)
from lora_serve.model.loading.positions import find_positions, position_calls
from lora_serve.model.pooling.forward import (
    Layout,
    PooledForward,
    PoolingRow,
    PoolingStep,
    RaggedAttention,
    backbone_of,
    takes_types,
)
from lora_serve.model.pooling.plan import Dense, PoolingPlan
from lora_serve.model.step_context import StepContext

_LENGTHS = (21, 1, 13, 37, 5, 5)  # tokens; two groups of attention, rows of like and of unlike lengths
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}  # of the largest number of an answer


def probe_rows(vocab_size: int, has_types: bool) -> tuple[PoolingRow, ...]:
    """Prompts of arbitrary token ids, with second texts where the model knows them."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        PoolingRow(
            tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()),
            tuple(int(i > length // 2) for i in range(length)) if has_types else (),
        )
        for length in _LENGTHS
    )


@torch.inference_mode()
def plain_answers(
    module: PreTrainedModel, plan: PoolingPlan, rows: Sequence[PoolingRow], device: torch.device
) -> tuple[Tensor, ...]:
    """The untouched model's answers, one row at a time: logits, or embeddings."""
    return tuple(_plain_answer(module, plan, row, device) for row in rows)


def _plain_answer(module: PreTrainedModel, plan: PoolingPlan, row: PoolingRow, device: torch.device) -> Tensor:
    ids = torch.tensor([row.token_ids], device=device)
    types = {"token_type_ids": torch.tensor([row.token_type_ids], device=device)} if row.token_type_ids else {}
    output: Any = module(input_ids=ids, **types)
    if plan.task is Task.CLASSIFY:
        logits: Tensor = output.logits[0].float()
        return logits
    hidden: Tensor = output.last_hidden_state[0].float()
    pooled: Tensor = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0), "max": hidden.amax(0)}[plan.pooling]
    for step in plan.steps:
        pooled = step(pooled)
    return pooled


def is_exact(answers: Tensor, expected: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """True if answers [num_rows, width] are within the tolerance of the expected ones."""
    plain = torch.stack(list(expected))
    worst = (answers - plain).abs().max() / plain.abs().max().clamp_min(1e-6)
    return bool(worst <= _TOLERANCE[dtype])


@dataclass(frozen=True, slots=True)
class PoolingParts:
    """A plain model that pools; its linear layers are still transformers' own."""

    loaded: LoadedModel
    layout: Layout
    forward: PooledForward
    context: StepContext[PoolingStep]
    probe: tuple[PoolingRow, ...]
    expected: tuple[Tensor, ...]  # the plain model's answers to `probe`, one row at a time


def auto_class_of(plan: PoolingPlan) -> Any:
    """transformers' auto class that makes such a model."""
    return AutoModel if plan.task is Task.EMBED else AutoModelForSequenceClassification


def load_pooling_model(config: ModelConfig, plan: PoolingPlan) -> PoolingParts:
    """Loads the model in the first layout that is exact. Raises ModelError if neither is."""
    found = load_frozen(config, auto_class_of(plan))
    module = found.module
    _check_complete(found, config)
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = False
    first, num_positions = _positions(module, found.device)
    has_types = takes_types(module)
    probe = probe_rows(module.config.get_text_config().vocab_size, has_types)
    with refused_if_it_fails(module):
        expected = plain_answers(module, plan, probe, found.device)
    reasons = []
    for is_ragged in (True, False):
        layout = Layout(is_ragged, has_types, first, _ignored_last(module, plan), found.device)
        try:
            return _laid_out(config, plan, found, layout, num_positions, probe, expected)
        except _NotExactError as reason:
            reasons.append(str(reason))
    raise ModelError(f"{type(module).__name__} cannot be served exactly: packed: {reasons[0]}; padded: {reasons[1]}")


class _NotExactError(Exception):
    """This layout does not give the plain model's answers."""


def _laid_out(
    config: ModelConfig,
    plan: PoolingPlan,
    found: FrozenModule,
    layout: Layout,
    num_positions: int,
    probe: tuple[PoolingRow, ...],
    expected: tuple[Tensor, ...],
) -> PoolingParts:
    module, context = found.module, StepContext[PoolingStep]()
    forward = PooledForward(module, plan, context)
    try:
        with position_calls(module) as calls:
            observation = _observed(module, forward, layout, context)
        answers = forward(layout.step(probe))
        if not is_exact(answers, expected, found.dtype):
            raise _NotExactError(f"answers differ from the model's own by more than {_TOLERANCE[found.dtype]:g}")
    except _NotExactError:
        forward.detach()
        raise
    except Exception as error:
        forward.detach()
        raise _NotExactError(first_line(error)) from error
    spec = _spec(config, plan, found, observation, layout, num_positions)
    long_rope, by_call = find_positions(module, calls, spec.max_model_len, generates=False)
    loaded = LoadedModel(module, replace(spec, long_rope=long_rope), observation, found.device, by_call)
    return PoolingParts(loaded, layout, forward, context, probe, expected)


def _observed(
    module: PreTrainedModel, forward: PooledForward, layout: Layout, context: StepContext[PoolingStep]
) -> Observation:
    """Sets the attention of the layout, and watches one pass."""
    attention = RaggedAttention(context)
    is_replaceable = module._supports_attention_backend  # noqa: SLF001 - transformers has no public word for it
    if layout.is_ragged and not is_replaceable:
        raise _NotExactError("its attention is code of its own")
    text = module.config.get_text_config()
    if layout.is_ragged and "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise _NotExactError("its masks have chunks")
    if is_replaceable:
        module.set_attn_implementation(registered_attention(attention) if layout.is_ragged else "eager")
    num_rows = NUM_LOGITS if getattr(module, "num_labels", 0) != NUM_LOGITS else NUM_LOGITS - 2
    watch = ModuleWatch(module, NUM_TOKENS, num_rows)
    with watch.watching():
        forward(layout.step(_watched_rows(num_rows, layout.is_ragged)))
    num_layers = text.num_hidden_layers
    if layout.is_ragged and attention.num_calls != num_layers:
        raise _NotExactError(
            f"{attention.num_calls} of its {num_layers} layers attend as transformers lets one replace"
        )
    return watch.observation(KVShape.alike(num_layers, 0, 0, torch.float32))


def _watched_rows(num_rows: int, is_ragged: bool) -> list[PoolingRow]:
    """NUM_TOKENS in all, or padded to that many each."""
    if not is_ragged:
        return [PoolingRow(tuple(range(3, NUM_TOKENS + 3)))] * num_rows
    lengths = [NUM_TOKENS // num_rows + (i < NUM_TOKENS % num_rows) for i in range(num_rows)]
    return [PoolingRow(tuple(range(3, length + 3))) for length in lengths]


def _check_complete(found: FrozenModule, config: ModelConfig) -> None:
    """A head may be missing, as adapters bring theirs; so may a pooler whose result is not used."""
    prefix = found.module.base_model_prefix + "."
    has_head = backbone_of(found.module) is not found.module
    missing = [
        name
        for name in found.missing
        if (name.startswith(prefix) or not has_head) and not name.removeprefix(prefix).startswith("pooler.")
    ]
    if missing:
        raise ModelError(f"--model {config.model}: the checkpoint lacks {missing[0]} and {len(missing) - 1} others")


@torch.inference_mode()
def _positions(module: PreTrainedModel, device: torch.device) -> tuple[int, int]:
    """The first position id and the number of positions (0: no table of positions), seen in one plain pass."""
    seen: list[tuple[int, int]] = []

    def note(table: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        ids = inputs[0].flatten() if inputs and isinstance(inputs[0], Tensor) else torch.empty(0)
        if ids.numel() == NUM_TOKENS and ids.dtype == torch.int64 and bool((ids.diff() == 1).all()):
            assert isinstance(table, nn.Embedding)
            seen.append((int(ids[0]), table.num_embeddings))

    tables = [m for m in module.modules() if isinstance(m, nn.Embedding) and m is not module.get_input_embeddings()]
    with refused_if_it_fails(module), ExitStack() as hooks:
        for table in tables:
            hooks.enter_context(table.register_forward_hook(note))
        backbone_of(module)(input_ids=torch.full((1, NUM_TOKENS), 5, device=device))
    return seen[0] if seen else (0, 0)


def _ignored_last(module: PreTrainedModel, plan: PoolingPlan) -> int | None:
    """transformers' decoders classify by the last token that is not padding, attention mask or not."""
    if plan.task is not Task.CLASSIFY or plan.pooling != "last":
        return None
    padding = module.config.get_text_config().pad_token_id
    return None if padding is None else int(padding)


def _spec(
    config: ModelConfig,
    plan: PoolingPlan,
    found: FrozenModule,
    observation: Observation,
    layout: Layout,
    num_positions: int,
) -> ModelSpec:
    """The loaded model's facts. `num_positions`: of the table of positions; 0: there is none. Raises ModelError."""
    text = found.module.config.get_text_config()
    known = num_positions - layout.first_position if num_positions else getattr(text, "max_position_embeddings", 0)
    limit = int(min(known or 2048, plan.max_length or known or 2048))
    spec = spec_of(config, found, observation, limit)
    return replace(spec, pooling=_pooling_spec(plan, found, observation, layout))


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
    sizes = [len(step.weight) for step in plan.steps if isinstance(step, Dense)]
    return sizes[-1] if sizes else hidden_size


def _label_layer(head: Sequence[str], observation: Observation, num_labels: int) -> str:
    found = [path for path in head if observation.linears[path].out_features == num_labels]
    if not found:
        raise ModelError("the model's head has no linear layer with a row per label")
    return found[-1]
