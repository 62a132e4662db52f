"""A model of random weights under grammars that Hypothesis draws, in one batch with rows that have none.

Every answer that ends is what its caller asked for, and no neighbour changes by a token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import regex  # of llguidance's Unicode: Python's `re` may know fewer digits
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import lora_serve
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import FinishReason, TokenGrammar
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars import Constraint, ConstraintKind, JsonStyle
from lora_serve.text.grammars.checking import GrammarCompiler, checked_text
from lora_serve.text.tokenizer import TextModel
from tests.local_engine import LocalEngine
from tests.oracle import save_tiny_model
from tests.text.grammars.schemas import REGEXES, SCHEMAS, TEXTS
from tests.tiers import by_tier

DEMO = Path(lora_serve.__file__).parent / "demo_data" / "model"
COMPILER = GrammarCompiler({}, 0, GrammarConfig())
FORMATS = Draft202012Validator.FORMAT_CHECKER
ROWS = 6
ASKED = st.lists(
    st.one_of(
        st.tuples(st.just(ConstraintKind.JSON), SCHEMAS),
        st.tuples(st.just(ConstraintKind.JSON), SCHEMAS),
        st.tuples(st.just(ConstraintKind.REGEX), REGEXES),
        st.tuples(st.just(ConstraintKind.CHOICE), st.lists(TEXTS, min_size=1, max_size=5)),
    ),
    min_size=ROWS,
    max_size=ROWS,
)


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load(str(DEMO))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    folder = save_tiny_model(
        "llama", tmp_path_factory.mktemp("model"), vocab_size=2048, eos_token_id=[2, 3], max_position_embeddings=512
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    engine = LocalEngine(folder, with_grammars=True, kv_cache_memory="4MiB", block_size=4)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def neighbours(engine: LocalEngine) -> list[list[int]]:
    """The tokens of rows without a grammar, each alone."""
    return [engine.run([plain(engine, number)])[0].token_ids for number in range(3)]


def plain(engine: LocalEngine, number: int) -> Any:
    return engine.request([9, number + 10, 7], temperature=1.0, seed=number, max_tokens=40)


def checked(kind: ConstraintKind, source: Any) -> TokenGrammar | None:
    style = JsonStyle(any_whitespace=False)
    try:
        return TokenGrammar(checked_text(Constraint(kind, source, "field", style), COMPILER, GrammarConfig()))
    except InvalidRequestError:
        return None


def check(kind: ConstraintKind, source: Any, written: str) -> None:
    judges: dict[ConstraintKind, Callable[[], Any]] = {
        ConstraintKind.JSON: lambda: Draft202012Validator(source, format_checker=FORMATS).validate(json.loads(written)),
        ConstraintKind.REGEX: lambda: regex.fullmatch(source, written) or pytest.fail(f"{source!r}: {written!r}"),
        ConstraintKind.CHOICE: lambda: written in source or pytest.fail(f"{source!r}: {written!r}"),
    }
    judges[kind]()


@settings(max_examples=by_tier(4, 60))
@given(ASKED, st.integers(0, 2**32))
def test_every_finished_answer_is_as_asked_and_no_neighbour_changes(
    engine: LocalEngine,
    text: TextModel,
    neighbours: list[list[int]],
    asked: list[tuple[ConstraintKind, Any]],
    seed: int,
) -> None:
    held = [(kind, source, grammar) for kind, source in asked if (grammar := checked(kind, source)) is not None]
    rows = [
        replace(engine.request([8, i + 10], temperature=1.0, seed=seed + i, max_tokens=150), grammar=grammar)
        for i, (_, _, grammar) in enumerate(held)
    ]
    answers = engine.run([*(plain(engine, number) for number in range(len(neighbours))), *rows])
    assert [answer.token_ids for answer in answers[: len(neighbours)]] == neighbours
    for (kind, source, _), answer in zip(held, answers[len(neighbours) :], strict=True):
        assert answer.error is None, answer.error
        if answer.reason is FinishReason.STOP:
            ids = [token for token in answer.token_ids if token != answer.stop_token_id]
            check(kind, source, b"".join(map(text.token_bytes, ids)).decode())
