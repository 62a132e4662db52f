"""A model of random weights writes what grammars allow, beside rows that have none; what is forced is not sampled."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

import lora_serve
from lora_serve.core.adapter import AddedToken
from lora_serve.core.messages import TokenLogprobs
from lora_serve.core.request import FinishReason, InferenceRequest, TokenGrammar
from lora_serve.text.grammars.matcher import GrammarConstraint
from lora_serve.text.tokenizer import TextModel
from tests.local_engine import Answer, LocalEngine
from tests.model.test_resized_vocabulary import Resized, save_resized
from tests.oracle import load_fresh, save_adapter, save_tiny_model
from tests.peft_layers import read_layers
from tests.tiers import by_tier

DEMO = Path(lora_serve.__file__).parent / "demo_data" / "model"
NAME = {"type": "string", "maxLength": 6}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"customer_name": NAME, "customer_number": {"type": "integer", "maximum": 99}},
     "required": ["customer_name", "customer_number"], "additionalProperties": False},
    {"enum": ["alpha", "alphabet", 17, None, True]},
    {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"kind": {"const": "a long constant that nobody has to sample"}},
     "required": ["kind"], "additionalProperties": False},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"],
                                     "additionalProperties": False}]},
    {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "maxItems": 2},
    {"type": "string", "pattern": "^[a-f]{2,5}-[0-9]{3}$"},
    {"enum": ["Köln <|user|> x", "the <|end|> of e\u0301"]},  # control tokens as text, and a letter of two parts
)  # fmt: skip


def schema_grammar(schema: dict[str, Any]) -> TokenGrammar:
    text: str = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return TokenGrammar(text)


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load(str(DEMO))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(
        "llama", tmp_path_factory.mktemp("model"), vocab_size=2048, eos_token_id=[2, 3], max_position_embeddings=512
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def opened(folder: Path, **settings: Any) -> LocalEngine:
    adapter = folder / "adapter"
    if not adapter.exists():
        save_adapter(folder, adapter)
    limits = {"kv_cache_memory": "4MiB", "max_loras": 1, "block_size": 4}
    return LocalEngine(folder, {"a": adapter}, with_grammars=True, **{**limits, **settings})


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LocalEngine]:
    engine = opened(folder)
    yield engine
    engine.close()


def mixed(engine: LocalEngine, **sampling: Any) -> tuple[list[InferenceRequest], list[InferenceRequest]]:
    """Rows without a grammar, and one with each schema; every other one with an adapter."""
    ways = {"temperature": 1.0, "max_tokens": 200, **sampling}
    short = {**ways, "max_tokens": 30}
    plain = [engine.request([9, i + 10, 7], "a" if i % 2 else None, seed=i, **short) for i in range(4)]
    held = [
        replace(engine.request([8, i + 10], "a" if i % 2 else None, seed=i, **ways), grammar=schema_grammar(schema))
        for i, schema in enumerate(SCHEMAS)
    ]
    return plain, held


def check(text: TextModel, answers: list[Answer]) -> None:
    for schema, answer in zip(SCHEMAS, answers, strict=True):
        assert answer.error is None, answer.error
        assert answer.reason is FinishReason.STOP
        written = text.decode([t for t in answer.token_ids if t != answer.stop_token_id], skip_special_tokens=False)
        jsonschema.validate(json.loads(written), schema)


@pytest.mark.many(2)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 40}, {"repetition_penalty": 1.2, "min_tokens": 5}]
)
def test_every_answer_obeys_its_schema_and_no_neighbour_s_token_changes(
    engine: LocalEngine, text: TextModel, sampling: dict[str, Any]
) -> None:
    plain, held = mixed(engine, **sampling)
    alone = [engine.run([replace(request, request_id=f"{request.request_id} alone")])[0].token_ids for request in plain]
    answers = engine.run(plain + held)
    assert [answer.token_ids for answer in answers[:4]] == alone
    check(text, answers[4:])
    again = [engine.run([replace(request, request_id=f"{request.request_id} alone")])[0].token_ids for request in held]
    assert [answer.token_ids for answer in answers[4:]] == again


def test_answers_are_the_same_in_small_chunks_and_after_preemptions(folder: Path, text: TextModel) -> None:
    """Little memory and 16 tokens a step: rows are preempted, and forced tokens cut into pieces."""
    short = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "max_model_len": 80}
    roomy, tight = opened(folder), opened(folder, kv_cache_memory="22KiB", **short)
    expected, answers = (
        engine.run([*plain, *held]) for engine in (roomy, tight) for plain, held in [mixed(engine, max_tokens=75)]
    )
    assert tight.engine.stats().num_preemptions > 0
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    check(text, answers[4:])
    roomy.close()
    tight.close()


def test_forced_tokens_are_those_that_sampling_gives_where_spelling_is_no_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token per letter may come, so a text has one spelling; the numbers differ from those of single steps by
    nothing.
    """
    lark: str = LLMatcher.grammar_from_lark(r"start: /[ab]/ <[3]> <[70]> <[71]> <[72]> /[ab]/ <[90]> <[91]> /[ab]/")
    engine = opened(folder)
    request = engine.request([8, 9], temperature=1.0, seed=5, max_tokens=50, logprobs=2)
    request = replace(request, grammar=TokenGrammar(lark))
    (forced,) = engine.run([request])
    num_steps = engine.engine.stats().num_steps
    assert engine.engine.stats().num_forced > 0
    monkeypatch.setattr(GrammarConstraint, "forced", lambda self: ())
    (sampled,) = engine.run([replace(request, request_id="one by one")])
    assert engine.engine.stats().num_steps - num_steps > num_steps
    assert forced.token_ids == sampled.token_ids
    assert forced.reason == sampled.reason
    free = [i for i, token in enumerate(forced.token_ids) if token not in (3, 70, 71, 72, 90, 91)]
    assert [forced.logprobs[i] for i in free] == [sampled.logprobs[i] for i in free]
    assert forced.logprobs[1] == sampled.logprobs[1] == TokenLogprobs(3, 0.0, 1, ((3, 0.0),))
    engine.close()


def test_regex_and_log_probabilities_of_what_was_allowed(engine: LocalEngine, text: TextModel) -> None:
    pattern = "(yes|no|perhaps)"
    request = engine.request([9, 9], temperature=1.0, seed=1, max_tokens=20, logprobs=20)
    (answer,) = engine.run([replace(request, grammar=TokenGrammar(LLMatcher.grammar_from_regex(pattern)))])
    assert re.fullmatch(pattern, text.decode(answer.token_ids))
    (first, *_) = answer.logprobs
    assert first is not None
    assert all("yes no perhaps".find(text.token_text(token)) >= 0 for token, _ in first.top)
    assert all(logprob > -1e30 for _, logprob in first.top)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose answers come to an end also if they are written at random."""
    words = st.text("abcxyz _-", min_size=1, max_size=8)
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 60))
    plain = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "format": "date"}]),
        st.lists(st.one_of(words, st.integers(-99, 99), st.none(), st.booleans()), min_size=1, max_size=5).map(
            lambda values: {"enum": values}
        ),
        words.map(lambda word: {"const": word}),
        st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
        st.sampled_from(["^[a-c]{1,4}$", "^(x|yz)-[0-9]{2}$"]).map(lambda p: {"type": "string", "pattern": p}),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
    )
    return st.recursive(
        plain, lambda inner: st.one_of(_arrays(inner), _objects(words, inner), _choices(inner)), max_leaves=5
    )


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 1))
    return st.builds(
        lambda items, size: {"type": "array", "items": items, "minItems": size[0], "maxItems": sum(size)}, inner, sizes
    )


def _objects(words: st.SearchStrategy[str], inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def schema(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        required = list(properties)[:num_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(schema, st.dictionaries(words, inner, min_size=1, max_size=3), st.integers(0, 3))


def _choices(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


@settings(max_examples=by_tier(6, 400))
@given(wanted=st.lists(schemas(), min_size=3, max_size=8), seed=st.integers(0, 2**31))
def test_any_schemas_are_obeyed_side_by_side(
    engine: LocalEngine, text: TextModel, wanted: list[dict[str, Any]], seed: int
) -> None:
    """Every finished answer validates, and the rows beside them write what they write alone."""
    ways = {"temperature": 1.0, "max_tokens": 120}
    plain = [engine.request([9, 10 + i], seed=seed, **{**ways, "max_tokens": 12}) for i in range(2)]
    alone = engine.run([replace(request, request_id=f"{request.request_id} alone") for request in plain])
    held = [
        replace(
            engine.request([8, 20 + i], "a" if i % 2 else None, seed=seed + i, **ways), grammar=schema_grammar(schema)
        )
        for i, schema in enumerate(wanted)
    ]
    answers = engine.run([plain[0], *held, plain[1]])
    assert [answers[0].token_ids, answers[-1].token_ids] == [answer.token_ids for answer in alone]
    for schema, answer in zip(wanted, answers[1:-1], strict=True):
        assert answer.error is None, (schema, answer.error)
        if answer.reason is FinishReason.STOP:
            written = text.decode([t for t in answer.token_ids if t != answer.stop_token_id], skip_special_tokens=False)
            jsonschema.validate(json.loads(written), schema)
    assert sum(answer.reason is FinishReason.STOP for answer in answers[1:-1]) > len(wanted) // 2


def test_row_of_an_adapter_with_more_tokens_writes_them_where_its_grammar_says(
    folder: Path, text: TextModel, tmp_path: Path
) -> None:
    """Beside rows of the base's vocabulary, whose masks are shorter."""
    layers = read_layers(load_fresh(folder))
    kind = Resized(2053, {"modules_to_save": [layers.embedding, layers.head]})
    engine = LocalEngine(
        folder, {"grown": save_resized(folder, tmp_path / "grown", kind, 1)}, with_grammars=True,
        kv_cache_memory="4MiB", max_loras=1, block_size=4,
    )  # fmt: skip
    added = tuple(AddedToken(2048 + i, f"<tool{i}>", is_special=True) for i in range(5))
    lark: str = LLMatcher.grammar_from_lark("start: (<[2049]> | <[2052]>) /[ab]{2}/ <[2048]>")
    ways = {"temperature": 1.0, "max_tokens": 20, "seed": 4}
    plain, base = engine.request([9, 9], **ways), engine.request([9, 8], **ways)
    grown = replace(engine.request([9, 7], "grown", **ways), grammar=TokenGrammar(lark, added))
    held = replace(base, grammar=TokenGrammar(LLMatcher.grammar_from_regex("[ab]{4}")))
    (alone,) = engine.run([replace(plain, request_id="alone")])
    beside, first, second = engine.run([plain, grown, held])
    assert beside.token_ids == alone.token_ids
    assert first.error is None
    written = text.with_added(added).decode(first.token_ids, skip_special_tokens=False)
    assert re.fullmatch("<tool[14]>[ab]{2}<tool0>", written)
    assert re.fullmatch("[ab]{4}", text.decode(second.token_ids))
    engine.close()
