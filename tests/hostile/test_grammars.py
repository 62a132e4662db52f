"""Schemas, regexes and grammars made to cost much: answered or refused within seconds, with the event loop free.

No memory is kept of them.
"""

from __future__ import annotations

import gc
import json
import os
import time
from typing import Any

import pytest

from benchmarks.start import memory_of
from lora_serve.text.grammars import ConstraintKind
from tests.canary.house import House
from tests.hostile.sending import Reply, assert_refused, post
from tests.hostile.test_loop_lag import measured
from tests.text.grammars.hostile import HOSTILE
from tests.tiers import mostly_nightly

NAMES = {
    ConstraintKind.JSON: "guided_json",
    ConstraintKind.REGEX: "guided_regex",
    ConstraintKind.GRAMMAR: "guided_grammar",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}
SECONDS = 2.0
LARGE: dict[str, dict[str, Any]] = {
    "schema of 10 MB": {"guided_json": {"enum": [f"value {i}" for i in range(90_000)], "title": "x" * 9_000_000}},
    "text of a schema of 10 MB": {"guided_json": '{"enum": ["' + "x" * 10_000_000 + '"]}'},
    "regex of 10 MB": {"guided_regex": "a?" * 5_000_000},
    "grammar of 10 MB": {"guided_grammar": 'root ::= "a"\n' + "# comment\n" * 1_000_000},
    "choices of 10 MB": {"guided_choice": [f"choice number {i}" for i in range(90_000)] + ["x" * 8_000_000]},
    "tag of 10 MB": {"structural_tag": {"structures": [{"begin": "x" * 10_000_000}]}},
    "enum within the limit": {"guided_json": {"enum": [f"v{i}" for i in range(20_000)]}},
    "choices within the limit": {"guided_choice": [f"choice {i}" for i in range(15_000)]},
    "nested quantifiers": {"guided_regex": "((a+)+)+b"},
    "large repeats": {"guided_regex": "(a{1,100000}){1,100000}"},
    "large minItems": {"guided_json": {"type": "array", "minItems": 10**9, "items": {}}},
    "large minLength": {"guided_json": {"type": "string", "minLength": 10**9}},
    "remote reference": {"guided_json": {"$ref": "http://localhost:1/schema"}},
    "reference to itself": {"guided_json": {"$ref": "#"}},
}
BODIES = LARGE | {name: {NAMES[kind]: source} for name, (kind, source) in HOSTILE.items()}
BY_DEFAULT = ("schema of 10 MB", "regex of 10 MB", "chain through properties", "enum within the limit", "large repeats")


@pytest.mark.parametrize("name", mostly_nightly(BODIES, *BY_DEFAULT))
def test_costly_grammar_is_answered_or_refused_soon_and_holds_up_nobody(house: House, name: str) -> None:
    raw = json.dumps({"prompt": "x", "max_tokens": 1, **BODIES[name]}).encode()

    def soon() -> Reply:
        began = time.monotonic()
        reply = post(house, "/v1/completions", raw)
        assert time.monotonic() - began < SECONDS
        return reply

    reply = measured(house, soon)
    assert_refused(house, reply, (200, 400))
    assert len(reply.body) < 4096


def test_no_memory_is_kept(house: House) -> None:
    """The memory of checked grammars is bounded, and that of refused ones is none."""

    def ask(number: int) -> None:
        wrong = {"type": "object", "properties": {f"p{i}": {"not": {"const": number}} for i in range(500)}}
        assert_refused(house, post(house, "/v1/completions", {"prompt": "x", "guided_json": wrong}), 400)

    for number in range(20):
        ask(number)
    gc.collect()
    before = memory_of(os.getpid(), "VmRSS")
    for number in range(20, 100):
        ask(number)
    gc.collect()
    assert memory_of(os.getpid(), "VmRSS") - before < 24 * 2**20
