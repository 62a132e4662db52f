"""One answer before the first caller's, from a chat template to JSON: it builds all that is built at first use."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import cast

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.messages import Event, FinishEvent, TokenEvent, TokenLogprobs
from lora_serve.core.request import InferenceRequest, SamplingParams
from lora_serve.core.tenant import WARM_UP
from lora_serve.server.answers.json_answer import compact
from lora_serve.server.openai.logprobs import TokenSpeller, chat_logprobs
from lora_serve.server.services import Services
from lora_serve.text.chat import ChatMessage, render_chat
from lora_serve.text.output import OutputText, StopRules

_TEXT = "Dear customer, your invoice no. 2041 (EUR 17.50) was sent."
_NEW_TOKENS = 3
TEXT_ID = f"warm-up-text-{uuid.uuid4().hex}"  # other servers of a fleet warm up, too


async def answer_warm_up_text(services: Services) -> None:
    """Tokenise a text, and if the model generates: render, infer, detokenise, write. Not counted in metrics."""
    text, room = services.text, services.spec.max_model_len - _NEW_TOKENS
    token_ids = text.encode(_rendered(services), add_special_tokens=True)[: max(1, room)]
    if services.spec.pooling is not None or not token_ids or room < 1:
        return
    sampling = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, logprobs=1, ignore_eos=True)
    request = InferenceRequest(TEXT_ID, token_ids, sampling, tenant=f"{WARM_UP}text", arrival_time=time.monotonic())
    services.client.gate.enter((request,), limited=False)
    output = OutputText(text, request, StopRules(("\n\n",)), services.spec.eos_token_ids)
    entries: list[TokenLogprobs] = []
    async with aclosing(cast(AsyncGenerator[Event, None], services.client.infer(request))) as events:
        async for event in events:
            if isinstance(event, TokenEvent) and event.logprobs is not None:
                entries.append(event.logprobs)
            if isinstance(event, TokenEvent | FinishEvent):
                piece = output.token(event) if isinstance(event, TokenEvent) else output.finish(event)
                if piece.finish_reason is not None:
                    break
    compact(chat_logprobs(TokenSpeller(text, as_ids=False), entries, 1))


def _rendered(services: Services) -> str:
    """The text, in the model's chat template if that takes a user's message."""
    if services.spec.pooling is None:
        _ = services.text.template.reasoning_format  # the formats' files are read once
        with suppress(InvalidRequestError):
            return render_chat(services.text, (ChatMessage("user", _TEXT),)).text
    return _TEXT
