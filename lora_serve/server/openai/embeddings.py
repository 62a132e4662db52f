"""POST /v1/embeddings: refused in words until this version's successor can do it."""

from __future__ import annotations

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError


async def create_embedding(request: web.Request) -> web.StreamResponse:
    message = "Embeddings are not supported yet; they come in a later version."
    raise InvalidRequestError(message, param="model", code="unsupported")
