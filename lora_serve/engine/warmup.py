"""What to run before the first user does: ordinary requests, in stages. Running them is `launch.py`'s business."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import EngineConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import AdapterUse, InferenceRequest, SamplingParams

_NEW_TOKENS = 3


@dataclass(frozen=True, slots=True)
class WarmupStage:
    """Requests that run at the same time."""

    name: str
    requests: tuple[InferenceRequest, ...]


def warmup_stages(mode: str, spec: ModelSpec, config: EngineConfig, adapter: AdapterRef) -> list[WarmupStage]:
    """Stages of growing row counts and prompt lengths; every second row uses `adapter`.

    mode "off": none; "auto": one row, some rows, a long prompt; "full": every power of two up to the limits.
    """
    longest = max(1, min(config.batch.max_num_batched_tokens, spec.max_model_len - _NEW_TOKENS - 1))
    if mode == "off":
        return []
    shapes = [(1, 8), (8, 32), (1, longest)]
    if mode == "full":
        shapes = [(rows, 16) for rows in _powers(config.batch.max_num_seqs)] + [
            (2, tokens) for tokens in _powers(longest)
        ]
    return [
        _stage(min(rows, config.batch.max_num_seqs), min(tokens, longest), spec, adapter) for rows, tokens in shapes
    ]


def _powers(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    return [1 << n for n in range(limit.bit_length()) if 1 << n < limit] + [limit]


def _stage(rows: int, tokens: int, spec: ModelSpec, adapter: AdapterRef) -> WarmupStage:
    name = f"{rows} rows of {tokens} prompt tokens"
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return WarmupStage(
        name,
        tuple(
            InferenceRequest(
                request_id=f"warm-up-{name}-{row}".replace(" ", "-"),
                prompt_token_ids=tuple((row + position) % spec.vocab_size for position in range(tokens)),
                sampling=params,
                adapters=(AdapterUse(adapter),) if row % 2 or rows == 1 else (),
                tenant=f"warm-up: {name}",  # a stage must not find the blocks of an earlier one: it would run less
            )
            for row in range(rows)
        ),
    )
