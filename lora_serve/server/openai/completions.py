"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from aiohttp import web
from msgspec import UNSET

from lora_serve.core.messages import PromptEvent, TokenLogprobs
from lora_serve.core.request import FinishReason
from lora_serve.server.context import CONTEXT
from lora_serve.server.inference.prompts import EncodedPrompt, completion_prompts
from lora_serve.server.inference.reading import requested_grammar
from lora_serve.server.inference.requests import TokenLimits, generation_requests
from lora_serve.server.inference.resolve import resolve
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.openai.answering import AnswerBody, answer
from lora_serve.server.schemas import generated as wire
from lora_serve.server.schemas.generated import TokenSpeller, completion_logprobs, num_values, prompt_logprobs
from lora_serve.server.schemas.inference import CompletionFields
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.usage import AnswerUse
from lora_serve.text.output import Piece


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Complete a text."""
    services, context = request.app[SERVICES], request[CONTEXT]
    fields = check_fields(CompletionFields, await read_json(request), services.config)
    model = resolve(request, fields)
    fields = model.with_defaults(fields)
    grammar = await requested_grammar(services, context, model, fields)
    prompts = await completion_prompts(model.text, model.spec, fields, services.config.max_prompts)
    logprobs = 0 if fields.logprobs is None and fields.num_rows > fields.n else fields.logprobs
    limits = TokenLimits(fields.answer_tokens, logprobs, _prompt_logprobs(fields))
    token_ids = [prompt.token_ids for prompt in prompts]
    requests = generation_requests(request, model, fields, limits, token_ids, grammar)
    speller = TokenSpeller(model.text, fields.return_tokens_as_token_ids)
    body = CompletionBody(
        id=f"cmpl-{context.request_id}",
        context=context,
        fields=fields,
        model=model,
        requests=requests,
        use=AnswerUse(requests, fields.num_rows),
        choices=[CompletionChoice(speller, prompt, fields) for prompt in prompts for _ in range(fields.num_rows)],
    )
    return await answer(request, body)


@dataclass(slots=True, kw_only=True)
class CompletionBody(AnswerBody):
    """The answer, whole or in chunks."""

    chunk_kind: ClassVar = wire.CompletionChunk
    fields: CompletionFields
    choices: list[CompletionChoice]

    @property
    def num_values(self) -> int:
        return sum(choice.num_values for choice in self.choices)

    def add(self, number: int, event: PromptEvent | Piece) -> None:
        self.choices[number].add(event)

    def forget(self, number: int) -> None:
        self.choices[number] = self.choices[number].anew()

    def whole(self) -> wire.Completion:
        shown = self.choices if self.fields.num_rows == self.fields.n else self._best()
        choices = [choice.take(index) for index, choice in enumerate(shown)]
        for choice, part in zip(shown, choices, strict=True):
            part.prompt_logprobs = choice.take_prompt_logprobs()
        return wire.Completion(**self.common_fields(), choices=choices, usage=self.usage())

    def chunks(self, number: int, event: PromptEvent | Piece) -> Iterator[wire.CompletionChunk]:
        self.add(number, event)
        if self.choices[number].has_new_parts:
            yield self.chunk(number, self.choices[number].take(number))

    def _best(self) -> list[CompletionChoice]:
        """Of each prompt's choices the `n` with the highest log-probability per token, the best first."""
        count = self.fields.num_rows  # of one prompt
        of_prompts = (self.choices[at : at + count] for at in range(0, len(self.choices), count))
        ordered = (sorted(choices, key=lambda choice: -choice.mean_logprob) for choices in of_prompts)
        return [choice for choices in ordered for choice in choices[: self.fields.n]]


@dataclass(slots=True)
class CompletionChoice:
    """Collects events; `take` gives what is new. With `echo` the prompt comes first, as if it were generated."""

    speller: TokenSpeller
    prompt: EncodedPrompt
    fields: CompletionFields
    prompt_entries: list[TokenLogprobs | None] | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs | None] = field(default_factory=list)
    num_characters: int = 0  # of the tokens given out
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    answer_ids: list[int] = field(default_factory=list)  # with `return_token_ids`
    shows_prompt_ids: bool = True  # they are given out once
    sum_logprobs: float = 0.0
    num_logprobs: int = 0

    def add(self, event: PromptEvent | Piece) -> None:
        if isinstance(event, PromptEvent):
            self._add_prompt(event)
            return
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        if self.fields.answer_tokens == 0:
            self.finish_reason = event.finish_reason and FinishReason.LENGTH.value
            return
        self._extend(event.text, event.token_ids, event.logprobs)
        self.sum_logprobs += sum(entry.logprob for entry in event.logprobs)
        self.num_logprobs += len(event.logprobs)
        if self.fields.return_token_ids:
            self.answer_ids.extend(event.token_ids)

    def anew(self) -> CompletionChoice:
        """The same choice, of which nothing was collected."""
        return CompletionChoice(self.speller, self.prompt, self.fields)

    @property
    def mean_logprob(self) -> float:
        """The log-probability per token of the answer."""
        return self.sum_logprobs / max(1, self.num_logprobs)

    @property
    def has_new_parts(self) -> bool:
        """True if a chunk is worth sending: text, an end, or ids or logprobs of a token whose text is held back."""
        return bool(self.finish_reason or self.entries or self.answer_ids or any(self.text))

    @property
    def num_values(self) -> int:
        """See `AnswerBody.num_values`."""
        num_ids = len(self.answer_ids) + len(self.prompt.token_ids) if self.fields.return_token_ids else 0
        num_entries = num_values(self.prompt_entries) + num_values(self.entries)
        return num_ids + num_entries + sum(map(len, self.text)) // 8

    def take_prompt_logprobs(self) -> wire.PromptLogprobs | None:
        """The prompt's log-probabilities, given out once; None if they were not asked for."""
        return None if self.prompt_entries is None else prompt_logprobs(self.speller.text, self.prompt_entries)

    def take(self, index: int) -> wire.CompletionPart:
        """The part of the choice since the last call. A stream has the prompt's ids in its first chunk, as in vLLM."""
        text, logprobs = "".join(self.text), self._take_logprobs()
        part = wire.CompletionPart(index, text, logprobs, self.finish_reason, self.stop_reason)
        self.text, self.token_ids, self.entries = [], [], []
        if self.fields.return_token_ids:
            part.token_ids = self.answer_ids
            part.prompt_token_ids = list(self.prompt.token_ids) if self.shows_prompt_ids else UNSET
            self.answer_ids, self.shows_prompt_ids = [], False
        return part

    def _add_prompt(self, event: PromptEvent) -> None:
        if self.fields.prompt_logprobs is not None and event.prompt_logprobs is not None:
            self.prompt_entries = list(event.prompt_logprobs)
        if self.fields.echo:
            self._extend(self.prompt.text, self.prompt.token_ids, event.prompt_logprobs or ())

    def _extend(self, text: str, token_ids: tuple[int, ...], entries: tuple[TokenLogprobs | None, ...]) -> None:
        self.text.append(text)
        if self.fields.logprobs is not None:
            self.token_ids.extend(token_ids)
            self.entries.extend(entries)

    def _take_logprobs(self) -> wire.CompletionLogprobs | None:
        if self.fields.logprobs is None:
            return None
        body = completion_logprobs(
            self.speller, self.token_ids, self.entries, self.fields.logprobs, self.num_characters
        )
        self.num_characters += sum(len(self.speller.text.token_text(token_id)) for token_id in self.token_ids)
        return body


def _prompt_logprobs(fields: CompletionFields) -> int | None:
    """Echo with logprobs needs the prompt's too."""
    if fields.echo and fields.logprobs is not None:
        asked = (fields.logprobs, fields.prompt_logprobs or 0)
        return -1 if -1 in asked else max(asked)
    return fields.prompt_logprobs
