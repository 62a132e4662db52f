"""Each model type of transformers that generates text, tiny, with LoRAs on every linear layer, against the live PEFT
model; and what came of it as the table in docs/reference/models.md.

Run as a program (scripts/models_table) it tries them all, or those that are named, and rewrites that table.
"""

from __future__ import annotations

import copy
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from lora_serve.core.errors import ModelError
from lora_serve.model.base_model import auto_class_of
from lora_serve.model.exactness import shrunk
from lora_serve.model.loading.observation import is_linear
from tests.adapters_table import with_table
from tests.kind_matrix import EXACT, Found, mismatches, verdicts_of
from tests.local_engine import Answer, LocalEngine, refusal
from tests.oracle import logprobs_alone, peft_may_warn

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
KINDS_BEGIN, KINDS_END = "<!-- kinds: begin -->", "<!-- kinds: end -->"
TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()))
NOT_BUILT = "not built"
NEW_TOKENS = 6
LENGTHS = (3, 29, 11, 90, 1, 40, 140)  # on both sides of the tiny models' windows and chunks
SEEDS = (1, 2)  # of the adapters
LIMITS: Mapping[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_loras": 2, "block_size": 16}


def _sections(*sizes: int, partial: float = 1.0) -> Mapping[str, Any]:
    """Rotary positions in time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": partial, "mrope_section": list(sizes)}
    return {"text_config": {"rope_parameters": rope}}


# What a config class leaves open although its model needs it.
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl"), _sections(16, 24, 24)),
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"), _sections(8, 12, 12, partial=0.5)),
}


def tiny_config(model_type: str) -> Any:
    """The config that transformers has for a type, as a decoder, made small."""
    kind = CONFIG_MAPPING[model_type]
    config = kind(**_NEEDED.get(model_type, {}))
    if getattr(config, "is_decoder", None) is False:
        config = kind(is_decoder=True, **_NEEDED.get(model_type, {}))
    return shrunk(config, sys.maxsize)


def build_tiny(model_type: str) -> PreTrainedModel:
    """A model of random weights, large enough for distinct answers, without biases of zero or norms of one."""
    torch.manual_seed(sum(map(ord, model_type)))
    config = tiny_config(model_type)
    model: PreTrainedModel = auto_class_of(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            parameter.data += torch.randn(parameter.shape) * 0.1
    model.eval().requires_grad_(False)
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(20, 30)[None], use_cache=False).logits
    assert logits.isfinite().all(), "its own numbers are not finite"
    return model


def verdict(model_type: str, folder: Path) -> str:
    """A word and perhaps why: "exact", "not built: why", "refused: why" or "WRONG: where"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = build_tiny(model_type)
            model.save_pretrained(folder / "model")
        except Exception as error:
            return f"{NOT_BUILT}: {_first_line(error)}"
        try:
            engine = LocalEngine(folder / "model", **LIMITS)
        except ModelError as error:
            return f"refused: {error}".replace(str(folder / "model"), "FOLDER")
        return served(model, engine, folder)


def served(model: PreTrainedModel, engine: LocalEngine, folder: Path) -> str:
    """The verdict of a base that is served: two adapters beside the base in mixed batches."""
    live: dict[str | None, Any] = {None: model}
    for seed in SEEDS:
        try:
            live[f"adapter-{seed}"] = save_all_linear(copy.deepcopy(model), folder / f"adapter-{seed}", seed)
        except Exception as error:
            return f"{NOT_BUILT}: PEFT has no such LoRA: {_first_line(error)}"
    folders = {name: folder / name for name in live if name is not None}
    for path in folders.values():
        if (reason := refusal(engine, path)) is not None:
            return f"refused: {reason}"
    engine = LocalEngine(folder / "model", folders, **LIMITS)
    rows = [(name, prompt) for i, name in enumerate(live) for prompt in prompts(i)]
    random.Random(4).shuffle(rows)
    sampling = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 1}
    answers = engine.run([engine.request(prompt, name, **sampling) for name, prompt in rows])
    wrong = [
        f"{name or 'base'} {line}"
        for (name, prompt), answer in zip(rows, answers, strict=True)
        for line in _wrong(live[name], prompt, answer)
    ]
    return f"WRONG: {'; '.join(wrong)}" if wrong else EXACT


def save_all_linear(base: PreTrainedModel, folder: Path, seed: int) -> Any:
    """A live PEFT model with random weights, saved too: PEFT 0.21.2 loses some modules when it loads from files.

    Linear layers that return more than a product, which PEFT cannot run, are left out.
    """
    own = [name for name, module in base.named_modules() if isinstance(module, nn.Linear) and not is_linear(module)]
    with peft_may_warn():
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=own or None, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(base, config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
        model.eval().save_pretrained(folder)
        with torch.inference_mode():
            model(input_ids=torch.arange(20, 30)[None], use_cache=False)
    return model


def prompts(index: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(index)
    return [torch.randint(20, 128, (length,), generator=generator).tolist() for length in LENGTHS]


def _wrong(oracle: Any, prompt: list[int], answer: Answer) -> Iterator[str]:
    if answer.error is not None:
        yield f"{type(answer.error).__name__}: {answer.error}"
        return
    truth = logprobs_alone(oracle, prompt, answer.token_ids)[len(prompt) - 1 : -1]
    for line in mismatches(Found(answer.token_ids, [one.logprob for one in answer.logprobs if one is not None]), truth):
        yield f"after {len(prompt)} tokens: {line}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_WORDS = (  # what a table leaves out: names, and numbers that differ between models and processors
    (r"^\w+ (\(.*?\) )?cannot be served( exactly)?: |^The adapter cannot be served: |--model FOLDER: ", ""),
    (r" that differ by .*?(?=; with|$)", " that differ from the model's own"),
    (r"with --max-model-len \d+", "up to some length"),
    (r"its \d+ layers do .*", "its layers do not all attend through keys and values"),
    (r"tensor '.*?' belongs to no module of \w+", "the LoRA has tensors of modules that are not served"),
    (r" <class .*?>|:$", ""),
    (r"\|", "/"),
    (r"\^.*", "..."),
    (r"`", "'"),
)


def shortened(found: str) -> str:
    """A verdict as the table tells it: the first reason, without what differs from model to model."""
    outcome, _, reason = found.partition(": ")
    for pattern, words in _WORDS:
        reason = re.sub(pattern, words, reason)
    if "; up to" not in reason:
        reason = reason.partition("; ")[0]
    return f"{outcome}: {reason}" if reason else outcome


def models_table(found: Mapping[str, str]) -> str:
    """Markdown: a line for each outcome and reason, with the types that it is true of."""
    groups: dict[str, list[str]] = {}
    for model_type in sorted(found):
        groups.setdefault(found[model_type], []).append(f"`{model_type}`")
    order = (EXACT, "WRONG", "refused", NOT_BUILT)
    lines = [["outcome", "why", "types", "of"], ["---"] * 4]
    for each in sorted(groups, key=lambda one: (order.index(one.partition(": ")[0]), -len(groups[one]), one)):
        outcome, _, reason = each.partition(": ")
        lines.append([outcome, reason, str(len(groups[each])), ", ".join(groups[each])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_table(document: str) -> dict[str, str]:
    """The shortened verdict of each type: the inverse of `models_table`."""
    text = document.partition(BEGIN)[2].partition(END)[0]
    _, _, *lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    return {
        model_type: f"{outcome}: {reason}" if reason else outcome
        for outcome, reason, _, types in lines
        for model_type in re.findall(r"`([^`]+)`", types)
    }


def bfloat16_errors(model_type: str, folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """How far each log-probability of prompts is from that of the rounded weights computed in float32: the engine's in
    bfloat16, and transformers' or PEFT's; of the base and of a LoRA on every linear layer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny = build_tiny(model_type)
        tiny.to(torch.bfloat16).save_pretrained(folder / "model")
        build = auto_class_of(tiny.config).from_pretrained
        plain = build(folder / "model", dtype=torch.bfloat16, attn_implementation="eager").eval().requires_grad_(False)
        rounded = save_all_linear(copy.deepcopy(plain).float(), folder / "adapter", seed=1)
        exact = {"base": copy.deepcopy(plain).float(), "adapter": rounded}
        peft = copy.deepcopy(rounded)
        for name, parameter in peft.named_parameters():
            parameter.data = parameter.data if "lora_" in name else parameter.data.to(torch.bfloat16)
        engine = LocalEngine(folder / "model", {"adapter": folder / "adapter"}, dtype="bfloat16", **LIMITS)
        found = {}
        for name, theirs in (("base", plain), ("adapter", peft)):
            adapter = None if name == "base" else name
            requests = [engine.request(p, adapter, max_tokens=1, prompt_logprobs=0) for p in _long_prompts()]
            ours, others = list[torch.Tensor](), list[torch.Tensor]()
            for prompt, answer in zip(_long_prompts(), engine.run(requests), strict=True):
                truth = _of_prompt(exact[name], prompt)
                told = torch.tensor([one.logprob for one in answer.prompt_logprobs or () if one is not None])
                ours.append((told - truth).abs())
                others.append((_of_prompt(theirs, prompt) - truth).abs())
            found[name] = torch.cat(ours), torch.cat(others)
        return found


def _long_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(20, 128, (length,), generator=generator).tolist() for length in range(30, 110, 10)]


def _of_prompt(model: Any, prompt: list[int]) -> torch.Tensor:
    """log p of each prompt token but the first."""
    return logprobs_alone(model, prompt)[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]


def kinds_refused(model_type: str, folder: Path) -> dict[str, str]:
    """The shortened reason by kind of adapter that is refused on the type; raises AssertionError for a wrong answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = verdicts_of(model_type, build_tiny(model_type), folder)
    wrong = {kind: verdict for kind, verdict in found.items() if verdict.startswith("WRONG")}
    assert not wrong, wrong
    return {kind: _shortened_kind(verdict) for kind, verdict in found.items() if verdict.startswith("refused")}


def _shortened_kind(verdict: str) -> str:
    short = shortened(verdict).removeprefix("refused: ")
    return re.sub(r"'base_model\S*'|\b(model|lm_head|cls)\.\S+", "...", re.sub(r"\d+", "N", short))


def kinds_table(found: Mapping[str, Mapping[str, str]]) -> str:
    """Markdown: a line for each reason, with the kinds and types. `found`: type -> kind -> reason."""
    groups: dict[str, dict[str, list[str]]] = {}
    for model_type in sorted(found):
        for kind, reason in found[model_type].items():
            groups.setdefault(reason, {}).setdefault(model_type, []).append(kind)
    lines = [["why it is refused", "on"], ["---"] * 2]
    for reason in sorted(groups):
        on = "; ".join(f"`{model_type}`: {', '.join(kinds)}" for model_type, kinds in groups[reason].items())
        lines.append([reason, on])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_kinds(document: str) -> dict[str, dict[str, str]]:
    """The inverse of `kinds_table`; types of which nothing is refused are left out."""
    text = document.partition(KINDS_BEGIN)[2].partition(KINDS_END)[0]
    _, _, *lines = [
        [c.strip() for c in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    found: dict[str, dict[str, str]] = {}
    for reason, on in lines:
        for model_type, kinds in re.findall(r"`([^`]+)`: ([^;]+)", on):
            found.setdefault(model_type, {}).update(dict.fromkeys(kinds.strip().split(", "), reason))
    return found


def main(types: Sequence[str]) -> int:
    """Tries the given types anew, or all; others keep their place. Exit code 1 if a verdict is WRONG."""
    found, kinds = (read(DOCUMENT.read_text()) if types else {} for read in (read_table, read_kinds))
    wrong = False
    for model_type in types or TYPES:
        with tempfile.TemporaryDirectory() as folder:
            full = verdict(model_type, Path(folder))
        found[model_type] = shortened(full)
        wrong |= full.startswith("WRONG")
        if full == EXACT:
            with tempfile.TemporaryDirectory() as folder:
                kinds[model_type] = kinds_refused(model_type, Path(folder))
        print(model_type, full[:300], *kinds.get(model_type, ()), flush=True)
    document = with_table(DOCUMENT.read_text(), models_table(found))
    DOCUMENT.write_text(with_table(document, kinds_table(kinds), KINDS_BEGIN, KINDS_END))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
