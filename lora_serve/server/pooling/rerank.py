"""POST /rerank, in the shape of Jina and Cohere, as vLLM has it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_fields
from lora_serve.server.context import CONTEXT
from lora_serve.server.openai.chosen import read_fields
from lora_serve.server.pooling.inputs import check_count
from lora_serve.server.pooling.scoring import score_pairs
from lora_serve.server.schemas.pooling import RerankFields


async def create_rerank(request: web.Request) -> web.StreamResponse:
    """The handler: documents by how well they fit the query, best first."""
    fields = check_fields(RerankFields, await read_fields(request))
    documents = documents_of(fields.documents)
    scores = await score_pairs(request, fields, [fields.query], documents, "documents")
    order = sorted(range(len(documents)), key=lambda index: -scores.values[index])[: fields.top_n or None]
    results: list[dict[str, Any]] = []
    for index in order:
        shown = {"document": {"text": documents[index]}} if fields.return_documents else {}
        results.append({"index": index, **shown, "relevance_score": scores.values[index]})
    answer_id = f"rerank-{request[CONTEXT].request_id}"
    body = {"id": answer_id, "model": scores.model, "usage": scores.usage, "results": results}
    num_characters = sum(map(len, documents)) if fields.return_documents else 0
    return await json_answer(request, lambda: body, 4 * len(results) + num_characters // 8)


def documents_of(value: object) -> list[str]:
    """Their texts, one at least. Raises InvalidRequestError."""
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
