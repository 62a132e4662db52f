"""Each input that the fuzzer keeps, and each that once found a fault, through its parser again (`scripts/fuzz`)."""

from __future__ import annotations

import time

import pytest

from lora_serve.core.process import without_collections
from tests.fuzz.inputs import HERE, MAX_CORPUS, MAX_SECONDS, NAMES, bounded_memory, kept, target

FINDINGS = [(folder.name, file.name) for folder in sorted((HERE / "findings").iterdir()) for file in folder.iterdir()]


@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_taken_or_refused_in_words_within_the_bounds(name: str) -> None:
    parser, taken, refused = target(name), [], []
    for label, data in kept(parser):
        # A collection looks at all that the whole suite holds: seconds, late in it.
        with without_collections(), bounded_memory():
            began = time.process_time()
            (taken if parser(data) else refused).append(label)
            seconds = time.process_time() - began
        assert seconds < MAX_SECONDS, label
    assert taken, "the corpus no longer reaches what the parser takes"
    assert refused


@pytest.mark.parametrize(("name", "finding"), FINDINGS)
def test_what_found_a_fault_is_refused_now(name: str, finding: str) -> None:
    parser = target(name)
    if name == "tokenizer_files":  # one text is four files: the last of them is sound
        assert parser((parser.findings / finding).read_bytes())
    else:
        assert not parser((parser.findings / finding).read_bytes())


def test_corpora_are_small_and_each_belongs_to_a_target() -> None:
    files = [*(HERE / "corpus").iterdir(), *(HERE / "findings").rglob("*")]
    assert {file.stem for file in (HERE / "corpus").iterdir()} == set(NAMES)
    assert {folder.name for folder in (HERE / "findings").iterdir()} <= set(NAMES)
    assert all(file.stat().st_size <= MAX_CORPUS for file in files if file.is_file())
    assert sum(file.stat().st_size for file in files if file.is_file()) < 2**20


@pytest.mark.parametrize("name", NAMES)
def test_mutations_stay_within_their_bounds_and_are_the_same_for_one_seed(name: str) -> None:
    parser = target(name)
    if parser.mutate is None:
        return
    for _, data in list(kept(parser))[:5]:
        for seed in range(20):
            made = [parser.mutate(data, 2000, seed, lambda given, most: given[:most]) for _ in range(2)]
            assert made[0] == made[1]
            assert len(made[0]) <= 2000
