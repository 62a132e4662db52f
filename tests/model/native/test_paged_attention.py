"""Paged attention in C: long contexts, any blocks and cuts, and whose numbers reach whom."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from lora_serve.model.attention.native import Backend
from lora_serve.model.kv_cache import KVCache, KVShape
from lora_serve.model.kv_format import FORMATS
from lora_serve.model.step_context import AttentionSettings
from tests.model.tiny import CPU, step_of

pytestmark = pytest.mark.usefixtures("build")
LENGTH = 101  # more than three stretches of 32 keys
Span = tuple[int, int]  # of a prompt: from position, to position


@dataclass
class Case:
    """One sequence of LENGTH tokens in scattered blocks, and one query per token."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    chunk: int | None = None
    stored: str = "auto"

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        num_blocks = -(-LENGTH // self.block_size)
        self.table = (torch.randperm(num_blocks) + 1).tolist()
        shape = replace(KVShape.alike(1, self.kv_heads, self.size, self.dtype), form=FORMATS[self.stored])
        self.cache = KVCache(shape, num_blocks + 3, self.block_size, CPU)
        at = torch.arange(LENGTH)
        self.places = torch.tensor(self.table)[at // self.block_size] * self.block_size + at % self.block_size
        self.keys, self.values = (torch.randn(LENGTH, self.kv_heads, self.size).to(self.dtype) for _ in "kv")
        self.query = torch.randn(LENGTH, self.heads, self.size).to(self.dtype)
        self.write()

    def write(self) -> None:
        self.cache.write(0, self.keys, self.values, self.places)

    def run(self, *spans: Span) -> torch.Tensor:
        """All spans as rows of one step, those of one token first; outputs end to end."""
        rows = [(first, end - first, self.table[: -(-end // self.block_size)]) for first, end in spans]
        query = torch.cat([self.query[first:end] for first, end in spans])
        scale = 1 / math.sqrt(self.size)
        settings = AttentionSettings(scale, self.window, self.softcap, self.sinks(), self.chunk)
        return Backend(self.cache)(0, query, query, query, step_of(rows), settings)

    def sinks(self) -> torch.Tensor | None:
        """One score a head."""
        return torch.linspace(-2, 5, self.heads) if self.has_sinks else None

    def expected(self) -> torch.Tensor:
        """The definition in float64."""
        return self.definition()[0]

    def is_near(self, found: torch.Tensor) -> bool:
        """As near to the definition as rounding the weights and the result to the type of numbers allows."""
        wanted, spread = self.definition()
        half_a_place = torch.finfo(self.dtype).eps / 2
        bound = 1e-5 + (1e-5 + half_a_place) * wanted.abs() + half_a_place * (1 + 4 * half_a_place) * spread
        return found.dtype == self.dtype and bool(((found.double() - wanted).abs() <= bound).all())

    def definition(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and how far from it the values are in the mean."""
        group = self.heads // self.kv_heads
        form, dtype = self.cache.shape.form, torch.float32 if self.stored != "auto" else self.dtype
        keys, values = (form.decode(form.encode(t, dtype), self.size, dtype) for t in (self.keys, self.values))
        q, k, v = (t.double().transpose(0, 1) for t in (self.query, keys, values))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.size)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        position, chunk = torch.arange(LENGTH), self.chunk or LENGTH
        distance = position[:, None] - position
        is_cut_off = position[:, None] // chunk > position // chunk
        hidden = (distance < 0) | (distance >= (self.window or LENGTH)) | is_cut_off
        scores = scores.masked_fill(hidden, -math.inf)
        if (sinks := self.sinks()) is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, LENGTH, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :LENGTH]
        out = weights @ v
        spread = (weights[..., None] * (v[:, None] - out[:, :, None]).abs()).sum(2)
        return out.transpose(0, 1), spread.transpose(0, 1)


CASES = {
    "plain": {},
    "window": {"window": 40},
    "window of one": {"window": 1},
    "window of a stretch": {"window": 32},
    "chunks": {"chunk": 40},
    "chunks of a stretch": {"chunk": 32},
    "chunks and a window": {"chunk": 33, "window": 20},
    "chunks in bfloat16": {"chunk": 30, "dtype": torch.bfloat16, "size": 32, "heads": 8},
    "soft cap": {"softcap": 1.5},
    "sinks": {"has_sinks": True, "window": 40},
    "bfloat16, sinks": {"dtype": torch.bfloat16, "size": 32, "heads": 8, "has_sinks": True},
    "blocks of 1": {"block_size": 1},
    "blocks of 3": {"block_size": 3},
    "blocks of 16": {"block_size": 16, "window": 33},
    "blocks of 64": {"block_size": 64},
    "one head": {"heads": 1, "kv_heads": 1},
    "many heads to one": {"heads": 32, "kv_heads": 1},
    "head of 20": {"size": 20},
    "head of 64": {"size": 64, "block_size": 16},
    "head of 7": {"size": 7, "heads": 3, "kv_heads": 3},
    "bfloat16": {"dtype": torch.bfloat16, "size": 32},
    "bfloat16, head of 20": {"dtype": torch.bfloat16, "size": 20, "window": 40},
    "bfloat16, head of 7": {"dtype": torch.bfloat16, "size": 7, "block_size": 1, "softcap": 1.5},
    "bfloat16, head of 64": {"dtype": torch.bfloat16, "size": 64, "block_size": 16, "heads": 6},
    "bfloat16, head of 80": {"dtype": torch.bfloat16, "size": 80, "block_size": 3, "heads": 2},
    "bfloat16, head of 96": {"dtype": torch.bfloat16, "size": 96, "block_size": 16, "heads": 2, "kv_heads": 1},
    "bfloat16, head of 256": {"dtype": torch.bfloat16, "size": 256, "heads": 2, "kv_heads": 1, "window": 33},
    "int8": {"stored": "int8", "size": 20},
    "int8, head of 7": {"stored": "int8", "size": 7, "heads": 3, "kv_heads": 3, "window": 40, "has_sinks": True},
    "int8, head of 64": {"stored": "int8", "size": 64, "block_size": 16, "softcap": 1.5},
    "int8, bfloat16": {"stored": "int8", "size": 64, "block_size": 16, "heads": 6, "dtype": torch.bfloat16},
    "int8, bfloat16, head of 7": {"stored": "int8", "size": 7, "block_size": 1, "dtype": torch.bfloat16},
    "fp8": {"stored": "fp8_e4m3", "size": 64, "chunk": 30},
    "fp8, head of 20": {"stored": "fp8_e4m3", "size": 20, "block_size": 3},
    "fp8, bfloat16": {"stored": "fp8_e4m3", "size": 80, "block_size": 16, "window": 33, "dtype": torch.bfloat16},
    "fp8, bfloat16, many": {"stored": "fp8_e4m3", "size": 256, "heads": 41, "kv_heads": 1, "dtype": torch.bfloat16},
    "bfloat16, many heads to one": {"dtype": torch.bfloat16, "size": 24, "heads": 41, "kv_heads": 1},
}


@pytest.mark.crossed
@pytest.mark.parametrize("name", CASES)
def test_long_prompt_is_the_definition(name: str) -> None:
    case = Case(**CASES[name])
    assert case.is_near(case.run((0, LENGTH)))


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, head of 20"])
def test_queries_of_float32_are_rounded_once_to_the_type_of_the_cache(name: str) -> None:
    case = Case(**CASES[name])
    exact = case.query.float() * 8.01  # scores so far apart that a query rounded after its scaling shows
    case.query = exact.bfloat16()
    rounded = case.run((0, LENGTH))
    assert case.is_near(rounded)
    case.query = exact
    assert torch.equal(case.run((0, LENGTH)), rounded)


@pytest.mark.crossed
@pytest.mark.parametrize("name", CASES)
def test_bits_of_a_token_do_not_depend_on_how_its_prompt_was_cut(name: str) -> None:
    case = Case(**CASES[name])
    whole = case.run((0, LENGTH))
    for edges in ((0, 50, LENGTH), (0, 3, 8, 31, 33, 64, 70, LENGTH), (0, 7, 96, LENGTH)):
        chunks = [case.run(span) for span in pairwise(edges)]
        assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.crossed
@pytest.mark.parametrize("name", CASES)
def test_bits_of_a_token_are_the_same_decoded_alone_beside_others_and_in_a_prompt(name: str) -> None:
    case = Case(**CASES[name])
    whole = case.run((0, LENGTH))
    positions = (0, 1, 30, 31, 32, 33, 63, 64, 99, 100)
    together = case.run(*[(p, p + 1) for p in positions], (20, 55), (0, 13))
    for i, p in enumerate(positions):
        assert torch.equal(case.run((p, p + 1))[0], whole[p])
        assert torch.equal(together[i], whole[p])
    assert torch.equal(together[10:45], whole[20:55])
    assert torch.equal(together[45:], whole[:13])


def test_query_that_is_not_a_number_reaches_its_own_token_only() -> None:
    case = Case()
    clean = case.run((0, LENGTH))
    case.query[40, 1] = math.nan
    found = case.run((0, LENGTH))
    assert found[40, 1].isnan().all()
    found[40, 1] = clean[40, 1]
    assert torch.equal(found, clean)


@pytest.mark.crossed
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["plain", "head of 64", "blocks of 64", "bfloat16, head of 64"])
def test_key_and_value_that_are_not_finite_reach_only_who_sees_them(name: str, part: str, bad: float) -> None:
    case = Case(**CASES[name])
    clean = case.run((0, LENGTH))
    getattr(case, part)[40] = bad
    case.write()
    assert case.run((60, 61)).isnan().all() or part == "values"
    assert not case.run((60, 61)).isfinite().all()
    for p in (0, 8, 31, 38, 39):  # a row of its own that ends before it, in the same stretch of keys and block
        assert torch.equal(case.run((p, p + 1))[0], clean[p])
    assert torch.equal(case.run((0, 40)), clean[:40])


@pytest.mark.parametrize("name", ["plain", "head of 20", "head of 64", "blocks of 64", "bfloat16"])
def test_nan_left_in_blocks_and_places_nobody_sees_reaches_nobody(name: str) -> None:
    case = Case(**CASES[name])
    clean = case.run((0, LENGTH))
    stale = torch.ones(case.cache.num_blocks * case.block_size, dtype=torch.bool)
    stale[case.places] = False
    for pool in case.cache.layer(0):
        pool.flatten(0, 1)[stale] = math.nan
    assert torch.equal(case.run((0, LENGTH)), clean)
    assert torch.equal(case.run((100, 101), (0, 99))[1:], clean[:99])


def test_score_of_minus_infinity_weighs_exactly_nothing() -> None:
    case = Case(heads=1, kv_heads=1)
    case.query = case.query.abs()
    case.keys[:90] = -math.inf  # the first stretches hold nothing at all
    case.values[:90] = 1e30
    case.write()
    seen = case.values[90:].double().transpose(0, 1)
    scores = (case.query[100:].double() @ case.keys[90:].double().transpose(1, 2)[:, :, 0].t()) / math.sqrt(case.size)
    wanted = torch.softmax(scores[0], -1) @ seen[0]
    assert torch.allclose(case.run((100, 101))[0, 0].double(), wanted[0], atol=1e-5)


def test_scores_far_apart_do_not_overflow() -> None:
    case = Case(heads=1, kv_heads=1)
    case.query *= 1e4
    found = case.run((0, LENGTH))
    assert found.isfinite().all()
    assert torch.allclose(found.double(), case.expected(), atol=1e-4)
