"""Schemas and grammars are checked once per tenant, beside the event loop, and what was wrong is not kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import TokenGrammar
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.server.background import caller_texts
from lora_serve.server.background.caller_texts import GrammarChecks, KnownGrammars
from lora_serve.text.grammars import Constraint, ConstraintKind
from lora_serve.text.grammars.checking import GrammarCompiler
from lora_serve.text.tokenizer import TextModel


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled, in order."""
    texts: list[str] = []
    fault = GrammarCompiler.fault

    def noted(self: GrammarCompiler, text: str) -> str:
        texts.append(text)
        return fault(self, text)

    monkeypatch.setattr(GrammarCompiler, "fault", noted)
    return texts


@pytest.fixture
def checks(text_model: TextModel) -> Iterator[GrammarChecks]:
    made = GrammarChecks(text_model, GrammarConfig())
    yield made
    made.close()


def schema(number: int) -> Constraint:
    return Constraint(ConstraintKind.JSON, {"const": number}, "guided_json")


async def test_a_tenants_second_request_finds_the_grammar_and_anothers_does_not(
    checks: GrammarChecks, compiled: list[str]
) -> None:
    first = await checks.of("acme", schema(1))
    assert await checks.of("acme", schema(1)) is first
    assert len(compiled) == 1
    assert await checks.of("umbrella", schema(1)) == first
    assert len(compiled) == 2


async def test_requests_at_once_compile_once(checks: GrammarChecks, compiled: list[str]) -> None:
    found = await asyncio.gather(*(checks.of("acme", schema(1)) for _ in range(20)))
    assert len(set(map(id, found))) == len(compiled) == 1


async def test_what_was_wrong_is_not_kept(checks: GrammarChecks, compiled: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            await checks.of("acme", Constraint(ConstraintKind.REGEX, "(", "guided_regex"))
    assert len(compiled) == 2


async def test_style_is_part_of_what_is_asked(checks: GrammarChecks) -> None:
    from lora_serve.text.grammars import JsonStyle

    narrow = Constraint(ConstraintKind.JSON, {"const": 1}, "guided_json", JsonStyle(any_whitespace=False))
    assert await checks.of("acme", narrow) != await checks.of("acme", schema(1))


async def test_costly_schemas_of_one_tenant_do_not_delay_another(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, is_over = caller_texts.checked_text, threading.Event()

    def slow(constraint: Constraint, *others: Any) -> str:
        if constraint.source["const"] >= 100:
            is_over.wait(60)
        return checked(constraint, *others)

    monkeypatch.setattr(caller_texts, "checked_text", slow)
    crowd = [asyncio.create_task(checks.of("hostile", schema(100 + number))) for number in range(5)]
    await asyncio.sleep(0.05)
    await checks.of("acme", schema(1))
    assert not any(task.done() for task in crowd)
    is_over.set()
    await asyncio.gather(*crowd)


async def test_tokens_that_an_adapter_adds_can_be_named(checks: GrammarChecks, text_model: TextModel) -> None:
    added = (AddedToken(text_model.vocab_size, "<ticket>", is_special=True),)
    grammar = Constraint(ConstraintKind.GRAMMAR, "start: <ticket>", "guided_grammar")
    assert (await checks.of("acme", grammar, added)).added_tokens == added
    with pytest.raises(InvalidRequestError):
        await checks.of("acme", grammar)


async def test_grammars_of_the_server_itself_are_checked_too(checks: GrammarChecks) -> None:
    found = await checks.of_text("acme", 'start: "<" %json {"type": "string", "format": "date"}', "tools")
    assert "format" not in found.text
    assert await checks.of_text("acme", 'start: "<" %json {"type": "string", "format": "date"}', "tools") is found
    with pytest.raises(InvalidRequestError):
        await checks.of_text("acme", 'start: %json {"not": {}}', "tools")


def test_memory_is_bounded_and_the_largest_tenant_makes_room() -> None:
    known = KnownGrammars(20_000)
    known.add("small", (b"own", ()), TokenGrammar("x"))
    for number in range(100):
        known.add("large", (bytes((number,)), ()), TokenGrammar("y" * 100))
    assert known.find("small", (b"own", ())) is not None
    assert known.find("large", (bytes((0,)), ())) is None
    assert known.find("large", (bytes((99,)), ())) is not None
    known.add("large", (b"too large", ()), TokenGrammar("z" * 20_000))
    assert known.find("large", (b"too large", ())) is None
    assert known.find("small", (b"own", ())) is not None
