"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web
from msgspec import UNSET

from lora_serve.core.messages import PromptEvent, TokenLogprobs
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.prompts import chat_messages, chat_prompt
from lora_serve.server.inference.reading import (
    AnswerReader,
    answer_reading,
    asked_tools,
    read_grammar,
    requested_grammar,
)
from lora_serve.server.inference.requests import TokenLimits, generation_requests
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.openai.answering import AnswerBody, answer
from lora_serve.server.schemas import generated as wire
from lora_serve.server.schemas.generated import TokenSpeller, chat_logprobs, num_values, prompt_logprobs
from lora_serve.server.schemas.inference import ChatFields
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.usage import AnswerUse
from lora_serve.text.chat import ChatMessage
from lora_serve.text.output import Piece


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    return await answer(request, await chat_of(request, await read_json(request)))


async def chat_of(request: web.Request, given: dict[str, Any]) -> ChatBody:
    """The answer to a chat of `given` fields, yet to be generated. Raises InvalidRequestError, AdapterNotFoundError."""
    services, context = request.app[SERVICES], request[CONTEXT]
    fields = check_fields(ChatFields, given, services.config)
    messages = await chat_messages(fields.messages)
    model = resolve(request, fields)
    fields = model.with_defaults(fields)
    tools = await asked_tools(fields)
    grammar = await requested_grammar(services, context, model, fields)
    prompt = await chat_prompt(model.text, model.spec, fields, messages, tools, model.hint)
    reading = answer_reading(services, model, fields, tools, prompt)
    if reading is not None:
        grammar = await read_grammar(services, context.known_caller.tenant, model, reading, grammar)
    limits = TokenLimits(
        fields.answer_tokens,
        fields.top_logprobs if fields.logprobs else None,
        fields.prompt_logprobs,
        prompt_field="messages",
    )
    requests = generation_requests(request, model, fields, limits, [prompt], grammar)
    return ChatBody(
        id=f"chatcmpl-{context.request_id}",
        context=context,
        fields=fields,
        speller=TokenSpeller(model.text, fields.return_tokens_as_token_ids),
        model=model,
        requests=requests,
        use=AnswerUse(requests, fields.n),
        prefix=_echoed(fields, messages),
        prompt_ids=prompt if fields.return_token_ids else (),
        shown_tokens=() if reading is None else reading.markers,
        choices=[ChoiceState(None if reading is None else AnswerReader(reading)) for _ in requests],
    )


@dataclass(slots=True)
class ChoiceState:
    """One choice as it grows."""

    reader: AnswerReader | None = None  # None: the text is the content
    text: list[str] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)  # that are not given out yet
    num_reasoning_tokens: int = 0

    def anew(self) -> ChoiceState:
        """The choice before its first event."""
        return ChoiceState(None if self.reader is None else self.reader.anew())

    def read(self, reader: AnswerReader, piece: Piece) -> list[wire.Delta]:
        """The deltas of a piece, by the choice's reader."""
        deltas = reader.take(piece.text, is_last=piece.finish_reason is not None)
        if any(delta.reasoning_content is not UNSET for delta in deltas):
            self.num_reasoning_tokens += len(piece.token_ids)
        return deltas

    def add(self, piece: Piece) -> None:
        """Keep a piece of the choice for the whole answer."""
        self.token_ids.extend(piece.token_ids)
        self.entries.extend(piece.logprobs)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        if self.reader is None:
            self.text.append(piece.text)
            return
        self.read(self.reader, piece)
        self.finish_reason = self.reader.finish_reason(piece.finish_reason)

    @property
    def num_characters(self) -> int:
        """The length of the text so far."""
        return sum(map(len, self.text)) if self.reader is None else self.reader.num_characters


@dataclass(slots=True, kw_only=True)
class ChatBody(AnswerBody):
    """The answer, whole or in chunks."""

    chunk_kind: ClassVar = wire.ChatChunk
    fields: ChatFields
    speller: TokenSpeller
    prefix: str  # with `echo`: the last message, where it is the assistant's
    choices: list[ChoiceState]
    prompt_ids: tuple[int, ...] = ()  # with `return_token_ids`
    prompt_entries: list[TokenLogprobs | None] | None = None

    def add(self, number: int, event: PromptEvent | Piece) -> None:
        choice = self.choices[number]
        if isinstance(event, PromptEvent):
            if event.prompt_logprobs is not None:
                self.prompt_entries = list(event.prompt_logprobs)
            return
        choice.add(event)

    def forget(self, number: int) -> None:
        self.choices[number] = self.choices[number].anew()

    def is_complete(self, number: int) -> bool:
        reader = self.choices[number].reader
        return reader is not None and reader.is_complete

    def whole(self) -> wire.ChatCompletion:
        entries = self.prompt_entries
        return wire.ChatCompletion(
            **self.common_fields(),
            choices=[self._whole_choice(index, choice) for index, choice in enumerate(self.choices)],
            usage=self.usage(),
            prompt_logprobs=None if entries is None else prompt_logprobs(self.speller.text, entries),
            prompt_token_ids=list(self.prompt_ids) if self.fields.return_token_ids else UNSET,
        )

    def usage(self, number: int | None = None) -> wire.Usage:
        """`usage`, with the tokens of reasoning where an answer's text is read."""
        usage = AnswerBody.usage(self, number)
        choices = self.choices if number is None else self.choices[number : number + 1]
        if self.fields.include_reasoning and any(choice.reader is not None for choice in choices):
            num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices)
            usage.completion_tokens_details = wire.ReasoningTokens(num_reasoning_tokens)
        return usage

    @property
    def num_values(self) -> int:
        """See `AnswerBody.num_values`."""
        num_characters = sum(len(self.prefix) + choice.num_characters for choice in self.choices)
        num_entries = num_values(self.prompt_entries) + sum(num_values(choice.entries) for choice in self.choices)
        num_ids = sum(len(choice.token_ids) for choice in self.choices) if self.fields.return_token_ids else 0
        return num_entries + num_characters // 8 + num_ids + len(self.prompt_ids)

    def chunks(self, choice: int, event: PromptEvent | Piece) -> Iterator[wire.ChatChunk]:
        if isinstance(event, PromptEvent):
            first = self._chunk(choice, wire.Delta("assistant", ""), Piece())
            if self.fields.return_token_ids:
                first.prompt_token_ids = list(self.prompt_ids)
            yield first
            if self.prefix:
                yield self._chunk(choice, wire.Delta(content=self.prefix), Piece())
            return
        reader = self.choices[choice].reader
        if self.fields.return_token_ids:
            self.choices[choice].token_ids.extend(event.token_ids)
        if reader is not None:
            yield from self._read_chunks(choice, reader, event)
        elif event.text or event.finish_reason or (self.fields.logprobs and event.logprobs):
            yield self._chunk(choice, wire.Delta(content=event.text), event)

    def _read_chunks(self, choice: int, reader: AnswerReader, piece: Piece) -> Iterator[wire.ChatChunk]:
        """A piece may give several deltas; its log-probabilities come with the first, the end in a chunk of its own."""
        logprobs = piece.logprobs if self.fields.logprobs else ()
        for delta in self.choices[choice].read(reader, piece):
            yield self._chunk(choice, delta, Piece(logprobs=logprobs))
            logprobs = ()
        if logprobs or piece.finish_reason is not None:
            reason = reader.finish_reason(piece.finish_reason)
            yield self._chunk(
                choice, wire.Delta(), Piece(logprobs=logprobs, finish_reason=reason, stop_reason=piece.stop_reason)
            )

    def _whole_choice(self, index: int, choice: ChoiceState) -> wire.ChatChoice:
        text = wire.Message(content=self.prefix + "".join(choice.text))
        return wire.ChatChoice(
            token_ids=choice.token_ids if self.fields.return_token_ids else UNSET,
            index=index,
            message=text if choice.reader is None else choice.reader.message(self.prefix),
            logprobs=self._logprobs(choice.entries),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _chunk(self, choice: int, delta: wire.Delta, piece: Piece) -> wire.ChatChunk:
        logprobs = self._logprobs(list(piece.logprobs)) if piece.logprobs else None
        part = wire.ChatPart(choice, delta, logprobs, piece.finish_reason)
        if piece.finish_reason is not None:
            part.stop_reason = piece.stop_reason
        if self.fields.return_token_ids:
            part.token_ids, self.choices[choice].token_ids = self.choices[choice].token_ids, []
        made: wire.ChatChunk = self.chunk(choice, part)
        return made

    def _logprobs(self, entries: list[TokenLogprobs]) -> wire.ChatLogprobs | None:
        return chat_logprobs(self.speller, entries, self.fields.top_logprobs) if self.fields.logprobs else None


def _echoed(fields: ChatFields, messages: tuple[ChatMessage, ...]) -> str:
    return messages[-1].content if fields.echo and messages[-1].role == "assistant" else ""
