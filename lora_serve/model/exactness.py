"""Refuses a base whose packed, paged forward pass differs from its plain self: the model, and a small copy."""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lora_serve.core.batch import Batch, Row, RowOutput
from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import ModelSpec, num_unseen
from lora_serve.model.base_model import BaseModel, auto_class_of, described, positions_of
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.loading.frozen_model import (
    FrozenModule,
    LoadedModel,
    device_of,
    plan_loading,
    read_model_config,
)
from lora_serve.model.loading.number_type import FLOAT8
from lora_serve.model.loading.observation import first_line
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.runner.model_runner import ModelRunner

# The tokens of each step of each probe sequence: prefill, continued prefill and decode rows in one batch.
SHORT = ((7, 5, 1), (1, 6, 2))
LONG = ((13, 14, 1, 1), (20, 29, 1, 7), (130, 90, 31, 1))  # of a small copy: on both sides of its boundaries
# By the type that rounds activations most. Other roundings of bfloat16 become other numbers of FP8: 0.07 were seen.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.3, torch.float16: 0.1, FLOAT8: 0.3}  # of a log-probability
_NOISE = {torch.float32: 0.0, torch.bfloat16: 0.12, torch.float16: 0.02, FLOAT8: 0.2}  # of their spread's rms
_log = logging.getLogger(__name__)
_BLOCK_SIZE = 16
_SEEDS = (0, 1)  # experts of two nearly equal scores may be chosen otherwise by a rounding: not twice
_POSITIONS = 512  # of the copy
_MOST_PARAMETERS = 30_000_000  # of the copy
_BOUNDARY = 32  # tokens; where windows and chunks end
_ROPE_BOUNDARY = 64
_VOCAB, _HEADS, _HEAD_DIM, _MOST_LAYERS = 128, 4, 16, 8
_MLA = "qk_rope_head_dim"  # heads of several widths, which all shrink by one factor
_SHARED = "num_kv_shared_layers"  # how many of the last layers read the keys and values of others
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_BOUNDARIES = re.compile(
    r"original_max_position_embeddings|sliding_window(_size)?|attention_chunk_size|attention_window_size|window_size"
    r"|local_attention|floor_scale|log_scaling_n_floor|index_topk|rel_extent|keep_window_size"
)
_SIZES: tuple[tuple[str, int], ...] = (  # the first that a name fits; no number grows
    (r".*vocab_size.*", _VOCAB),
    (r"(out_)?hidden_size|n_embd|d_model|emb_dim|embed_dim|word_embed_proj_dim", _HEADS * _HEAD_DIM),
    (r"(num_)?(attention_)?heads|n_heads?|num_attention_heads|.*_attention_heads", _HEADS),
    (r"head_dim|kv_channels|.*_head_dim|dim_head", _HEAD_DIM),
    (r"rotary_dim|.*lora_rank", _HEAD_DIM // 2),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|intermediate_size_mlp)", 2 * _HEADS * _HEAD_DIM),
    (r"(num|n|moe_num)_(local_|routed_)?experts", 4),
    (r"(num|n)_experts?_per_tok(en)?|moe_(top)?k|top_k|num_experts_per_token|n_group|num_expert_group", 2),
    (r"topk_group|first_k_dense_replace|num_nextn_predict_layers|depth", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len", _POSITIONS),
)
_SEEN = max(map(sum, SHORT))  # tokens on the real weights
# Names of numbers that are boundaries, or none for sure: sizes, tokens, layers, experts.
_OTHERS = re.compile(
    "|".join((_BOUNDARIES.pattern, *dict(_SIZES), *_LAYERS, "max_window_layers", ".*token_id", ".*(kv|value)_heads"))
)

ProbeTokens = tuple[tuple[int, ...], ...]
Chunks = tuple[tuple[int, ...], ...]


def probe_tokens(vocab_size: int, chunks: Chunks = SHORT) -> ProbeTokens:
    """Sequences of arbitrary token ids, as long as their chunks."""
    generator = torch.Generator().manual_seed(0)
    return tuple(tuple(torch.randint(vocab_size, (sum(n),), generator=generator).tolist()) for n in chunks)


@torch.inference_mode()
def plain_logprobs(loaded: LoadedModel, probe: ProbeTokens) -> list[list[float]]:
    """log p(token | tokens before it) of every token but the first, by the untouched model in one pass.

    Shorter sequences end in padding: no token of a causal model sees a later one.
    """
    ids = torch.zeros(len(probe), max(map(len, probe)), dtype=torch.int64, device=loaded.device)
    for row, tokens in zip(ids, probe, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    logits = loaded.module(input_ids=ids, use_cache=False).logits
    return [
        logprobs[: len(tokens) - 1].gather(1, row[1 : len(tokens), None])[:, 0].tolist()
        for logprobs, row, tokens in zip(logits.float().log_softmax(-1), ids, probe, strict=True)
    ]


def check_exactness(
    run: Callable[[Batch], Sequence[RowOutput]], expected: Sequence[Sequence[float]], probe: ProbeTokens,
    block_size: int, dtype: torch.dtype, architecture: str, spec: ModelSpec, chunks: Chunks = SHORT,
) -> float:  # fmt: skip
    """Runs the probe in uneven chunks, all sequences in one batch, and compares: the largest difference of a
    log-probability. Raises ModelError.

    A row lacks the blocks that no later token sees, as `spec` says, as it does in the engine.
    """
    width = -(-max(map(len, probe)) // block_size)
    tables = [tuple(range(1 + i * width, 1 + (i + 1) * width)) for i in range(len(probe))]
    found: list[list[float]] = [[] for _ in probe]
    starts = [0] * len(probe)
    for lengths in zip(*chunks, strict=True):
        rows = tuple(
            Row(i, tokens[start : start + n], start, own[0], (), None, (*tokens, 0)[start + 1 : start + n + 1],
                is_long=spec.long_rope.is_long(len(tokens), len(tokens)), windowed_table=own[-1])
            for i, (tokens, start, n, table) in enumerate(zip(probe, starts, lengths, tables, strict=True))
            for own in [[_without(table, num_unseen(window, start, block_size)) for window in spec.windows]]
        )  # fmt: skip
        for i, output in enumerate(
            run(Batch(rows, tuple(b for table in tables for b in table) if not any(starts) else ()))
        ):
            if output.error is not None:
                raise ModelError(f"{architecture} cannot be served: {output.error}")
            found[i].extend(item.logprob for item in output.prompt_logprobs)
        starts = [start + n for start, n in zip(starts, lengths, strict=True)]
    mine = torch.tensor([value for values in found for value in values[:-1]])
    plain = torch.tensor([value for values in expected for value in values])
    worst = float((mine - plain).abs().max())
    if not _are_near(mine, plain, dtype):
        noise = f", or {_NOISE[dtype]:.0%} of their spread in the root mean square" if _NOISE[dtype] else ""
        raise ModelError(
            f"{architecture} cannot be served exactly: packed rows over a paged cache give log-probabilities that "
            f"differ by {worst:.3g} from the model's own (allowed: {_TOLERANCE[dtype]:g}{noise})"
        )
    return worst


def _without(table: tuple[int, ...], count: int) -> tuple[int, ...]:
    """A block table without its first blocks, in whose places is block 0."""
    return (0,) * count + table[count:]


def _are_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if log-probabilities differ by little, or by as much as rounding may make of such a spread.

    Rounding moves large logits further: of deep or sharp models in bfloat16, transformers' own numbers are off by half
    a nat from those in float32 here and there. A window that is one too long moves them by a fifth of their spread, a
    token that is not seen by more.
    """
    difference = found - expected
    is_near = difference.abs().max() <= _TOLERANCE[dtype]
    return bool(is_near or difference.square().mean().sqrt() <= _NOISE[dtype] * expected.std())


def check_small_copy(config: ModelConfig) -> None:
    """Raises ModelError if a small copy of the model differs from its plain self. None is made of one without a number
    that could be a boundary beyond the tokens of a start on the real weights.
    """
    hf_config = read_model_config(config)
    given = hf_config.to_dict()
    length = _length(config, hf_config)
    edge = min(boundaries(given, length), default=0)
    if not edge and all(_OTHERS.fullmatch(name) or not _SEEN < value < _POSITIONS for name, value in _numbers(given)):
        return
    try:
        try:
            _check(hf_config, length)
        except ModelError as error:
            if edge == 0:
                raise
            _check(hf_config, edge)
            raise ModelError(f"{error}; with --max-model-len {edge} it can be served") from error
    except ModelError:
        raise
    except Exception as error:  # of names that mean something else in this model: the real weights decide alone
        _log.warning("--model %s: no small copy of it was tried: %s", config.model, first_line(error))


def try_base(config: ModelConfig) -> LoadedModel:
    """A small copy of random weights of the model in `config`, tried as a start tries the model. No weight is read, but
    what lies beside packed ones, if they are there.

    Raises ModelError if the copy cannot be served.
    """
    hf_config = read_model_config(config)
    plan_loading(config, hf_config, device_of(config.device)).check()
    config.length(positions_of(hf_config))
    check_small_copy(config)
    length = _length(config, hf_config)
    try:
        _check(hf_config, length)
        return _small_model(shrunk(hf_config, length), _SEEDS[0])
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"--model {config.model}: a small copy of it fails: {first_line(error)}") from error


def _length(config: ModelConfig, hf_config: Any) -> int:
    return config.max_model_len or getattr(hf_config.get_text_config(), "max_position_embeddings", 0) or _POSITIONS


def _check(hf_config: Any, length: int) -> None:
    small = shrunk(hf_config, length)
    _check_once(type(small).from_dict, json.dumps(small.to_dict(), sort_keys=True))


_COPIED = ModelConfig(
    model="", device="cpu", dtype="float32", max_model_len=None, attention="sdpa", lora_kernel="loop",
    quantization="none", fuse_layers=False,
)  # fmt: skip


@functools.lru_cache(maxsize=64)  # of what passed: servers of one process, as in tests, often have like models
def _check_once(config_of: Callable[[Any], Any], small: str) -> None:
    for seed in _SEEDS:
        copied = _small_model(config_of(json.loads(small)), seed)
        chunks = tuple(one for one in LONG if sum(one) <= copied.spec.max_model_len) or SHORT
        probe = probe_tokens(copied.spec.vocab_size, chunks)
        expected = [plain_logprobs(copied, (row,))[0] for row in probe]
        num_blocks = 1 + len(probe) * _POSITIONS // _BLOCK_SIZE
        cache = KVCache(copied.observation.kv_shape, num_blocks, _BLOCK_SIZE, copied.device)
        slots = LoraSlots(copied.spec.linears, 1, copied.device, None)
        runner = ModelRunner(BaseModel(copied, cache, slots, _COPIED), cache, slots, copied.device)
        name = f"{copied.spec.architecture} (a small copy of it, over {max(map(len, probe))} tokens)"
        try:
            check_exactness(runner.run, expected, probe, _BLOCK_SIZE, torch.float32, name, copied.spec, chunks)
        except ModelError:
            if seed == _SEEDS[-1]:
                raise
        else:
            return


def _small_model(hf_config: Any, seed: int) -> LoadedModel:
    """A model of random weights, large enough for distinct answers."""
    build: Callable[..., Any] = auto_class_of(hf_config).from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(hf_config).parameters())
    if size > _MOST_PARAMETERS:  # of a part whose sizes have names that are not known here
        raise ValueError(f"a copy with {size} parameters is not small")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build(hf_config, dtype=torch.float32, attn_implementation="eager").eval().requires_grad_(False)
        for parameter in module.parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 else parameter.add_(0.1)
    try:
        return described(_COPIED, FrozenModule(module, (), torch.float32, torch.device("cpu"), None))
    except ModelError as error:  # the model itself was not refused: the copy is no good one
        raise ValueError(str(error)) from error


def boundaries(config: Mapping[str, Any], max_model_len: int) -> set[int]:
    """The positions below `max_model_len` at which a config's windows, chunks and rope factors change."""
    found = _numbers(config)
    return {value for name, value in found if value < max_model_len and _BOUNDARIES.fullmatch(name)}


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers({str(key): one for key, one in value.items()})
        elif _is_number(value):
            yield name, value


def shrunk(config: Any, max_model_len: int) -> Any:
    """A small config of the same class. Boundaries that no sequence of `max_model_len` tokens crosses are out of reach
    of the copy's, too.
    """
    return type(config).from_dict(_shrunk(config.to_dict(), max_model_len))


def _shrunk(config: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    small = {name: _small(name, value, config, max_model_len) for name, value in copy.deepcopy(dict(config)).items()}
    layers = next((name for name in _LAYERS if _is_number(small.get(name))), None)
    if layers is not None:
        lists = {name: v for name, v in small.items() if isinstance(v, list) and len(v) == small[layers]}
        kept = _layers_kept(lists, small[layers], small.get(_SHARED) or 0)
        if small.get(_SHARED):
            small[_SHARED] = sum(index >= small[layers] - small[_SHARED] for index in kept)
        small[layers] = len(kept)
        small |= {name: [values[index] for index in kept] for name, values in lists.items()}
        if own := small.get("per_layer_config"):
            known = {index: value for index, value in own.items() if int(index) in kept}
            small["per_layer_config"] = {type(i)(kept.index(int(i))): value for i, value in known.items()}
    for name in [name for name, value in small.items() if isinstance(value, dict) and "rope" in name]:
        small[name] = _rope(small[name], small)
    return small


def _small(name: str, value: Any, config: Mapping[str, Any], max_model_len: int) -> Any:
    if name == "id2label":  # its keys are numbers
        return value
    if isinstance(value, dict):
        return _shrunk(value, max_model_len)
    if name.endswith("token_id"):
        return [v % _VOCAB for v in value] if isinstance(value, list) else value % _VOCAB if value else value
    if not _is_number(value) or value < 1:
        return value
    if _BOUNDARIES.fullmatch(name):
        boundary = _ROPE_BOUNDARY if "original" in name else _BOUNDARY
        return min(value, boundary) if value < max_model_len else max(value, _POSITIONS)
    if _MLA in config and name.endswith(("head_dim", "lora_rank")):
        return max(2, value // 8)
    if re.fullmatch(r".*(key_value_heads|kv_heads|query_groups)", name):
        heads = next((config[key] for key in ("num_attention_heads", "n_head") if key in config), value)
        return _HEADS if value == heads else min(value, _HEADS // 2)
    return next((min(value, size) for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)


def _layers_kept(lists: Mapping[str, list[Any]], most: int, num_shared: int) -> list[int]:
    """Enough of the first layers that each kind is among them; if the last ones read the keys of others (Gemma 3n and
    4), the first of each kind of those that do not, and of those that do.
    """
    kinds = [repr(kind) for kind in zip(*lists.values(), strict=True)]
    if num_shared and kinds:
        parts = range(most - num_shared), range(most - num_shared, most)
        return sorted(next(i for i in part if kinds[i] == kind) for part in parts for kind in {kinds[i] for i in part})
    needed = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    return [*range(min(max(needed, 2), most, _MOST_LAYERS))]


def _rope(rope: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters, perhaps by kind of layer, with a factor per frequency of the small head, and as many frequencies
    in the sections that belong to time, height and width.
    """
    heads = config.get("num_attention_heads", _HEADS)
    dim = config.get(_MLA) or config.get("head_dim") or config.get("hidden_size", heads * _HEAD_DIM) // heads
    count = int(dim * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)) // 2
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _rope(value, config)
        elif isinstance(value, list) and name.endswith("_factor") and count:
            small[name] = [value[len(value) * i // count] for i in range(count)]
        elif isinstance(value, list) and name.endswith("_section") and count:
            rest = [part * count // sum(value) for part in value[1:]]
            small[name] = [count - sum(rest), *rest]
        else:
            small[name] = value
    return small


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
