"""POST /score, in vLLM's shape."""

from __future__ import annotations

import time

from aiohttp import web

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.bodies.json_body import check_fields
from lora_serve.server.context import CONTEXT
from lora_serve.server.openai.chosen import read_fields
from lora_serve.server.pooling.inputs import check_count
from lora_serve.server.pooling.scoring import score_pairs
from lora_serve.server.schemas.pooling import ScoreFields


async def create_score(request: web.Request) -> web.StreamResponse:
    """The handler: 1 to N texts, or N to N."""
    fields = check_fields(ScoreFields, await read_fields(request))
    firsts, seconds = texts_of(fields.text_1, "text_1"), texts_of(fields.text_2, "text_2")
    if len(firsts) not in (1, len(seconds)):
        message = f"`text_1` must hold one text, or as many as `text_2` ({len(seconds)}; got {len(firsts)})."
        raise InvalidRequestError(message, param="text_1")
    scores = await score_pairs(request, fields, firsts, seconds, "text_2")
    return web.json_response(
        {
            "id": f"score-{request[CONTEXT].request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": scores.model,
            "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores.values)],
            "usage": scores.usage,
        }
    )


def texts_of(value: object, param: str) -> list[str]:
    """One text or more. Raises InvalidRequestError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"`{param}` must be a string or a list of strings.", param=param)
    check_count(texts, param)
    return texts
