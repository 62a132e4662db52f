"""What grammars cost: 16 rows with 16 different schemas against none, forced tokens, and a schema seen first.

    python -m benchmarks.structured_output [--shape 135m] [--rounds 5] [--tokens 48] [--clock wall] [--out FILE.json]

The real engine in this process, no HTTP, weights of bfloat16's random shape with a byte-level tokenizer of 49152 tokens
that is trained once on Python's own library. The cases take turns, so that a busy machine slows all of them. Ratios are
medians over the rounds. `inter_token`: rows whose schemas leave every token open, so that each step has as many tokens
with grammars as without. `waited`: the part of it that steps waited for masks after the forward pass. `long_keys`: one
row that writes JSON with long keys, tokens forced against all of them sampled. `first_token`: one row alone, with a
schema of 1 kB that nobody has asked for yet, against none.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import statistics
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.alternating import CLOCK_HELP, CLOCKS, Clock, median_ratio, time_alternating
from benchmarks.checkpoints import SHAPES, make_checkpoints
from benchmarks.report import machine
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.constraints import GrammarCompiled
from lora_serve.core.messages import FinishEvent, TokenEvent
from lora_serve.core.request import InferenceRequest, SamplingParams, TokenGrammar
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import build_engine
from lora_serve.model.build import build_model
from lora_serve.text.grammars.matcher import GrammarConstraint, GrammarConstraints
from lora_serve.text.grammars.vocabulary import Vocabularies
from lora_serve.text.tokenizer import TextModel

NUM_ROWS = 16
PROMPT_TOKENS = 32
TRAINING_FILES = 900  # of Python's library
Schema = dict[str, Any]


class GrammarEngine:
    """Runs requests to their ends, and waits for their grammars as the engine's loop does."""

    def __init__(self, model: Path) -> None:
        settings = Settings(model=str(model), max_num_seqs=NUM_ROWS, max_loras=1, enable_prefix_caching=False)
        slices = settings.part(EngineConfig), settings.part(AdapterConfig)
        parts = build_model(settings.part(ModelConfig), slices[0], 1)
        self._mail: queue.SimpleQueue[GrammarCompiled] = queue.SimpleQueue()
        vocabularies = Vocabularies(lambda: TextModel.load(str(model)), parts.spec.vocab_size, parts.spec.eos_token_ids)
        self.constraints = GrammarConstraints(vocabularies, slices[0].grammars, self._mail.put)
        self._engine = build_engine(
            parts.runner, parts.spec, parts.num_blocks, *slices, lambda ref: None, constraints=self.constraints
        )
        self._num_requests = 0

    def request(self, schema: Schema | None, max_tokens: int, seed: int) -> InferenceRequest:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=schema is None, seed=seed)
        prompt = tuple((seed * 97 + place * 13) % 40_000 + 300 for place in range(PROMPT_TOKENS))
        return InferenceRequest(
            f"r{self._num_requests}", prompt, sampling, grammar=None if schema is None else grammar_of(schema)
        )

    def run(self, requests: Sequence[InferenceRequest], until_first: bool = False) -> list[int]:
        """The tokens of all answers; or only until the first token."""
        tokens: list[int] = []
        scheduler = self._engine.scheduler
        for request in requests:
            scheduler.add(replace(request, arrival_time=time.monotonic()))
        while scheduler.running or scheduler.waiting:
            did_run, events = self._engine.step()
            tokens += [event.token_id for event in events if isinstance(event, TokenEvent)]
            if until_first and tokens:
                for request in requests:
                    scheduler.abort(request.request_id)
                break
            if not did_run and not any(isinstance(event, FinishEvent) for event in events):
                self._engine.grammar_compiled(self._mail.get())
            while not self._mail.empty():
                self._engine.grammar_compiled(self._mail.get())
        return tokens


def grammar_of(schema: Schema) -> TokenGrammar:
    return TokenGrammar(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))


def open_schema(number: int) -> Schema:
    """An object whose text leaves a choice at every token for as long as anybody measures."""
    word = {"type": "string", "pattern": f"^[a-z{number} ,.]{{2000,}}$"}
    return {
        "type": "object",
        "properties": {f"k{number}": {"anyOf": [word, {"type": "array", "items": word, "minItems": 3}]}},
        "required": [f"k{number}"],
        "additionalProperties": False,
    }


def long_schema(number: int, num_keys: int = 8) -> Schema:
    """Long keys with short values; about 1 kB with 8 of them."""
    keys = [f"customer_relationship_attribute_number_{number}_{key}_of_the_account" for key in range(num_keys)]
    values: list[Schema] = [{"enum": ["yes", "no"]}, {"type": "integer", "minimum": 0, "maximum": 9}]
    return {
        "type": "object",
        "properties": {key: values[place % 2] for place, key in enumerate(keys)},
        "required": keys,
        "additionalProperties": False,
    }


def model_with_text(cache: Path, shape: str) -> Path:
    """The benchmarks' model with a tokenizer that can write JSON."""
    model, _ = make_checkpoints(cache, shape, 1, 0)
    folder = model.with_name("model-with-text")
    if not folder.exists():
        shutil.copytree(model, folder)
        train_tokenizer(folder, SHAPES[shape].vocab_size)
    return folder


def train_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts = (file.read_text(errors="ignore") for file in files[:TRAINING_FILES])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def inter_token(engine: GrammarEngine, rounds: int, num_tokens: int, clock: Clock) -> dict[str, Any]:
    schemas = {"none": [None] * NUM_ROWS, "16 schemas": [open_schema(number) for number in range(NUM_ROWS)]}
    cases = {
        name: lambda rows=rows: check_count(
            engine.run([engine.request(schema, num_tokens, seed) for seed, schema in enumerate(rows)]), num_tokens
        )
        for name, rows in schemas.items()
    }
    before = engine.constraints.stats()
    times = time_alternating(cases, rounds, clock)
    after = engine.constraints.stats()
    waited = (after.wait_seconds - before.wait_seconds) / sum(times["16 schemas"])
    return {
        "ratio": median_ratio(times["16 schemas"], times["none"]),
        "none_ms_per_token": 1000 * statistics.median(times["none"]) / num_tokens,
        "schemas_ms_per_token": 1000 * statistics.median(times["16 schemas"]) / num_tokens,
        "waited_share": waited,
        "mask_ms": 1000 * (after.mask_seconds - before.mask_seconds) / (after.num_masks - before.num_masks),
    }


def check_count(tokens: list[int], num_tokens: int) -> None:
    assert len(tokens) == NUM_ROWS * num_tokens, "a row ended early, so the cases cannot be compared"


def long_keys(engine: GrammarEngine, rounds: int, clock: Clock) -> dict[str, Any]:
    lengths: dict[str, int] = {}

    def answer(name: str, *, is_forced: bool) -> None:
        forced = GrammarConstraint.forced
        if not is_forced:
            GrammarConstraint.forced = lambda self: ()  # type: ignore[method-assign]
        try:
            lengths[name] = len(engine.run([engine.request(long_schema(0, 3), 500, 1)]))
        finally:
            GrammarConstraint.forced = forced  # type: ignore[method-assign]

    cases = {
        "forced": lambda: answer("forced", is_forced=True),
        "sampled": lambda: answer("sampled", is_forced=False),
        "none": lambda: engine.run([engine.request(None, max(lengths["forced"], 1), 1)]),
    }
    times = time_alternating(cases, rounds, clock)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "tokens": lengths,
        "seconds": medians,
        "ratio_to_sampled": median_ratio(times["forced"], times["sampled"]),
        "ratio_to_none_of_equal_length": median_ratio(times["forced"], times["none"]),
    }


def first_token(engine: GrammarEngine, rounds: int, clock: Clock) -> dict[str, Any]:
    number = 1000

    def new_schema() -> None:
        nonlocal number
        number += 1
        engine.run([engine.request(long_schema(number), 5, 1)], until_first=True)

    cases = {
        "none": lambda: engine.run([engine.request(None, 5, 1)], until_first=True),
        "new schema": new_schema,
        "known schema": lambda: engine.run([engine.request(long_schema(1), 5, 1)], until_first=True),
    }
    times = time_alternating(cases, rounds, clock)
    medians = {name: 1000 * statistics.median(found) for name, found in times.items()}
    added = [1000 * (new - none) for new, none in zip(times["new schema"], times["none"], strict=True)]
    return {"ms": medians, "added_ms": statistics.median(added), "most_added_ms": max(added)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of each row")
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/structured-output.json"))
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=CLOCK_HELP)
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    engine = GrammarEngine(model_with_text(options.cache, options.shape))
    start = time.perf_counter()
    engine.run([engine.request({"type": "null"}, 5, 0)])
    found: dict[str, Any] = {"vocabulary_seconds": time.perf_counter() - start}
    found["schema_bytes"] = len(json.dumps(long_schema(0)))
    found["inter_token"] = inter_token(engine, options.rounds, options.tokens, clock)
    print("inter_token", json.dumps(found["inter_token"], indent=1), flush=True)
    for name, measure in (("first_token", first_token), ("long_keys", long_keys)):
        found[name] = measure(engine, options.rounds, clock)
        print(name, json.dumps(found[name], indent=1), flush=True)
    facts = {
        "machine": machine(),
        "shape": options.shape,
        "rounds": options.rounds,
        "tokens": options.tokens,
        "clock": options.clock,
    }
    options.out.write_text(json.dumps(facts | found, indent=1) + "\n")
    engine.constraints.close()


if __name__ == "__main__":
    main()
