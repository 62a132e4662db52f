"""POST /v1/embeddings"""

from __future__ import annotations

import base64

import numpy as np
from aiohttp import web
from msgspec import Struct

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_fields, read_json
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.pooling.inputs import PoolingUsage, Vector, pool, read_inputs
from lora_serve.server.schemas.pooling import EmbeddingFields
from lora_serve.server.services import SERVICES


class Embedding(Struct, tag_field="object", tag="embedding"):
    index: int
    embedding: list[float] | str  # text: float32, little-endian, in base64


class Embeddings(Struct, tag_field="object", tag="list"):
    model: str
    usage: PoolingUsage
    data: list[Embedding]


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

    def made() -> Embeddings:
        data = [Embedding(index, _shown(vector, fields)) for index, vector in enumerate(vectors)]
        return Embeddings(answer.adapters.model, answer.usage, data)

    return await json_answer(request, made, sum(map(len, vectors)) // 4)


def shortened(vector: bytes, dimensions: int | None, *, is_unit: bool) -> bytes:
    """The first `dimensions` numbers (Matryoshka: Kusupati et al., 2022, arXiv 2205.13147); of length 1 if asked."""
    if dimensions is None or 4 * dimensions >= len(vector):
        return vector
    head = np.frombuffer(vector, "<f4", dimensions).astype(np.float64)
    norm = float(np.linalg.norm(head)) if is_unit else 1.0
    return (head / norm if norm else head).astype("<f4").tobytes()


def _shown(vector: bytes, fields: EmbeddingFields) -> list[float] | str:
    values = np.frombuffer(vector, "<f4")
    if fields.encoding_format == "base64":
        return base64.b64encode(packed(values, fields.embed_dtype, fields.endianness)).decode()
    numbers: list[float] = values.tolist()
    return numbers


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
