"""The real engine with and without guesses: the same tokens, log-probabilities and ends, whatever is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

import lora_serve
from lora_serve.core.batch import ActivationModel
from lora_serve.core.request import InferenceRequest, TokenGrammar
from lora_serve.core.stats import EngineStats
from lora_serve.engine.drafter import Drafter
from lora_serve.model.attention import varlen
from lora_serve.model.memory_setup import ActivationProbe
from lora_serve.text.tokenizer import TextModel
from tests.contracts.test_attention import plain_varlen
from tests.local_engine import Answer, LocalEngine
from tests.model.test_resized_vocabulary import Resized, V, save_resized
from tests.oracle import load_alone, load_plain, save_adapter, save_tiny_model
from tests.tiers import mostly_nightly

DEMO = Path(lora_serve.__file__).parent / "demo_data" / "model"
# a head of its own: one that is the embedding too is torch's product, whose last bits depend on the number of rows
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256, "tie_word_embeddings": False}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "all of the vocabulary": {"temperature": 1.0, "seed": 1, "logprobs": 0},
    "truncated": {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "cold": {"temperature": 0.2, "seed": 3},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    "sampled with penalties": {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.5, "logprobs": 1},
    "bias": {"temperature": 0.7, "seed": 5, "logit_bias": ((5, 3.0), (6, -100.0))},
    "bad words": {"bad_words": ((7,), (8, 9), (10, 11, 12))},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(3, 50))},
    "stop ids": {"temperature": 1.0, "seed": 6, "stop_token_ids": (11, 12, 13, 14)},
    "allowed": {"temperature": 1.0, "seed": 7, "allowed_token_ids": (20, 21, 22, 23)},
    "to its greatest length": {"max_tokens": 300, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "second choice": {"temperature": 1.0, "seed": 8},
    "third choice": {"temperature": 1.0, "seed": 9},
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"kv_cache_memory": "8MiB"},
    "bfloat16": {"kv_cache_memory": "8MiB", "dtype": "bfloat16"},
    "one row at a time": {"kv_cache_memory": "8MiB", "max_num_seqs": 1},
    "prompts in chunks": {"kv_cache_memory": "8MiB", "max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preempting": {"kv_cache_memory": "300KiB", "swap_space": "0"},
    "other kernels": {"kv_cache_memory": "8MiB", "fuse_layers": False, "attention": "sdpa"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("speculation")
    model = save_tiny_model("llama", root / "model", **SHAPE)
    adapters = {name: save_adapter(model, root / name, seed=i, r=3 + 4 * i) for i, name in enumerate("abc")}
    adapters["dora"] = save_adapter(model, root / "dora", seed=7, use_dora=True)
    adapters["head"] = save_adapter(model, root / "head", seed=8, modules_to_save=["lm_head"])
    adapters["grown"] = save_resized(model, root / "grown", Resized(V + 5, {}, True), 0)
    return model, adapters


def engine_of(folders: tuple[Path, dict[str, Path]], speculate: str, **settings: Any) -> LocalEngine:
    limits = {"block_size": 4, "max_loras": 6, "max_num_seqs": 16}
    engine = LocalEngine(*folders, speculate=speculate, **{**limits, **settings})
    if settings.get("lora_kernel") == "triton":
        engine.parts.runner._model._attention = varlen.Backend(
            engine.parts.runner._cache, plain_varlen, (torch.float32,)
        )
    return engine


def requests(engine: LocalEngine) -> list[InferenceRequest]:
    """Prompts that repeat themselves, so that there is something to look up."""
    generator, found = torch.Generator().manual_seed(3), []
    adapters = (None, *engine.refs, {"a": 0.5, "b": 0.7})
    for i, sampling in enumerate(SAMPLING.values()):
        part = torch.randint(3, 97, (5 + 2 * i,), generator=generator).tolist()
        found.append(engine.request(part * 3, adapters[i % len(adapters)], **{"max_tokens": 40, **sampling}))
    return found


def told(monkeypatch: pytest.MonkeyPatch, answers: Sequence[list[int]], wrong: int = 5) -> None:
    """Guesses are what the answers will be, but for one of seven tokens, which is `wrong`."""

    def draft(self: Drafter, most: int, least_rate: float) -> list[float]:
        known = self._tokens
        following = next((tokens[len(known) :] for tokens in answers if tokens[: len(known)] == known), [])
        guesses = [token if (len(known) + i) % 7 else wrong for i, token in enumerate(following[:most])]
        self.guesses, self._draft = [], [(token, 0) for token in guesses]
        return [1.0] * len(guesses)

    monkeypatch.setattr(Drafter, "draft", draft)


def same(found: Sequence[Answer], wanted: Sequence[Answer], *, to_the_bit: bool) -> None:
    for name, one, other in zip(SAMPLING, found, wanted, strict=False):
        assert one.error is None, name
        assert (one.token_ids, one.reason, one.stop_token_id) == (other.token_ids, other.reason, other.stop_token_id), (
            name
        )
        if to_the_bit:
            assert (one.logprobs, one.prompt_logprobs) == (other.logprobs, other.prompt_logprobs), name
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "guesses"),
    mostly_nightly(
        product(ENGINES, ("looked up", "told")),
        *product(("bfloat16", "preempting", "prompts in chunks"), ("told",)),
        ("roomy", "looked up"),
    ),
)
def test_answers_are_those_without_guesses(
    folders: tuple[Path, dict[str, Path]], kind: str, guesses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine_of(folders, "off", **ENGINES[kind])
    asked = requests(plain)
    wanted = plain.run(asked)
    assert plain.engine.stats().speculation.num_drafted == 0
    if guesses == "told":
        told(
            monkeypatch, [[*one.prompt_token_ids, *answer.token_ids] for one, answer in zip(asked, wanted, strict=True)]
        )
    guessing = engine_of(folders, "4", **ENGINES[kind])
    found = guessing.run(requests(guessing))
    stats, figures = guessing.engine.stats(), plain.engine.stats()
    assert 0 < stats.speculation.num_accepted < stats.speculation.num_drafted
    assert stats.num_steps < figures.num_steps
    assert (stats.num_preemptions > 0) == (kind == "preempting")
    assert stats.num_free_blocks == stats.num_blocks
    same(found, wanted, to_the_bit="fuse_layers" not in ENGINES[kind])


@pytest.mark.nightly  # by day: tests/model/runner/test_step_graphs.py, tests/contracts
def test_a_gpu_s_programs_give_the_same_tokens(
    folders: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's, interpreted, and paged FlashAttention in plain maths."""
    monkeypatch.setattr(ActivationProbe, "learn", lambda *_: ActivationModel())  # the interpreter takes 10 s for it

    def answers(speculate: str) -> tuple[list[InferenceRequest], list[Answer]]:
        engine = engine_of(folders, speculate, kv_cache_memory="8MiB", fuse_layers=False, lora_kernel="triton")
        engine.parts.runner._model._attention = varlen.Backend(
            engine.parts.runner._cache, plain_varlen, (torch.float32,)
        )
        asked = [
            engine.request([7 + i, 8, 9], name, max_tokens=7, ignore_eos=True) for i, name in enumerate((None, "a"))
        ]
        return asked, engine.run(asked)

    asked, wanted = answers("off")
    told(monkeypatch, [[*one.prompt_token_ids, *answer.token_ids] for one, answer in zip(asked, wanted, strict=True)])
    assert [one.token_ids for one in answers("3")[1]] == [one.token_ids for one in wanted]


def test_greedy_answers_are_peft_s_own(folders: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters = folders
    prompts = [torch.randint(3, 97, (9,), generator=torch.Generator().manual_seed(i)).tolist() * 2 for i in range(6)]
    names = (None, "a", "b", "c", "dora", "head")
    wanted = []
    for name, prompt in zip(names, prompts, strict=True):
        alone = load_plain(model) if name is None else load_alone(model, adapters[name])
        with torch.inference_mode():
            answer = alone.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)
        wanted.append(answer[0].tolist())
    told(monkeypatch, wanted)
    engine = engine_of(folders, "6", kv_cache_memory="8MiB")
    asked = [
        engine.request(prompt, name, max_tokens=30, ignore_eos=True)
        for name, prompt in zip(names, prompts, strict=True)
    ]
    found = engine.run(asked)
    assert [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, found, strict=True)] == wanted
    assert engine.engine.stats().speculation.num_accepted > 60


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "items": {"type": "array", "items": {"enum": ["screen", "screws", "cable"]}, "maxItems": 4},
        "number": {"type": "integer"},
    },
    "required": ["name", "items", "number"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False}),
    "regex": LLMatcher.grammar_from_regex("(the (customer|order) (says|wants) [a-z ]{3,30}\\.)+"),
    "choice": LLMatcher.grammar_from_lark('start: "refund the order" | "refund the customer" | "a refund"'),
    "call": LLMatcher.grammar_from_lark(
        'start: "<tool_call>" call "</tool_call>"\ncall: %json '
        + json.dumps({"properties": {"query": {"type": "string"}}})
    ),
}


@pytest.mark.many(1)
@pytest.mark.parametrize("guesses", ["looked up", "told"])
def test_answers_under_a_grammar_are_those_without_guesses(guesses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TextModel.load(str(DEMO))
    document = '{"name":"the customer","items":["screen","screws"],"number":12} the order says the customer wants it. '

    def answers(speculate: str) -> tuple[list[InferenceRequest], list[Answer], EngineStats]:
        engine = LocalEngine(DEMO, with_grammars=True, speculate=speculate, dtype="float32", kv_cache_memory="16MiB")
        prompt = list(text.encode(document * 2, add_special_tokens=True))
        sampling = [
            {"temperature": 0.0, "logprobs": 2},
            {"temperature": 1.0, "seed": 5, "min_tokens": 9, "logprobs": 0},
        ]
        asked = [
            replace(engine.request(prompt, max_tokens=60, **one), grammar=TokenGrammar(grammar))
            for grammar in GRAMMARS.values()
            for one in sampling
        ]
        found = engine.run([*asked, engine.request(prompt, max_tokens=60)])
        engine.close()
        return asked, found, engine.engine.stats()

    asked, wanted, plain = answers("off")
    if guesses == "told":
        told(
            monkeypatch,
            [[*one.prompt_token_ids, *answer.token_ids] for one, answer in zip(asked, wanted, strict=False)],
            wrong=text.encode("e", add_special_tokens=False)[0],
        )
    _, found, stats = answers("5")
    assert [(one.token_ids, one.reason, one.error) for one in found] == [
        (one.token_ids, one.reason, one.error) for one in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        mine, theirs = ([None if p is None else p.logprob for p in each.logprobs] for each in (one, other))
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert 0 < stats.speculation.num_accepted < stats.speculation.num_drafted
    assert stats.num_forced == plain.num_forced > 0
    assert stats.num_steps < plain.num_steps
