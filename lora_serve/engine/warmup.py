"""The warm-up plan: ordinary requests in stages, derived from the configuration, to run before the first user's.

A plan is a list of shapes: rows x prompt tokens x with or without LoRA. It covers everything that a step's time and
memory depend on: batch sizes of decoding, chunks of prompts, segments of an adapter short and long, chunks beside
decoding rows, every way of sampling, and for pooling models their rows and lengths. `app/warm_up.py` runs the stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import EngineConfig
from lora_serve.core.model_spec import ModelSpec, PoolingSpec
from lora_serve.core.request import AdapterUse, InferenceRequest, PoolingParams, SamplingParams, Task, TokenGrammar
from lora_serve.core.tenant import WARM_UP

_NEW_TOKENS = 2  # the prompt's own, and one of a step that decodes
_ROW_TOKENS = 2  # of prompts that only fill rows: the shortest that do not decode at once
_SHORTEST_PADDED = 16
# Kernels for CPUs work tile by tile, and nothing is compiled or captured there: more only takes longer.
_AUTO_CHUNK_ON_CPU = 40  # two pieces of an adapter's segment
_AUTO_ROWS_ON_CPU = 16
_SAMPLING_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=1),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, min_tokens=1),
    SamplingParams(temperature=0.0, logit_bias=((0, 1.0),), stop_token_ids=(0,), eos_token_ids=(0,)),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=3),
    SamplingParams(temperature=0.0, allowed_token_ids=(0, 1), bad_words=((1,),)),
)
ANY_TEXT = TokenGrammar(json.dumps({"grammars": [{"lark_grammar": "start: /(.|\\n)*/"}]}))


@dataclass(frozen=True, slots=True)
class WarmupShape:
    num_rows: int
    num_tokens: int  # of each prompt
    has_adapter: bool  # every second row uses it, the first among them

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.num_tokens} tokens, {'LoRA' if self.has_adapter else 'base'}"


@dataclass(frozen=True, slots=True)
class WarmupStage:
    """Requests that run at the same time."""

    name: str
    requests: tuple[InferenceRequest, ...]


def warmup_stages(mode: str, spec: ModelSpec, config: EngineConfig, adapter: AdapterRef) -> list[WarmupStage]:
    """The plan as requests; `adapter` changes nothing and may be used by every tenant.

    mode "off": none; "auto": a few shapes at the ends of what may occur; "full": the product of all powers of two. A
    classifier whose labels only adapters bring cannot run before one of them is there.
    """
    pooling = spec.pooling
    if mode == "off" or (pooling is not None and pooling.task is Task.CLASSIFY and not pooling.labels):
        return []
    if pooling is not None:
        return [_pooling_stage(shape, spec, pooling, adapter) for shape in pooling_shapes(mode, spec, config)]
    stages = [_stage(shape, spec, config, adapter) for shape in generating_shapes(mode, spec, config)]
    return [*stages, _sampling_stage(spec, adapter)]


def generating_shapes(mode: str, spec: ModelSpec, config: EngineConfig) -> list[WarmupShape]:
    """The shapes for models that generate. Prompts of `chunk` tokens fill a step, so several of them run beside
    decoding rows.

    "auto": every second row of a shape with LoRA is the base's, so most shapes need not run without.
    """
    longest = spec.max_model_len - _NEW_TOKENS - 1
    most_rows = config.batch.max_num_seqs
    chunk = max(1, min(config.batch.max_num_batched_tokens, longest))
    if mode == "auto":
        if spec.device == "cpu":
            chunk, most_rows = min(chunk, _AUTO_CHUNK_ON_CPU), min(most_rows, _AUTO_ROWS_ON_CPU)
        mixed = [(min(8, most_rows), 8), (most_rows, _ROW_TOKENS), (min(2, most_rows), chunk)]
        return _distinct([*_both([(1, 8)]), *(WarmupShape(rows, tokens, True) for rows, tokens in mixed)], longest)
    rows = [(count, _ROW_TOKENS) for count in _powers(1, most_rows)]
    chunks = [(1, length) for length in _powers(4, chunk)]
    together = [(min(4, most_rows), chunk), (1, chunk + chunk // 2)]  # beside decoding; a chunk after another
    return _distinct(_both([*rows, *chunks, *together]), longest)


def pooling_shapes(mode: str, spec: ModelSpec, config: EngineConfig) -> list[WarmupShape]:
    """The shapes for models that pool: single texts and full batches of every power of two, to which lengths are
    padded.
    """
    longest, budget = spec.max_model_len, config.batch.max_num_batched_tokens
    lengths = _powers(_SHORTEST_PADDED, longest)
    if mode == "auto":
        lengths = [lengths[0], max(length for length in lengths if length <= max(budget, lengths[0]))]
    pairs = []
    for length in lengths:
        most_rows = max(1, min(config.batch.max_num_seqs, budget // length))
        pairs += [(count, length) for count in ((1, most_rows) if mode == "auto" else _powers(1, most_rows))]
    return _distinct(_both(pairs), longest)


def _both(pairs: Iterable[tuple[int, int]]) -> list[WarmupShape]:
    return [WarmupShape(rows, tokens, has_adapter) for rows, tokens in pairs for has_adapter in (False, True)]


def _distinct(shapes: Iterable[WarmupShape], longest: int) -> list[WarmupShape]:
    """Each shape once, with prompts of `longest` tokens at most."""
    return list(dict.fromkeys(replace(shape, num_tokens=max(1, min(shape.num_tokens, longest))) for shape in shapes))


def _powers(first: int, limit: int) -> list[int]:
    """`first`, twice that, ... below the limit, and the limit itself."""
    return [first << n for n in range(limit.bit_length()) if first << n < limit] + [limit]


def _stage(shape: WarmupShape, spec: ModelSpec, config: EngineConfig, adapter: AdapterRef) -> WarmupStage:
    """A stage whose short prompts decode until the last of them has started, so that all of them decode together."""
    num_new = _NEW_TOKENS
    if shape.num_tokens <= _ROW_TOKENS:
        num_new += _steps_to_start(shape.num_rows, config.batch.max_num_batched_tokens)
    params = SamplingParams(max_tokens=min(num_new, spec.max_model_len - shape.num_tokens), temperature=0.0)
    return _rows(shape, spec, adapter, [params], None)


def _steps_to_start(num_rows: int, max_tokens: int) -> int:
    """Steps of `max_tokens` until so many prompts of `_ROW_TOKENS` have begun, beside those that decode already."""
    started, steps = 0, 0
    while started < num_rows:
        left = max_tokens - started
        steps += -(-_ROW_TOKENS // left)
        started += max(1, left // _ROW_TOKENS)
    return steps


def _sampling_stage(spec: ModelSpec, adapter: AdapterRef) -> WarmupStage:
    num_tokens = max(1, min(8, spec.max_model_len - _NEW_TOKENS - 1))
    shape = WarmupShape(len(_SAMPLING_KINDS), num_tokens, True)
    kinds = [replace(kind, max_tokens=_NEW_TOKENS) for kind in _SAMPLING_KINDS]
    return replace(_rows(shape, spec, adapter, kinds, None), name="ways of sampling")


def grammar_stage(spec: ModelSpec, adapter: AdapterRef) -> WarmupStage:
    """One row that obeys a grammar, which lets any text come. It waits until the tokenizer was read for grammars, which
    lets no other thread of the process run meanwhile: better now than beside a user's request.
    """
    shape = WarmupShape(1, max(1, min(8, spec.max_model_len - _NEW_TOKENS - 1)), False)
    stage = _rows(shape, spec, adapter, [SamplingParams(max_tokens=_NEW_TOKENS)], None)
    requests = (replace(request, request_id="warm-up-grammar", grammar=ANY_TEXT) for request in stage.requests)
    return WarmupStage("a grammar", tuple(requests))


def _pooling_stage(shape: WarmupShape, spec: ModelSpec, pooling: PoolingSpec, adapter: AdapterRef) -> WarmupStage:
    types = (0,) * (shape.num_tokens - 1) + (1,) if pooling.takes_pairs else ()
    return _rows(shape, spec, adapter, [SamplingParams()], PoolingParams(types))


def _rows(
    shape: WarmupShape,
    spec: ModelSpec,
    adapter: AdapterRef,
    params: list[SamplingParams],
    pooling: PoolingParams | None,
) -> WarmupStage:
    return WarmupStage(
        str(shape),
        tuple(
            InferenceRequest(
                request_id=f"warm-up-{shape}-{row}".replace(" ", "-"),
                prompt_token_ids=tuple((row + position) % spec.vocab_size for position in range(shape.num_tokens)),
                sampling=replace(params[row % len(params)], ignore_eos=True),
                adapters=(AdapterUse(adapter),) if shape.has_adapter and row % 2 == 0 else (),
                tenant=f"{WARM_UP}{shape}",  # a stage must not find the blocks of an earlier one: it would run less
                pooling=pooling,
            )
            for row in range(shape.num_rows)
        ),
    )
