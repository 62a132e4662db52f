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
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.pooling.inputs import read_inputs
from lora_serve.server.pooling.pooled import Vector, pool
from lora_serve.server.schemas.pooling import EmbeddingFields
from lora_serve.server.services import SERVICES

_NUMBERS_AT_ONCE = 20_000  # written as text, about 10 ms; then others have their turn


async def create_embedding(request: web.Request) -> web.StreamResponse:
    """Embed texts."""
    fields = check_fields(EmbeddingFields, await read_json(request))
    _check_dimensions(fields.dimensions, request.app[SERVICES].spec)
    model = resolve(request, fields)
    inputs, rules = await read_inputs(fields, model)
    answer = await pool(request, fields, model, inputs, rules, may_leave=True)
    normalizes = model.spec.pooling is not None and model.spec.pooling.is_normalized
    is_unit = normalizes if fields.use_activation is None else fields.use_activation
    vectors = [shortened(vector, fields.dimensions, is_unit=is_unit) for vector in answer.vectors]
    data = await _data(vectors, fields)
    head = json.dumps({"object": "list", "model": answer.adapters.model, "usage": answer.usage})
    return web.Response(text=f'{head[:-1]}, "data": [{data}]}}', content_type="application/json")


def shortened(vector: bytes, dimensions: int | None, *, is_unit: bool) -> bytes:
    """The first `dimensions` numbers (Matryoshka: Kusupati et al., 2022, arXiv 2205.13147); of length 1 if asked."""
    if dimensions is None or 4 * dimensions >= len(vector):
        return vector
    head = np.frombuffer(vector, "<f4", dimensions).astype(np.float64)
    norm = float(np.linalg.norm(head)) if is_unit else 1.0
    return (head / norm if norm else head).astype("<f4").tobytes()


async def _data(vectors: list[bytes], fields: EmbeddingFields) -> str:
    """The elements of `data` as JSON; written in parts, as the numbers of 2048 vectors take a second."""
    parts, num_numbers = [], 0
    for index, vector in enumerate(vectors):
        parts.append(f'{{"object": "embedding", "index": {index}, "embedding": {_written(vector, fields)}}}')
        num_numbers += len(vector) // 4
        if num_numbers >= _NUMBERS_AT_ONCE:
            num_numbers = 0
            await asyncio.sleep(0)
    return ", ".join(parts)


def _written(vector: bytes, fields: EmbeddingFields) -> str:
    values = np.frombuffer(vector, "<f4")
    if fields.encoding_format == "base64":
        return f'"{base64.b64encode(packed(values, fields.embed_dtype, fields.endianness)).decode()}"'
    return json.dumps(values.tolist())


def packed(values: Vector, embed_dtype: str, endianness: str) -> bytes:
    """The numbers rounded to the nearest ones of `embed_dtype`, ties to even, in this order of bytes."""
    if embed_dtype == "bfloat16":
        bits = values.view("<u4")
        made = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    else:
        with np.errstate(over="ignore"):  # to infinity
            made = values.astype(embed_dtype)
    return bytes(made.astype(made.dtype.newbyteorder("big" if endianness == "big" else "little")))


def _check_dimensions(dimensions: int | None, spec: ModelSpec) -> None:
    longest = spec.pooling.dimension if spec.pooling is not None else 0
    if dimensions is not None and dimensions > longest:
        message = f"`dimensions` must be from 1 to {longest}, which is what this model gives (got {dimensions})."
        raise InvalidRequestError(message, param="dimensions")
