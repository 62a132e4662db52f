"""One architecture against every kind of adapter, in one mixed batch, row by row against PEFT alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_serve.model.loading.observation import observe
from tests.local_engine import Answer, LocalEngine, refusal
from tests.oracle import load_alone, load_fresh, logprobs_alone, save_tiny_model
from tests.peft_kinds import INVOCATION, KINDS, TRAINED_TOKENS, PeftFailsError, save_live, why_not
from tests.peft_layers import read_layers

BASE = "base"  # the rows without an adapter
EXACT = "exact"
TOLERANCE = 1e-3  # of a log-probability
NEW_TOKENS = 6
MAX_MODEL_LEN = 72
NUM_BLOCKS = 30  # of 4 tokens, for up to 8 sequences of up to 72: preemption
PROMPT_LENGTHS = (3, 29, 11, 1, 18, 40, 5)
LIMITS: dict[str, Any] = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": MAX_MODEL_LEN,
    "block_size": 4,
    "speculate": "off",  # rows that end early leave memory, and nothing is preempted
}


@dataclass(frozen=True)
class Found:
    """What the engine answered to one row."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # of these tokens


def mismatches(found: Found, truth: torch.Tensor) -> list[str]:
    """Where a greedy answer is not the truth's. `truth`: [len(token_ids), vocab] log-probabilities by PEFT.

    Any token within TOLERANCE of the most likely one is right, and its own log-probability must be too.
    """
    wrong = []
    for i, (token, logprob, row) in enumerate(zip(found.token_ids, found.logprobs, truth, strict=True)):
        if row.max() - row[token] > TOLERANCE:
            wrong.append(f"token {i} is {token}, PEFT's is {int(row.argmax())} by {row.max() - row[token]:.4f}")
        elif not abs(row[token] - logprob) <= TOLERANCE:
            wrong.append(f"log-probability {i} is {logprob:.4f}, PEFT's is {row[token]:.4f}")
    return wrong


def verdicts(architecture: str, folder: Path) -> dict[str, str]:
    """By kind: "exact", "refused: why", "not applicable: why" or "WRONG: where"."""
    found: dict[str, str] = {}
    for tied, model in _bases(architecture, folder).items():
        kinds = [name for name, kind in KINDS.items() if kind.tied is tied]
        for kind, verdict in verdicts_on(architecture, model, folder / f"tied-{tied}", kinds).items():
            if found.get(kind, EXACT) == EXACT:  # the base is asked on each model: its worst verdict counts
                found[kind] = verdict
    return {kind: found[kind] for kind in (BASE, *KINDS)}


def _bases(architecture: str, folder: Path) -> dict[bool | None, Path]:
    """Models by what a Kind may say of tied embeddings: as the architecture has it, tied and untied."""
    default = save_tiny_model(architecture, folder / "model")
    is_tied = bool(load_fresh(default).config.tie_word_embeddings)
    other = save_tiny_model(architecture, folder / "other", tie_word_embeddings=not is_tied)
    return {None: default, is_tied: default, not is_tied: other}


def verdicts_on(architecture: str, model: Path, folder: Path, kinds: Sequence[str]) -> dict[str, str]:
    """The verdicts of some kinds, all served by one engine in one mixed batch."""
    plain = load_fresh(model)
    reasons = {kind: why_not(kind, architecture, read_layers(plain)) for kind in kinds}
    found = {kind: f"not applicable: {reason}" for kind, reason in reasons.items() if reason is not None}
    folders = {}
    for kind in (kind for kind in kinds if kind not in found):
        try:
            _save_working(kind, architecture, plain, folder / kind)
            folders[kind] = folder / kind
        except PeftFailsError as error:
            found[kind] = f"not applicable: {error}"
    limits = {**LIMITS, "kv_cache_memory": str(NUM_BLOCKS * block_bytes(plain))}
    doorman = LocalEngine(model, {}, max_loras=1, **limits)
    refusals = {kind: refusal(doorman, path) for kind, path in folders.items()}
    found |= {kind: f"refused: {reason}" for kind, reason in refusals.items() if reason is not None}
    return found | judge(model, {kind: path for kind, path in folders.items() if kind not in found}, limits)


def verdicts_of(model_type: str, model: Any, folder: Path) -> dict[str, str]:
    """The verdicts of all kinds on a live model, beside live PEFT models, in one mixed batch; `model` is saved too."""
    model.save_pretrained(folder / "model")
    layers, is_tied = read_layers(model), model.get_output_embeddings().weight is model.get_input_embeddings().weight
    found, live = dict[str, str](), dict[str, Any]()
    for kind, what in KINDS.items():
        reason = why_not(kind, model_type, layers)
        if what.tied not in (None, is_tied):
            reason = "its embeddings are not tied" if what.tied else "its embeddings are tied"
        try:
            if reason is None:
                live[kind] = _save_working(kind, model_type, model, folder / kind)
        except PeftFailsError as error:
            reason = str(error)
        if reason is not None:
            found[kind] = f"not applicable: {reason}"
    limits = {**LIMITS, "kv_cache_memory": str(NUM_BLOCKS * block_bytes(model))}
    doorman = LocalEngine(folder / "model", {}, max_loras=1, **limits)
    for kind in tuple(live):
        if (reason := refusal(doorman, folder / kind)) is not None:
            found[kind] = f"refused: {reason}"
            del live[kind]
    folders = {kind: folder / kind for kind in live}
    return found | judge(folder / "model", folders, limits, {BASE: model, **live})


def _save_working(kind: str, model_type: str, base: Any, folder: Path) -> Any:
    """A live PEFT model, saved too. Raises PeftFailsError, also for one that cannot be run."""
    try:
        live = save_live(kind, model_type, base, folder)
        logprobs_alone(live, INVOCATION, ())
    except PeftFailsError:
        raise
    except Exception as error:  # whatever PEFT and the model raise
        raise PeftFailsError(f"PEFT itself fails: {error}") from error
    return live


def judge(
    model: Path, folders: Mapping[str, Path], limits: Mapping[str, Any], live: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Serve every adapter and the base mixed, in an order drawn once, and compare each row: exact or WRONG.

    `live`: the oracles by kind; None: they are read from the folders.
    """
    engine = LocalEngine(model, folders, max_loras=5, **limits)
    names = [*[BASE] * 4, *folders]
    rows = [(name, prompt) for i, name in enumerate(names) for prompt in prompts(i)]
    random.Random(4).shuffle(rows)
    sampling = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 1}
    for _ in range(3):  # loads that come late, on a busy machine, leave fewer rows to run at a time
        requests = [engine.request(prompt, None if kind == BASE else kind, **sampling) for kind, prompt in rows]
        answers = engine.run(requests)
        if engine.engine.stats().num_preemptions > 0 or None not in engine.parts.spec.windows:
            break  # rows of a window give back blocks, and may lack none
    else:
        raise AssertionError("no row was preempted")
    assert engine.max_adapters_in_batch >= (3 if len(folders) > 5 else 0)
    found = {}
    for kind in (BASE, *folders):
        oracle = live[kind] if live else load_fresh(model) if kind == BASE else load_alone(model, folders[kind])
        mine = [(prompt, answer) for (name, prompt), answer in zip(rows, answers, strict=True) if name == kind]
        wrong = [line for prompt, answer in mine for line in _wrong(oracle, prompt, answer)]
        found[kind] = f"WRONG: {'; '.join(wrong)}" if wrong else EXACT
    return found


def _wrong(oracle: Any, prompt: list[int], answer: Answer) -> Iterator[str]:
    if answer.error is not None:
        yield f"{type(answer.error).__name__}: {answer.error}"
    elif len(answer.token_ids) != NEW_TOKENS:
        yield f"{len(answer.token_ids)} tokens instead of {NEW_TOKENS}"
    else:
        truth = logprobs_alone(oracle, prompt, answer.token_ids)[len(prompt) - 1 : -1]
        logprobs = [item.logprob for item in answer.logprobs if item is not None]
        for line in mismatches(Found(answer.token_ids, logprobs), truth):
            yield f"after {len(prompt)} tokens: {line}"


def prompts(index: int) -> list[list[int]]:
    """Three of three lengths; the longest holds the trained tokens and, twice, the invocation of an activated LoRA.

    A chunk of at most 48 tokens can never hold the whole of the longest.
    """
    generator = torch.Generator().manual_seed(index)
    lengths = [PROMPT_LENGTHS[(index + i) % len(PROMPT_LENGTHS)] for i in (0, 1)]
    first, second, longest = (torch.randint(20, 97, (n,), generator=generator).tolist() for n in (*lengths, 60))
    start = 20 + index % 7
    longest[start : start + 2] = longest[start + 21 : start + 23] = INVOCATION
    longest[4], longest[33], longest[57] = TRAINED_TOKENS
    return [first, second, longest]


def block_bytes(model: Any) -> int:
    """Bytes of a KV block of 4 tokens."""
    return observe(model, torch.device("cpu")).kv_shape.block_bytes(4)
