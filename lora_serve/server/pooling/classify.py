"""POST /classify, in vLLM's shape."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_fields
from lora_serve.server.context import CONTEXT
from lora_serve.server.openai.chosen import read_fields
from lora_serve.server.openai.prompts import read_prompts
from lora_serve.server.pooling.asking import Asking, Vector
from lora_serve.server.pooling.inputs import MAX_INPUTS, InputRules
from lora_serve.server.pooling.labels import labels_of, probabilities
from lora_serve.server.schemas.pooling import ClassifyFields
from lora_serve.server.services import SERVICES


async def create_classification(request: web.Request) -> web.StreamResponse:
    """The handler."""
    services = request.app[SERVICES]
    fields = check_fields(ClassifyFields, await read_fields(request))
    asking = Asking(request, fields)
    for candidate in asking.candidates:
        labels_of(services, candidate)
    inputs = await read_prompts(fields.input, "input", MAX_INPUTS)
    rules = InputRules("input", fields.add_special_tokens, fields.truncate_prompt_tokens)
    answer = await asking.answer(inputs, rules)
    labels = labels_of(services, answer.adapters)
    is_multi_label = services.spec.pooling is not None and services.spec.pooling.is_multi_label

    def made() -> dict[str, Any]:
        return {
            "id": f"classify-{request[CONTEXT].request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": answer.model,
            "data": [_item(index, logits, labels, is_multi_label) for index, logits in enumerate(answer.arrays)],
            "usage": answer.usage,
        }

    return await json_answer(request, made, len(inputs) * (len(labels) + 10))


def _item(index: int, logits: Vector, labels: tuple[str, ...], is_multi_label: bool) -> dict[str, Any]:
    probs = probabilities(logits, is_multi_label=is_multi_label)
    best = max(range(len(probs)), key=probs.__getitem__)
    return {"index": index, "label": labels[best], "probs": probs, "num_classes": len(probs)}
