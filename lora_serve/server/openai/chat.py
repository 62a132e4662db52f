"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from lora_serve.core.messages import TokenLogprobs
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_fields
from lora_serve.server.context import CONTEXT
from lora_serve.server.openai.answer import Admitted, Piece
from lora_serve.server.openai.chosen import choose_adapters, make_requests, read_fields, stop_rules
from lora_serve.server.openai.generation import run_choices
from lora_serve.server.openai.logprobs import TokenSpeller, chat_logprobs, num_values, prompt_logprobs
from lora_serve.server.openai.prompts import chat_messages, chat_prompt
from lora_serve.server.openai.sse import stream
from lora_serve.server.openai.usage import Usage
from lora_serve.server.sampling import Limits
from lora_serve.server.schemas.chat import ChatFields
from lora_serve.server.services import SERVICES
from lora_serve.text.chat import ChatMessage


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """The handler."""
    services, context = request.app[SERVICES], request[CONTEXT]
    fields = check_fields(ChatFields, await read_fields(request), services.config.requests)
    messages = await chat_messages(fields.messages)
    adapters = choose_adapters(request, fields)
    text, spec = services.text_of(adapters.vocabulary_of), services.spec_of(adapters.vocabulary_of)
    prompt = await chat_prompt(text, spec, fields, messages)
    limits = Limits(
        fields.max_completion_tokens or fields.max_tokens,
        fields.top_logprobs if fields.logprobs else None,
        fields.prompt_logprobs,
        prompt_field="messages",
    )
    requests = make_requests(request, fields, limits, [prompt], adapters)
    usage = Usage.of(requests, fields.n)
    context.num_prompt_tokens = usage.num_prompts_tokens
    body = ChatBody(
        id=f"chatcmpl-{context.request_id}",
        created=int(time.time()),
        model=adapters.model_name(services.base_name),
        fields=fields,
        speller=TokenSpeller(text, fields.return_tokens_as_token_ids),
        usage=usage,
        prefix=_echoed(fields, messages),
        choices=[ChatChoice() for _ in requests],
    )
    events = run_choices(services, context, requests, stop_rules(fields))
    if fields.stream:
        return await stream(request, events, body, len(requests))
    async with aclosing(events):
        async for number, event in events:
            body.add(number, event)
    return await json_answer(request, body.whole, body.num_values)


@dataclass(slots=True)
class ChatChoice:
    """One choice as it grows."""

    text: list[str] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class ChatBody:
    """The answer, whole or in chunks."""

    id: str
    created: int
    model: str
    fields: ChatFields
    speller: TokenSpeller
    usage: Usage
    prefix: str  # with `echo`: the last message, where it is the assistant's
    choices: list[ChatChoice]
    prompt_entries: list[TokenLogprobs | None] | None = None

    def add(self, number: int, event: Admitted | Piece) -> None:
        choice = self.choices[number]
        if isinstance(event, Admitted):
            self.model = event.model
            self.usage.admit(number, event.num_cached_tokens)
            if event.prompt_logprobs is not None:
                self.prompt_entries = list(event.prompt_logprobs)
            return
        self.usage.add(number, len(event.token_ids))
        choice.text.append(event.text)
        choice.entries.extend(event.logprobs)
        choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self.choices)]
        head = self._head("chat.completion", choices)
        return {**head, "usage": self.usage.total(), "prompt_logprobs": self._take_prompt_logprobs()}

    @property
    def num_values(self) -> int:
        """Roughly, that are to be shown; eight characters of text count as one."""
        num_characters = sum(len(self.prefix) + sum(map(len, choice.text)) for choice in self.choices)
        num_entries = num_values(self.prompt_entries) + sum(num_values(choice.entries) for choice in self.choices)
        return num_entries + num_characters // 8

    def _take_prompt_logprobs(self) -> Any:
        return None if self.prompt_entries is None else prompt_logprobs(self.speller.text, self.prompt_entries)

    def chunks(self, choice: int, event: Admitted | Piece) -> Iterator[dict[str, Any]]:
        if isinstance(event, Admitted):
            self.model = event.model
            self.usage.admit(choice, event.num_cached_tokens)
            yield self._chunk(choice, {"role": "assistant", "content": ""}, Piece())
            if self.prefix:
                yield self._chunk(choice, {"content": self.prefix}, Piece())
            return
        self.usage.add(choice, len(event.token_ids))
        if event.text or event.finish_reason or (self.fields.logprobs and event.logprobs):
            yield self._chunk(choice, {"content": event.text}, event)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        if self.fields.stream_options is not None and self.fields.stream_options.include_usage:
            yield {**self._head("chat.completion.chunk", []), "usage": self.usage.total()}

    def _whole_choice(self, index: int, choice: ChatChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": self.prefix + "".join(choice.text)},
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _chunk(self, choice: int, delta: dict[str, str], piece: Piece) -> dict[str, Any]:
        part = {
            "index": choice,
            "delta": delta,
            "logprobs": self._logprobs(list(piece.logprobs)) if piece.logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            part["stop_reason"] = piece.stop_reason
        chunk = self._head("chat.completion.chunk", [part])
        options = self.fields.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self.usage.of_choice(choice)
        elif options is not None and options.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(self.speller, entries, self.fields.top_logprobs) if self.fields.logprobs else None

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _echoed(fields: ChatFields, messages: tuple[ChatMessage, ...]) -> str:
    return messages[-1].content if fields.echo and messages[-1].role == "assistant" else ""
