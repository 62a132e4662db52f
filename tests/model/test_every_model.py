"""Each causal type of transformers, tiny, LoRAs on every linear layer, in mixed batches against the live PEFT model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kind_matrix import EXACT
from tests.models_table import (
    BEGIN,
    DOCUMENT,
    END,
    TYPES,
    bfloat16_errors,
    kinds_refused,
    models_table,
    read_kinds,
    read_table,
    shortened,
    verdict,
)
from tests.tiers import mostly_nightly

# A router of its own class; a norm without a weight; a router whose weight is cast before it is used; sinks; values
# narrower than keys; a class that reads images.
OF_THE_DEFAULT_TIER = ("phimoe", "gpt_oss", "deepseek_v3", "qwen3_vl")

EXACT_TYPES = tuple(name for name, verdict in read_table(DOCUMENT.read_text()).items() if verdict == EXACT)
OF_ALL_KINDS_BY_DAY = ("deepseek_v3", "qwen3_vl")  # experts beside layers that are not; parts that no text runs through


@pytest.mark.parametrize("model_type", mostly_nightly(TYPES, *OF_THE_DEFAULT_TIER))
def test_page_says_what_a_run_finds(model_type: str, tmp_path: Path) -> None:
    found = verdict(model_type, tmp_path)
    assert not found.startswith("WRONG"), found
    assert shortened(found) == read_table(DOCUMENT.read_text())[model_type]


@pytest.mark.parametrize("model_type", mostly_nightly(EXACT_TYPES, *OF_ALL_KINDS_BY_DAY))
def test_page_says_which_kinds_of_adapters_are_refused(model_type: str, tmp_path: Path) -> None:
    assert kinds_refused(model_type, tmp_path) == read_kinds(DOCUMENT.read_text()).get(model_type, {})


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [name for name in EXACT_TYPES if name != "muse_spark"])  # it is large
def test_in_bfloat16_answers_are_as_near_to_the_truth_as_pefts(model_type: str, tmp_path: Path) -> None:
    for ours, theirs in bfloat16_errors(model_type, tmp_path).values():
        assert ours.median() <= 1.5 * theirs.median()
        assert ours.mean() <= 2.5 * theirs.mean()  # a few tokens that a rounding sends to another expert weigh much


def test_page_names_every_type_and_none_is_wrong() -> None:
    told = read_table(DOCUMENT.read_text())
    assert sorted(told) == list(TYPES)
    assert {each.partition(": ")[0] for each in told.values()} == {EXACT, "refused", "not built"}
    assert [name for name in OF_THE_DEFAULT_TIER if told[name] != EXACT] == []


def test_written_table_is_read_back_as_it_was() -> None:
    found = {"a": EXACT, "b-c": "refused: XForCausalLM cannot be served: s_aux; and more", "d": EXACT}
    short = {name: shortened(each) for name, each in found.items()}
    assert short["b-c"] == "refused: s_aux"
    assert read_table(f"| no table |\n{BEGIN}\n\n{models_table(short)}\n\n{END}\n") == short
