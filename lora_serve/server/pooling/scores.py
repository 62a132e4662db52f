"""POST /score in vLLM's shape, and POST /rerank in Jina's and Cohere's: the fit of two texts.

A cross-encoder reads both texts at once; an embedding model compares their vectors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import Task
from lora_serve.server.answers import json_answer, json_response
from lora_serve.server.context import CONTEXT, AdapterSet
from lora_serve.server.inference.prompts import thread_if_long
from lora_serve.server.inference.resolve import ResolvedModel, resolve
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.pooling.embeddings import (
    InputRules,
    PoolingUsage,
    TextPair,
    Vector,
    check_count,
    pool,
    read_inputs,
)
from lora_serve.server.schemas.pooling import ClassifyFields, ComparingFields, RerankFields, ScoreFields
from lora_serve.server.services import SERVICES, Services


class Label(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Labels(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Label]
    usage: PoolingUsage


async def create_classification(request: web.Request) -> web.StreamResponse:
    """Classify texts."""
    services = request.app[SERVICES]
    fields = check_fields(ClassifyFields, await read_json(request))
    model = resolve(request, fields)
    for candidate in model.candidates:
        labels_of(services, candidate)
    inputs, rules = await read_inputs(fields, model)
    answer = await pool(request, fields, model, inputs, rules)
    labels = labels_of(services, answer.adapters)
    is_multi_label = services.spec.pooling is not None and services.spec.pooling.is_multi_label
    weighed = partial(probabilities, is_multi_label=is_multi_label, use_activation=fields.use_activation)

    def made() -> Labels:
        return Labels(
            id=f"classify-{request[CONTEXT].request_id}",
            created=int(time.time()),
            model=answer.adapters.model,
            data=[_label(index, weighed(logits), labels) for index, logits in enumerate(answer.arrays)],
            usage=answer.usage,
        )

    return await json_answer(request, made, len(inputs) * (len(labels) + 10))


def _label(index: int, probs: list[float], labels: tuple[str, ...]) -> Label:
    best = max(range(len(probs)), key=probs.__getitem__)
    return Label(index, labels[best], probs, len(probs))


def labels_of(services: Services, adapters: AdapterSet) -> tuple[str, ...]:
    """The names of the labels that these adapters choose from, or the base model if there are no adapters.

    An adapter with a head of its own has those of its registration: `"metadata": {"labels": [...]}`, one for each.
    Raises InvalidRequestError if there is no head at all.
    """
    own = next((member.ref for member in adapters.members if member.ref.traits.num_labels), None)
    if own is not None:
        entry = services.catalog.snapshot.entries.get(own.name)
        return _named(None if entry is None else entry.metadata.get("labels"), own.traits.num_labels)
    labels = services.spec.pooling.labels if services.spec.pooling is not None else ()
    if not labels:
        who = adapters.model
        raise InvalidRequestError(
            f"`{who}` has no classification head: the base model has none of its own, so name an adapter that brings "
            "one (PEFT's task type SEQ_CLS).",
            param="model",
        )
    return labels


def probabilities(logits: Vector, *, is_multi_label: bool, use_activation: bool | None = None) -> list[float]:
    """Softmax over the labels, or a sigmoid for each if they do not exclude one another or there is only one.

    The same as in transformers' TextClassificationPipeline. Without activation the logits as they are.
    """
    values = logits.astype(np.float64)
    if use_activation is False:
        found = values
    elif is_multi_label or len(values) == 1:
        found = np.exp(-np.logaddexp(0.0, -values))
    else:
        powers = np.exp(values - values.max())
        found = powers / powers.sum()
    return [float(value) for value in found]


def _named(names: object, count: int) -> tuple[str, ...]:
    """The given names if there is one for each label, else the names that transformers gives: LABEL_0, LABEL_1, ..."""
    if isinstance(names, list) and len(names) == count and all(isinstance(name, str) for name in names):
        return tuple(names)
    return tuple(f"LABEL_{index}" for index in range(count))


T = TypeVar("T")
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class Score(Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class Document(Struct):
    text: str


class Ranked(Struct, kw_only=True):
    index: int
    document: Document | UnsetType = UNSET
    relevance_score: float


class Ranking(Struct):
    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """One score for each pair of texts."""

    values: list[float]
    model: str
    usage: PoolingUsage


async def create_score(request: web.Request) -> web.StreamResponse:
    """Score pairs of texts.

    1 to N texts, or N to N.
    """
    fields = check_fields(ScoreFields, await read_json(request))
    given = [names for names in _SIDES if all(getattr(fields, name) is not None for name in names)]
    if len(given) != 1:
        names = ", or ".join(f"`{first}` and `{second}`" for first, second in _SIDES)
        raise InvalidRequestError(f"Send the texts as {names}.", param="text_1")
    first, second = given[0]
    firsts, seconds = texts_of(getattr(fields, first), first), texts_of(getattr(fields, second), second)
    if len(firsts) not in (1, len(seconds)):
        message = f"`{first}` must hold one text, or as many as `{second}` ({len(seconds)}; got {len(firsts)})."
        raise InvalidRequestError(message, param=first)
    scores = await score_pairs(request, fields, firsts, seconds, second)
    data = [Score(index=index, score=value) for index, value in enumerate(scores.values)]
    name, created = f"score-{request[CONTEXT].request_id}", int(time.time())
    return json_response(Scores(id=name, created=created, model=scores.model, data=data, usage=scores.usage))


async def create_rerank(request: web.Request) -> web.StreamResponse:
    """Order documents by how well they fit a query.

    Documents by their fit to the query, best first.
    """
    fields = check_fields(RerankFields, await read_json(request))
    documents = documents_of(fields.documents)
    scores = await score_pairs(request, fields, [fields.query], documents, "documents")
    order = sorted(range(len(documents)), key=lambda index: -scores.values[index])[: fields.top_n or None]
    results = [
        Ranked(
            index=index,
            document=Document(documents[index]) if fields.return_documents else UNSET,
            relevance_score=scores.values[index],
        )
        for index in order
    ]
    body = Ranking(f"rerank-{request[CONTEXT].request_id}", scores.model, scores.usage, results)
    num_characters = sum(map(len, documents)) if fields.return_documents else 0
    return await json_answer(request, lambda: body, 4 * len(results) + num_characters // 8)


async def score_pairs(
    request: web.Request, fields: ComparingFields, firsts: Sequence[str], seconds: Sequence[str], param: str
) -> ScoredPairs:
    """Score one first text against all second ones, or one for each. `param`: the field of the second ones.

    A classifier with one label gives sigmoid(logit), as sentence-transformers' CrossEncoder; an embedding model the
    cosine of two embeddings. Raises InvalidRequestError.
    """
    services, model = request.app[SERVICES], resolve(request, fields)
    rules = InputRules(param, truncate=fields.truncate_prompt_tokens, side=fields.truncation_side)
    firsts = await _beginnings(model, firsts, fields.max_tokens_per_query, "max_tokens_per_query")
    seconds = await _beginnings(model, seconds, fields.max_tokens_per_doc, "max_tokens_per_doc")
    assert services.spec.pooling is not None, "the route is for pooling models"
    if services.spec.pooling.task is Task.EMBED:
        answer = await pool(request, fields, model, [*firsts, *seconds], rules)
        lefts, rights = answer.arrays[: len(firsts)], answer.arrays[len(firsts) :]
        values = [cosine(left, right) for left, right in zip(_repeated(lefts, len(rights)), rights, strict=True)]
    else:
        for candidate in model.candidates:
            _check_has_one_label(labels_of(services, candidate), services)
        pairs = zip(_repeated(firsts, len(seconds)), seconds, strict=True)
        texts = [TextPair(first, second) for first, second in pairs]
        answer = await pool(request, fields, model, texts, rules)
        activation = fields.use_activation
        values = [probabilities(logits, is_multi_label=False, use_activation=activation)[0] for logits in answer.arrays]
    return ScoredPairs(values, answer.adapters.model, answer.usage)


def texts_of(value: object, param: str) -> list[str]:
    """The texts of a field, one at least. Raises InvalidRequestError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"`{param}` must be a string or a list of strings.", param=param)
    check_count(texts, param)
    return texts


def documents_of(value: object) -> list[str]:
    """The texts of the documents, one at least. Raises InvalidRequestError."""
    if not isinstance(value, list) or not value:
        raise _wrong_documents()
    check_count(value, "documents")
    return [_text_of(item) for item in value]


def _text_of(item: object) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise _wrong_documents()
    return text


def _wrong_documents() -> InvalidRequestError:
    message = '`documents` must be a list of at least one string or {"text": string}.'
    return InvalidRequestError(message, param="documents")


def cosine(left: Vector, right: Vector) -> float:
    """The cosine of two vectors, 0 if one of them is zero."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


async def _beginnings(model: ResolvedModel, texts: Sequence[str], max_tokens: int, param: str) -> Sequence[str]:
    """The texts, each cut to so many tokens of its own; 0: whole. Raises InvalidRequestError."""
    if max_tokens >= (longest := model.spec.max_model_len):
        raise InvalidRequestError(f"`{param}` must be less than {longest}, this model's limit.", param=param)
    if not max_tokens:
        return texts
    return await thread_if_long(sum(map(len, texts)), lambda: [model.text.beginning(x, max_tokens) for x in texts])


def _repeated(items: Sequence[T], count: int) -> list[T]:
    return list(items) * count if len(items) == 1 else list(items)


def _check_has_one_label(labels: tuple[str, ...], services: Services) -> None:
    if len(labels) != 1:
        raise InvalidRequestError(
            f"Scores need a classifier with one label; this one has {len(labels)}. Use /classify instead.",
            param="model",
        )
