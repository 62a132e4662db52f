"""Rows of one answer -> prompts computed and pieces of text, for every generating API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from lora_serve.core.errors import InternalError
from lora_serve.core.messages import FinishEvent, PromptEvent, TokenEvent
from lora_serve.server.inference.rows import Rows
from lora_serve.text.output import OutputText, Piece, StopRules

ChoiceEvents = AsyncGenerator[tuple[int, PromptEvent | Piece], None]


async def generate(rows: Rows, rules: StopRules) -> ChoiceEvents:
    """(number of the choice, PromptEvent or Piece) as they come; each choice ends with a Piece with a finish_reason.

    Leaving early aborts all choices. Raises what `Rows.admitted` and `Rows.next` raise.
    """
    text, eos = rows.model.text, rows.model.spec.eos_token_ids
    texts = [OutputText(text, request, rules, eos) for request in rows.requests]
    first_token_at: float | None = None
    async with rows.admitted():
        while not rows.is_over:
            number, event = await rows.next()
            match event:
                case PromptEvent():
                    first_token_at = first_token_at or time.monotonic()
                    yield number, event
                    continue
                case TokenEvent():
                    piece = texts[number].token(event)
                case FinishEvent():
                    piece = texts[number].finish(event)
                case _:
                    raise InternalError(f"The engine pooled {event.request_id}, which was to be continued.")
            rows.context.num_output_tokens += len(piece.token_ids)
            rows.use.generated(number, len(piece.token_ids))
            if piece.finish_reason is not None:
                rows.end(number, piece.finish_reason)
            yield number, piece
    rows.context.decode = time.monotonic() - (first_token_at or time.monotonic())
