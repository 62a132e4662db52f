"""POST /classify, in vLLM's shape, and the labels and probabilities of a classifier."""

from __future__ import annotations

import time
from functools import partial
from typing import Literal

import numpy as np
from aiohttp import web
from msgspec import Struct

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.adapter_set import AdapterSet
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.pooling.inputs import read_inputs
from lora_serve.server.pooling.pooled import PoolingUsage, Vector, pool
from lora_serve.server.schemas.pooling import ClassifyFields
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
