"""Tiny models that pool, adapters for them, and what transformers and PEFT alone make of both: one row at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from lora_serve.core.batch import Batch, RowOutput
from tests.local_engine import Answer, LocalEngine
from tests.oracle import peft_may_warn

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}
_DECODER = {"num_key_value_heads": 2}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    "electra": {"embedding_size": 16},
    "mpnet": {"pad_token_id": 1},
    "deberta-v2": {},
    "llama": _DECODER,
    "qwen2": _DECODER,
    "qwen3": {**_DECODER, "head_dim": 16},
    "mistral": {**_DECODER, "sliding_window": 6},
    "gemma2": {
        **_DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}  # fmt: skip
REPRESENTATIVE = ("bert", "modernbert", "mpnet", "llama", "gpt2")
PADDED = ("mpnet", "deberta-v2")  # their attention is their own code
DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2")
TOLERANCE = 1e-4
LENGTHS = (1, 40, 7, 7, 23, 2, 16, 17)
CLASSES = {"embed": AutoModel, "classify": AutoModelForSequenceClassification, "generate": AutoModelForCausalLM}
_TASK_TYPES = {"embed": "FEATURE_EXTRACTION", "classify": "SEQ_CLS", "generate": "CAUSAL_LM"}


def save_pooling_model(family: str, task: str, folder: Path, num_labels: int = 3, **overrides: Any) -> Path:
    """Random float32 weights, large enough for distinct answers, and no bias of zero."""
    config = AutoConfig.for_model(
        family, **{**_SHAPE, **FAMILIES.get(family, {}), "num_labels": num_labels, **overrides}
    )
    torch.manual_seed(sum(map(ord, family)))
    model = CLASSES[task].from_config(config, dtype=torch.float32)
    shake(model)
    model.save_pretrained(folder)
    return folder


def shake(model: torch.nn.Module) -> None:
    """Random weights everywhere: what starts as zeros or ones would hide mistakes."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            parameter.data += torch.randn(parameter.shape) * 0.1


def linear_names(model: torch.nn.Module) -> list[str]:
    """Last names of the linear layers of the backbone."""
    backbone = getattr(model, model.base_model_prefix, model)
    linears = [name for name, m in backbone.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)]
    return sorted({name.rpartition(".")[2] for name in linears if "pooler" not in name})


def load_base(folder: Path, task: str, num_labels: int | None = None) -> Any:
    """As transformers alone serves it; `num_labels`: with a fresh head, as a trainer starts from."""
    labels = {} if num_labels is None else {"num_labels": num_labels, "ignore_mismatched_sizes": True}
    torch.manual_seed(0)
    model = CLASSES[task].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **labels)
    return model.eval()


def save_pooling_adapter(
    model: Path, folder: Path, task: str, seed: int = 0, num_labels: int | None = None,
    kind: type[peft.PeftConfig] = peft.LoraConfig, **config: Any,
) -> Path:  # fmt: skip
    """A PEFT checkpoint with random trained weights; `task`: what the base was loaded for when it was trained."""
    base = load_base(model, task, num_labels)
    targets = {"target_modules": linear_names(base), "task_type": _TASK_TYPES[task]}
    defaults = {"r": 4, "lora_alpha": 8} if kind is peft.LoraConfig else {}
    with peft_may_warn():
        trained = peft.get_peft_model(base, kind(**{**defaults, **targets, **config}))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in trained.named_parameters():
            if parameter.requires_grad:
                start = 1.0 if "ia3_" in name else 0.0 if "lora_A" in name or "lora_B" in name else parameter.data
                parameter.data = start + torch.randn(parameter.shape, generator=generator) * 0.15
        trained.save_pretrained(folder)
    return folder


def load_adapter_alone(model: Path, folder: Path, task: str, num_labels: int | None = None) -> Any:
    """PEFT's own reading of a checkpoint, on a fresh base."""
    with peft_may_warn():
        return peft.PeftModel.from_pretrained(load_base(model, task, num_labels), folder).eval()


@torch.inference_mode()
def hidden_alone(model: Any, tokens: Sequence[int], types: Sequence[int] = ()) -> torch.Tensor:
    """The last hidden states of one row, [num_tokens, hidden]."""
    more = {"token_type_ids": torch.tensor([list(types)])} if types else {}
    return model(input_ids=torch.tensor([list(tokens)]), **more).last_hidden_state[0]


@torch.inference_mode()
def logits_alone(model: Any, tokens: Sequence[int], types: Sequence[int] = ()) -> torch.Tensor:
    """The labels' logits of one row."""
    more = {"token_type_ids": torch.tensor([list(types)])} if types else {}
    return model(input_ids=torch.tensor([list(tokens)]), **more).logits[0]


def pooled(hidden: torch.Tensor, how: str) -> torch.Tensor:
    """sentence-transformers' documented formulae for one row without padding, and a length of 1."""
    vector = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0), "max": hidden.max(0).values}[how]
    return vector / vector.norm()


def prompts(num: int = len(LENGTHS), vocab_size: int = 97) -> list[list[int]]:
    """Ragged ones."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, vocab_size, (LENGTHS[i % 8],), generator=generator).tolist() for i in range(num)]


def run(
    engine: LocalEngine, rows: Sequence[tuple[list[int], str | Mapping[str, float] | None]], types: Any = ()
) -> list[torch.Tensor]:
    """The vectors of all rows, which were computed together: a batch that fails is not run again row by row."""
    failed = []
    run_batch = engine.parts.runner.run

    def watched(batch: Batch) -> list[RowOutput]:
        try:
            return run_batch(batch)
        except Exception as error:
            failed.append(error)
            raise

    with mock.patch.object(engine.parts.runner, "run", watched):
        answers = _answers(engine, rows, types)
    assert failed == []
    return [torch.from_numpy(np.frombuffer(answer.pooled or b"", "<f4").copy()) for answer in answers]


def _answers(engine: LocalEngine, rows: Sequence[tuple[list[int], Any]], types: Any) -> list[Answer]:
    requests = [engine.pooling_request(tokens, adapter, types or ()) for tokens, adapter in rows]
    answers = engine.run(requests)
    assert [answer.error for answer in answers] == [None] * len(rows)
    return answers


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain.float(), atol=TOLERANCE, rtol=0)


def how_of(family: str) -> str:
    return "last" if family in DECODERS else "mean"
