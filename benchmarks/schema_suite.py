"""The official JSON Schema test suite against the schemas' way to a grammar: supported, refused in words, or wrong.

Wrong: a grammar lets through an instance that the suite calls invalid. The suite lies in the sdist of `jsonschema`:

    pip download jsonschema==4.26.0 --no-binary jsonschema --no-deps && tar xzf jsonschema-4.26.0.tar.gz
    python -m benchmarks.schema_suite jsonschema-4.26.0/json/tests --out benchmarks/results/schema-suite.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars import Constraint, ConstraintKind
from lora_serve.text.grammars.checking import GrammarCompiler, checked_text

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes((byte,)) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@dataclass
class Draft:
    """The counts of one draft."""

    name: str
    schemas: int = 0
    supported: int = 0
    instances: int = 0  # of supported schemas
    never_given: int = 0  # valid, and not let through
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    slowest_ms: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    compiler = GrammarCompiler({}, 0, GrammarConfig())
    found = [run(name, flags.tests / name, tokenizer, compiler) for name in DRAFTS]
    for draft in found:
        share = 100 * draft.supported / max(1, draft.schemas)
        print(
            f"{draft.name}: {draft.schemas} schemas, {draft.supported} supported ({share:.0f} %), "
            f"{draft.refused.total()} refused, {len(draft.wrong)} wrong of {draft.instances} instances, "
            f"{draft.never_given} valid ones never given; slowest {draft.slowest_ms:.0f} ms"
        )
    if flags.out is not None:
        flags.out.write_text(json.dumps([vars(draft) for draft in found], indent=1) + "\n")
    sys.exit(any(draft.wrong or not draft.schemas for draft in found))


def run(name: str, folder: Path, tokenizer: LLTokenizer, compiler: GrammarCompiler) -> Draft:
    """All schemas of one draft."""
    draft = Draft(name)
    for place, case in cases(folder):
        draft.schemas += 1
        began = time.perf_counter()
        try:
            constraint = Constraint(ConstraintKind.JSON, case["schema"], "schema")
            grammar = checked_text(constraint, compiler, GrammarConfig())
        except InvalidRequestError as error:
            draft.refused[str(error).partition(": ")[2][:100]] += 1
            continue
        finally:
            draft.slowest_ms = max(draft.slowest_ms, 1000 * (time.perf_counter() - began))
        draft.supported += 1
        for test in case["tests"]:
            draft.instances += 1
            is_allowed = any(allows(tokenizer, grammar, text) for text in spellings(test["data"]))
            if is_allowed and not test["valid"]:
                draft.wrong.append(f"{place}: {case['description']}: {test['description']}")
            draft.never_given += test["valid"] and not is_allowed
    return draft


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(folder.rglob("*.json")):
        for case in json.loads(file.read_text()):
            yield str(file.relative_to(folder)), case


def spellings(value: Any) -> Iterator[str]:
    yield json.dumps(value)
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def allows(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    given = list(text.encode())
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()


if __name__ == "__main__":
    main()
