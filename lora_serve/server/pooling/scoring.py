"""How well two texts fit together: a cross-encoder reads both at once, an embedding model compares their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import Task
from lora_serve.server.pooling.asking import Asking, Vector
from lora_serve.server.pooling.inputs import InputRules, TextPair
from lora_serve.server.pooling.labels import labels_of, probabilities
from lora_serve.server.schemas.pooling import PoolingFields
from lora_serve.server.services import SERVICES, Services

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scores:
    """One for each pair."""

    values: list[float]
    model: str
    usage: dict[str, Any]


async def score_pairs(
    request: web.Request, fields: PoolingFields, firsts: Sequence[str], seconds: Sequence[str], param: str
) -> Scores:
    """One first text for all the second ones, or one for each. `param`: the field of the second ones.

    A classifier with one label gives sigmoid(logit), as sentence-transformers' CrossEncoder; an embedding model the
    cosine of two embeddings. Raises InvalidRequestError.
    """
    services, asking = request.app[SERVICES], Asking(request, fields)
    rules = InputRules(param, truncate=fields.truncate_prompt_tokens)
    assert services.spec.pooling is not None, "the route is for pooling models"
    if services.spec.pooling.task is Task.EMBED:
        answer = await asking.answer([*firsts, *seconds], rules)
        lefts, rights = answer.arrays[: len(firsts)], answer.arrays[len(firsts) :]
        values = [cosine(left, right) for left, right in zip(_repeated(lefts, len(rights)), rights, strict=True)]
    else:
        for candidate in asking.candidates:
            _check_has_one_label(labels_of(services, candidate), services)
        pairs = zip(_repeated(firsts, len(seconds)), seconds, strict=True)
        answer = await asking.answer([TextPair(first, second) for first, second in pairs], rules)
        values = [probabilities(logits, is_multi_label=False)[0] for logits in answer.arrays]
    return Scores(values, answer.model, answer.usage)


def cosine(left: Vector, right: Vector) -> float:
    """0 if one of them has no direction."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def _repeated(items: Sequence[T], count: int) -> list[T]:
    return list(items) * count if len(items) == 1 else list(items)


def _check_has_one_label(labels: tuple[str, ...], services: Services) -> None:
    if len(labels) != 1:
        raise InvalidRequestError(
            f"Scores need a classifier with one label; this one has {len(labels)}. Use /classify instead.",
            param="model",
        )
