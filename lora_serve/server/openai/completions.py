"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_fields
from lora_serve.server.context import CONTEXT
from lora_serve.server.openai.answer import Admitted, Piece
from lora_serve.server.openai.chosen import choose_adapters, make_requests, read_fields, stop_rules
from lora_serve.server.openai.completion_choice import CompletionChoice
from lora_serve.server.openai.generation import run_choices
from lora_serve.server.openai.logprobs import TokenSpeller
from lora_serve.server.openai.prompts import EncodedPrompt, completion_prompts
from lora_serve.server.openai.sse import stream
from lora_serve.server.openai.usage import Usage
from lora_serve.server.sampling import Limits
from lora_serve.server.schemas.completion import CompletionFields
from lora_serve.server.services import SERVICES
from lora_serve.text.tokenizer import TextModel


async def create_completion(request: web.Request) -> web.StreamResponse:
    """The handler."""
    services, context = request.app[SERVICES], request[CONTEXT]
    fields = check_fields(CompletionFields, await read_fields(request), services.config.requests)
    adapters = choose_adapters(request, fields)
    text, spec = services.text_of(adapters.vocabulary_of), services.spec_of(adapters.vocabulary_of)
    prompts = await completion_prompts(text, spec, fields, services.config.requests.max_prompts)
    limits = Limits(fields.max_tokens, fields.logprobs, _prompt_logprobs(fields))
    token_ids = [prompt.token_ids for prompt in prompts]
    requests = make_requests(request, fields, limits, token_ids, adapters)
    usage = Usage.of(requests, fields.n)
    context.num_prompt_tokens = usage.num_prompts_tokens
    body = CompletionBody(
        f"cmpl-{context.request_id}",
        int(time.time()),
        adapters.model_name(services.base_name),
        fields,
        usage,
        [_choice(text, fields, prompt) for prompt in prompts for _ in range(fields.n)],
    )
    events = run_choices(services, context, requests, stop_rules(fields))
    if fields.stream:
        return await stream(request, events, body, len(requests))
    async with aclosing(events):
        async for number, event in events:
            body.add(number, event)
    return await json_answer(request, body.whole, sum(choice.num_values for choice in body.choices))


@dataclass(slots=True)
class CompletionBody:
    """The answer, whole or in chunks."""

    id: str
    created: int
    model: str
    fields: CompletionFields
    usage: Usage
    choices: list[CompletionChoice]

    def add(self, choice: int, event: Admitted | Piece) -> None:
        if isinstance(event, Piece):
            self.usage.add(choice, len(event.token_ids))
        else:
            self.model = event.model
            self.usage.admit(choice, event.num_cached_tokens)
        self.choices[choice].add(event)

    def whole(self) -> dict[str, Any]:
        choices = [{"index": index, **choice.take()} for index, choice in enumerate(self.choices)]
        for choice, body in zip(self.choices, choices, strict=True):
            body["prompt_logprobs"] = choice.take_prompt_logprobs()
        return {**self._head(choices), "usage": self.usage.total()}

    def chunks(self, choice: int, event: Admitted | Piece) -> Iterator[dict[str, Any]]:
        options = self.fields.stream_options
        self.add(choice, event)
        if not self.choices[choice].has_news:
            return
        chunk = self._head([{"index": choice, **self.choices[choice].take()}])
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self.usage.of_choice(choice)
        elif options is not None and options.include_usage:
            chunk["usage"] = None
        yield chunk

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        if self.fields.stream_options is not None and self.fields.stream_options.include_usage:
            yield {**self._head([]), "usage": self.usage.total()}

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _choice(text: TextModel, fields: CompletionFields, prompt: EncodedPrompt) -> CompletionChoice:
    return CompletionChoice(
        speller=TokenSpeller(text, fields.return_tokens_as_token_ids),
        prompt=prompt,
        logprobs=fields.logprobs,
        show_prompt_logprobs=fields.prompt_logprobs is not None,
        echo=fields.echo,
        hide_answer=fields.max_tokens == 0,
    )


def _prompt_logprobs(fields: CompletionFields) -> int | None:
    """Echo with logprobs needs the prompt's too."""
    if fields.echo and fields.logprobs is not None:
        return max(fields.logprobs, fields.prompt_logprobs or 0)
    return fields.prompt_logprobs
