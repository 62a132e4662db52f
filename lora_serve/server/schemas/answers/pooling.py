"""Answers of the routes that give a vector, a label or a score."""

from __future__ import annotations

from typing import Literal

from lora_serve.server.schemas.answers.base import Answer


class PoolingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # text: float32, little-endian, in base64


class Embeddings(Answer):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Label(Answer):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Labels(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Label]
    usage: PoolingUsage


class Score(Answer):
    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class Document(Answer):
    text: str


class Ranked(Answer):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Answer):
    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
