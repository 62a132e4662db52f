"""Rows with drafts: whatever was guessed, a row has the very tokens and numbers that it has without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lora_serve.core.batch import Batch, NextToken, Row, RowAdapter, RowOutput, SampleInput, SlotRef
from lora_serve.core.errors import NumericalError
from lora_serve.core.messages import TokenLogprobs
from lora_serve.core.request import SamplingParams
from lora_serve.model.runner import model_runner
from lora_serve.model.runner.model_runner import draw_rows
from lora_serve.model.runner.sampler import SampledToken, choose
from tests.loading import load_adapter
from tests.local_engine import LocalEngine
from tests.oracle import save_adapter, save_tiny_model

NUM_TOKENS = 24
# a head of its own: one that is the embedding too is torch's product, whose last bits depend on the number of rows
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256, "tie_word_embeddings": False}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 3},
    "all of the vocabulary": {"temperature": 1.0, "logprobs": 2},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "sampled with penalties": {"temperature": 0.9, "frequency_penalty": 0.7},
    "bias": {"temperature": 0.7, "logit_bias": ((5, 3.0), (6, -100.0))},
    "min_tokens": {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": (9, 10, 11)},
}
Guess = Callable[[list[int], int], tuple[int, ...]]  # the tokens after `start` of those that will come


def right(tokens: list[int], start: int) -> tuple[int, ...]:
    return tuple(tokens[start : start + 4])


def wrong(tokens: list[int], start: int) -> tuple[int, ...]:
    return tuple((token + 1) % 90 + 3 for token in tokens[start : start + 3])


def right_at_first(tokens: list[int], start: int) -> tuple[int, ...]:
    guess = right(tokens, start)
    return (*guess[:2], *wrong(tokens, start + 2)) if start % 3 else guess[:1]


@dataclass
class Generation:
    """One row that is generated step by step."""

    prompt: tuple[int, ...]
    sample: SampleInput
    blocks: tuple[int, ...]
    adapters: tuple[RowAdapter, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_steps: int = 0

    def row(self, sequence_id: int, draft: tuple[int, ...]) -> Row:
        params, known = self.sample.params, (*self.prompt, *self.tokens)
        start = len(known) - 1 if self.tokens else 0
        sample = replace(
            self.sample,
            num_output_tokens=len(self.tokens),
            prompt_token_ids=self.prompt if params.has_penalties else (),
            output_token_ids=tuple(self.tokens) if params.has_penalties or params.bad_words else (),
        )
        tokens = (*known[start:], *draft)
        return Row(sequence_id, tokens, start, self.blocks, self.adapters, sample, None, num_draft=len(draft))

    def take(self, output: RowOutput) -> None:
        assert output.error is None
        assert output.token_id is not None
        self.num_steps += 1
        for one in (NextToken(output.token_id, output.logprobs), *output.following):
            self.tokens.append(one.token_id)
            self.logprobs.append(one.logprobs)


def generate(engine: LocalEngine, rows: Sequence[Generation], guess: Guess | None = None) -> list[Generation]:
    """All rows to their ends, without the engine. `guess` is told what they will say."""
    wanted = [[*one.tokens] for one in rows]
    for one in rows:
        one.tokens.clear()
        one.num_steps = 0
        one.logprobs.clear()
    while left := [(i, one) for i, one in enumerate(rows) if len(one.tokens) < NUM_TOKENS]:
        drafts = [guess(wanted[i], len(one.tokens)) if guess and one.tokens else () for i, one in left]
        batch = Batch(tuple(one.row(i, draft) for (i, one), draft in zip(left, drafts, strict=True)), ())
        for (_, one), output in zip(left, engine.parts.runner.run(batch), strict=True):
            one.take(output)
    return [replace(one, tokens=one.tokens[:NUM_TOKENS], logprobs=one.logprobs[:NUM_TOKENS]) for one in rows]


@pytest.fixture(scope="module", params=["llama", "llama bfloat16", "gemma2 bfloat16", "gpt2", "llama4_text"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    architecture, _, dtype = request.param.partition(" ")
    root = tmp_path_factory.mktemp(architecture)
    shape = {"tie_word_embeddings": False, "n_positions": 256} if architecture == "gpt2" else SHAPE
    model = save_tiny_model(architecture, root / "model", **shape)
    adapters = {name: save_adapter(model, root / name, seed=i, r=3 + 4 * i) for i, name in enumerate("ab")}
    return LocalEngine(model, adapters, block_size=4, max_loras=2, kv_cache_memory="4MiB", dtype=dtype or "float32")


def adapter_in(engine: LocalEngine, index: int, name: str) -> RowAdapter:
    ref = engine.refs[name]
    slot = SlotRef(index, 1, ref.digest)
    engine.parts.runner.load_slot(slot, engine.parts.fold(load_adapter(engine._folders[name], ref, engine.parts.spec)))
    return RowAdapter(slot, scale=1.0 + index)


def generations(engine: LocalEngine, names: Sequence[str] = tuple(SAMPLING)) -> list[Generation]:
    """One row per kind of sampling, of no adapter, one, or the other."""
    adapters = ((), *((adapter_in(engine, i, name),) for i, name in enumerate("ab")))
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i, name in enumerate(names):
        prompt = torch.randint(3, 90, (7 + 3 * i,), generator=generator).tolist()
        length = len(prompt) + NUM_TOKENS + 8
        blocks = tuple(range(1 + 20 * i, 1 + 20 * i + -(-length // 4)))
        sample = SampleInput(SamplingParams(max_tokens=NUM_TOKENS, **SAMPLING[name]), 77 + i, 0, (2,))
        rows.append(Generation(tuple(prompt), sample, blocks, adapters[i % 3]))
    return rows


@pytest.mark.crossed
@pytest.mark.parametrize("guess", [right, wrong, right_at_first])
def test_tokens_and_numbers_of_a_row_do_not_depend_on_its_drafts(engine: LocalEngine, guess: Guess) -> None:
    rows = generations(engine)
    alone = generate(engine, rows)
    drafted = generate(engine, rows, guess)
    for name, one, other in zip(SAMPLING, alone, drafted, strict=True):
        assert other.tokens == one.tokens, name
        if is_to_the_bit(engine):
            assert other.logprobs == one.logprobs, name
        assert (other.num_steps < one.num_steps) == (guess is not wrong), name


def is_to_the_bit(engine: LocalEngine) -> bool:
    """True if the layers are fused, whose numbers do not depend on how many tokens run together."""
    return engine.parts.spec.architecture not in {"GPT2LMHeadModel", "Llama4ForCausalLM"}


def test_row_that_has_no_numbers_after_a_guess_ends_only_once_the_guess_was_right(engine: LocalEngine) -> None:
    """Its adapter begins to act, and fails, at the second guess, which spoils what stands before it."""
    (one,) = generations(engine, ["greedy"])
    (wanted,) = generate(engine, [one])
    known, start = len(one.prompt) + 10, len(one.prompt) + 9
    poisoned = replace(adapter_in(engine, 1, "b"), start=known + 1)
    slots = engine.parts.runner._slots
    for index in slots.module_index.values():
        delta = slots.delta(index, 1)
        if delta is not None:
            delta.a.fill_(float("nan"))
    one.adapters, one.tokens = (poisoned,), wanted.tokens[:10]

    def run(draft: Sequence[int]) -> RowOutput:
        (output,) = engine.parts.runner.run(Batch((one.row(0, tuple(draft)),), ()))
        return output

    assert one.row(0, ()).start == start
    right_guess = wanted.tokens[10:14]
    for draft in (right_guess, [(token + 1) % 90 + 3 for token in right_guess]):
        assert run(draft) == RowOutput(0, right_guess[0])
    row = one.row(0, tuple(right_guess))
    known_tokens = (*one.prompt, *one.tokens)[start - 2 : start]
    again = replace(row, sequence_id=1, token_ids=known_tokens + row.token_ids, start=start - 2)
    found = engine.parts.runner.run(Batch((again, row), ()))  # of several tokens without its guesses, too
    assert found == [RowOutput(1, right_guess[0]), RowOutput(0, right_guess[0])]
    one.adapters = (replace(poisoned, start=start),)
    assert isinstance(run(right_guess).error, NumericalError)


def drafted(sequence_id: int, draft: tuple[int, ...], **params: Any) -> Row:
    sample = SampleInput(SamplingParams(**params), 1000 + sequence_id, 0, (2,))
    return Row(sequence_id, (5, *draft), 0, (), (), sample, None, num_draft=len(draft))


@pytest.mark.parametrize("all_at_once", [True, False])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 1}, {"temperature": 2.0}])
def test_a_device_is_waited_for_once_and_elsewhere_little_is_drawn_for_nothing(
    all_at_once: bool, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(4 * 30, 50, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(-1).tolist()
    rows = [(drafted(i, tuple(best[4 * i : 4 * i + 3]), **params), 4 * i) for i in range(30)]
    found = draw_rows(logits, rows, all_at_once=not all_at_once)
    batches: list[int] = []

    def counted(logits: torch.Tensor, rows: Sequence[SampleInput]) -> list[SampledToken]:
        batches.append(len(rows))
        return choose(logits, rows)

    monkeypatch.setattr(model_runner, "choose", counted)
    assert draw_rows(logits, rows, all_at_once=all_at_once) == found
    num_tokens = sum(1 + len(output.following) for output in found.values())
    is_at_once = all_at_once or params == {"temperature": 0.0}
    assert (len(batches) == 1) == is_at_once
    assert sum(batches) == (120 if is_at_once else num_tokens)
    if not params["temperature"]:
        assert [[output.token_id, *(one.token_id for one in output.following)] for output in found.values()] == [
            best[4 * i : 4 * i + 4] for i in range(30)
        ]


@pytest.mark.many(1)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}])
def test_tokens_have_the_model_s_distribution_whatever_was_guessed(params: dict[str, Any]) -> None:
    """Chi-squared over both positions, for a likely guess and an unlikely one."""
    num, vocabulary = 20_000, 12
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(4)) * 1.5
    warpers = [TemperatureLogitsWarper(params.get("temperature", 1.0))]
    warpers += [TopPLogitsWarper(params["top_p"])] if "top_p" in params else []
    warpers += [TopKLogitsWarper(params["top_k"])] if "top_k" in params else []
    wanted = torch.softmax(LogitsProcessorList(warpers)(None, logits.clone()), -1)
    for guess in (int(logits[0].argmax()), int(logits[0].topk(4).indices[3])):
        rows = [(drafted(i, (guess,), **params), 2 * i) for i in range(num)]
        found = draw_rows(logits.repeat(num, 1), rows, all_at_once=False).values()
        first = [output.token_id for output in found]
        second = [one.token_id for output in found for one in output.following]
        assert len(second) == first.count(guess) > 500
        for tokens, probabilities in zip((first, second), wanted, strict=True):
            counts = torch.bincount(torch.tensor(tokens), minlength=vocabulary)
            possible = probabilities > 0
            assert counts[~possible].sum() == 0
            expected = probabilities[possible] * len(tokens)
            statistic = ((counts[possible] - expected) ** 2 / expected).sum()
            freedom = int(possible.sum()) - 1
            assert statistic < freedom + 4 * math.sqrt(2 * freedom)
