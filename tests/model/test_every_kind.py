"""Every architecture and every kind of PEFT adapter, all kinds mixed in one batch, against PEFT one at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.adapters_table import DOCUMENT, adapters_table, read_methods, read_table, shortened, with_table
from tests.kind_matrix import BASE, verdicts
from tests.oracle import ARCHITECTURES
from tests.peft_kinds import KINDS
from tests.peft_methods import method_names, method_verdicts
from tests.tiers import mostly_nightly

BY_DAY = ("mixtral", "gpt2")  # each kind is exact on one of them: experts and what Llama has; biases, Conv1D, fused QKV
# Refused on purpose: (architecture, kind), or kind for all of them, and a pattern of the reason.
EXPECTED_REFUSALS: Mapping[str | tuple[str, str], str] = {
    # PEFT adds a pattern for the fused weight, which sorts before the one that it applied while it trained.
    ("deepseek_v3", "rank_and_alpha_pattern"): "adapter_config.json says rank 32, and the tensors have rank 28",
}


@pytest.fixture(scope="module", params=mostly_nightly(ARCHITECTURES, *BY_DAY))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Mapping[str, str]]:
    """An architecture and its verdicts by kind."""
    return request.param, verdicts(request.param, tmp_path_factory.mktemp(request.param))


def complaints(architecture: str, by_kind: Mapping[str, str]) -> list[str]:
    """Verdicts that are neither exact nor excused."""
    return [f"{kind}: {v}" for kind, v in by_kind.items() if not _is_good(architecture, kind, v)]


def _is_good(architecture: str, kind: str, verdict: str) -> bool:
    pattern = EXPECTED_REFUSALS.get((architecture, kind), EXPECTED_REFUSALS.get(kind))
    if verdict.startswith("refused: "):
        return pattern is not None and re.search(pattern, verdict) is not None
    return verdict.startswith("not applicable: ") or (verdict == "exact" and pattern is None)


def test_every_kind_in_one_mixed_batch_equals_peft_alone(found: tuple[str, Mapping[str, str]]) -> None:
    assert complaints(*found) == []


def test_table_in_the_documentation_says_what_the_run_found(found: tuple[str, Mapping[str, str]]) -> None:
    architecture, by_kind = found
    told = read_table(DOCUMENT.read_text())[architecture]
    assert told == {kind: shortened(verdict) for kind, verdict in by_kind.items()}


@pytest.mark.nightly
def test_table_of_pefts_methods_says_what_a_run_finds(tmp_path: Path) -> None:
    found = method_verdicts(tmp_path)
    assert [name for name, verdict in found.items() if verdict.startswith("WRONG")] == []
    assert read_methods(DOCUMENT.read_text()) == {name: shortened(verdict) for name, verdict in found.items()}


def test_table_of_pefts_methods_names_each_of_them() -> None:
    assert list(read_methods(DOCUMENT.read_text())) == method_names()


def test_table_names_every_architecture_and_kind_and_nothing_else() -> None:
    told = read_table(DOCUMENT.read_text())
    assert list(told) == list(ARCHITECTURES)
    assert all(list(by_kind) == [BASE, *KINDS] for by_kind in told.values())


def test_every_kind_is_exact_on_an_architecture_of_the_default_tier() -> None:
    told = read_table(DOCUMENT.read_text())
    assert [kind for kind in KINDS if all(told[name][kind] != "exact" for name in BY_DAY)] == []


def test_written_table_is_read_back_as_it_was() -> None:
    found = {
        "llama": {"plain": "exact", "dora": "refused: not yet (got [1]); nor ever", "ia3": "not applicable: none here"},
        "gpt2": {"plain": "WRONG: after 3 tokens: token 0 is 4", "dora": "refused: not yet", "ia3": "exact"},
    }
    document = with_table("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter", adapters_table(found))
    assert document.startswith("before\n")
    assert document.endswith("\nafter")
    assert "old" not in document
    told = read_table(document)
    assert told["gpt2"] == found["gpt2"]
    assert told["llama"] == {**found["llama"], "dora": "refused: not yet"}


@pytest.mark.parametrize("verdict", ["WRONG: token 0 is 4", "refused: for no good reason"])
def test_a_verdict_that_is_not_excused_fails_the_matrix(verdict: str) -> None:
    assert complaints("llama", {"base": "exact", "plain": verdict, "ia3": "not applicable: none"}) == [
        f"plain: {verdict}"
    ]


@pytest.mark.parametrize(
    ("verdict", "is_good"), [("refused: error 0.1", True), ("refused: unknown key", False), ("exact", False)]
)
def test_a_refusal_is_excused_by_its_reason_only_and_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, verdict: str, is_good: bool
) -> None:
    monkeypatch.setitem(EXPECTED_REFUSALS, ("gpt2", "vera"), r"error \d")
    assert (complaints("gpt2", {"vera": verdict}) == []) == is_good
    assert complaints("llama", {"vera": "exact"}) == []
