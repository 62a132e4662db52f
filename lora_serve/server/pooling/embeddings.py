"""POST /v1/embeddings"""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.inference.prompts import read_prompts
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.pooling.inputs import MAX_INPUTS, InputRules
from lora_serve.server.pooling.pooled import pool
from lora_serve.server.schemas.pooling import EmbeddingFields
from lora_serve.server.services import SERVICES

_NUMBERS_AT_ONCE = 20_000  # written as text, about 10 ms; then others have their turn


async def create_embedding(request: web.Request) -> web.StreamResponse:
    """Embed texts."""
    fields = check_fields(EmbeddingFields, await read_json(request))
    _check_dimensions(fields.dimensions, request.app[SERVICES].spec)
    model = resolve(request, fields)
    inputs = await read_prompts(fields.input, "input", MAX_INPUTS)
    rules = InputRules("input", fields.add_special_tokens, fields.truncate_prompt_tokens)
    answer = await pool(request, fields, model, inputs, rules, may_leave=True)
    vectors = [shortened(vector, fields.dimensions) for vector in answer.vectors]
    data = await _data(vectors, fields.encoding_format)
    head = json.dumps({"object": "list", "model": answer.adapters.model, "usage": answer.usage})
    return web.Response(text=f'{head[:-1]}, "data": [{data}]}}', content_type="application/json")


def shortened(vector: bytes, dimensions: int | None) -> bytes:
    """The first `dimensions` numbers, made unit length again (Matryoshka: Kusupati et al., 2022, arXiv 2205.13147)."""
    if dimensions is None or 4 * dimensions >= len(vector):
        return vector
    head = np.frombuffer(vector, "<f4", dimensions).astype(np.float64)
    norm = float(np.linalg.norm(head))
    return (head / norm if norm else head).astype("<f4").tobytes()


async def _data(vectors: list[bytes], encoding_format: str) -> str:
    """The elements of `data` as JSON; written in parts, as the numbers of 2048 vectors take a second."""
    parts, num_numbers = [], 0
    for index, vector in enumerate(vectors):
        parts.append(f'{{"object": "embedding", "index": {index}, "embedding": {_written(vector, encoding_format)}}}')
        num_numbers += len(vector) // 4
        if num_numbers >= _NUMBERS_AT_ONCE:
            num_numbers = 0
            await asyncio.sleep(0)
    return ", ".join(parts)


def _written(vector: bytes, encoding_format: str) -> str:
    if encoding_format == "base64":
        return f'"{base64.b64encode(vector).decode()}"'
    return json.dumps(np.frombuffer(vector, "<f4").tolist())


def _check_dimensions(dimensions: int | None, spec: ModelSpec) -> None:
    longest = spec.pooling.dimension if spec.pooling is not None else 0
    if dimensions is not None and dimensions > longest:
        message = f"`dimensions` must be from 1 to {longest}, which is what this model gives (got {dimensions})."
        raise InvalidRequestError(message, param="dimensions")
