"""An answer of a generating API, from its rows' events to the wire: one JSON body, or server-sent events.

No header of a stream leaves before every choice is admitted, so earlier errors are plain HTTP errors.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web
from msgspec import Struct

from lora_serve.core.errors import InternalError
from lora_serve.core.messages import FinishEvent, LostEvent, PromptEvent, TokenEvent
from lora_serve.core.request import FinishReason, InferenceRequest
from lora_serve.server.answers import SEND_BYTES, WireError, compact, json_answer, wire_error, written
from lora_serve.server.background.tasks import LONG
from lora_serve.server.context import CONTEXT, RequestContext
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.inference.rows import Rows
from lora_serve.server.schemas.generated import CachedTokens, Usage, num_values
from lora_serve.server.schemas.inference import SamplingFields
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.usage import AnswerUse
from lora_serve.text.output import OutputText, Piece, StopRules

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx must not collect the events
}
DONE = b"data: [DONE]\n\n"
YIELD_BYTES = 2**15  # bytes of a stream that are encoded or sent before others have their turn
SEND_COST = 2**11  # bytes whose encoding takes as long as a send does
ChoiceEvents = AsyncGenerator[tuple[int, PromptEvent | Piece | LostEvent], None]


@dataclass(slots=True, kw_only=True)
class AnswerBody(ABC):
    """The answer in the words of one API, made from its choices' events."""

    id: str
    context: RequestContext
    fields: SamplingFields
    model: ResolvedModel
    requests: list[InferenceRequest]  # one for each choice that is generated
    use: AnswerUse
    shown_tokens: tuple[str, ...] = ()  # see `StopRules.shown`
    created: int = field(default_factory=lambda: int(time.time()))
    chunk_kind: ClassVar[Callable[..., Struct]]  # of a stream, with its `choices` and perhaps `usage`
    ending: ClassVar[bytes] = DONE  # of a stream

    @property
    @abstractmethod
    def num_values(self) -> int:
        """Roughly the number of values in `whole`; eight characters of text count as one."""

    @abstractmethod
    def add(self, number: int, event: PromptEvent | Piece) -> None:
        """Keep an event of a choice for `whole`."""

    @abstractmethod
    def forget(self, number: int) -> None:
        """Drop all events of a choice, which begins again."""

    @abstractmethod
    def whole(self) -> Struct:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def chunks(self, number: int, event: PromptEvent | Piece) -> Iterator[Struct]:
        """Zero or more chunks of a stream for one event of a choice."""

    def is_complete(self, number: int) -> bool:
        """True if a choice, as far as it was added or given in chunks, shall end here."""
        return False

    def last_chunks(self) -> Iterator[Struct]:
        """Chunks after every choice has ended."""
        if self.fields.stream_options is not None and self.fields.stream_options.shows_usage:
            yield self.chunk_kind(**self.common_fields(), choices=[], usage=self.usage())

    def sse(self, chunk: Any) -> bytes:
        """A chunk as a server-sent event."""
        return b"data: %b\n\n" % compact(chunk)

    def error_chunk(self, error: WireError) -> Any:
        """The last chunk of a stream that an error ends."""
        return error.body()

    def common_fields(self) -> Mapping[str, Any]:
        """Fields of the body and of every chunk."""
        return {"id": self.id, "created": self.created, "model": self.model_name}

    @property
    def model_name(self) -> str:
        """The name of what answers."""
        assert self.context.adapters is not None, "they were resolved"
        return self.context.adapters.model

    def chunk(self, number: int, part: Struct, **more: Any) -> Any:
        """A chunk with one part of a choice."""
        options = self.fields.stream_options
        if options is not None and options.shows_usage:
            more["usage"] = self.usage(number) if options.continuous_usage_stats else None
        return self.chunk_kind(**self.common_fields(), choices=[part], **more)

    def usage(self, number: int | None = None) -> Usage:
        """`usage` of the answer so far, or of one choice."""
        num_prompt_tokens, num_generated, num_cached = self.use.counts(number)
        total = num_prompt_tokens + num_generated
        return Usage(num_prompt_tokens, num_generated, total, CachedTokens(num_cached))

    def shared_fields(self) -> dict[str, Any]:
        """The fields that the same answer has in the words of another API."""
        names = ("context", "fields", "model", "requests", "use", "shown_tokens")
        return {name: getattr(self, name) for name in names}


async def generate(rows: Rows, rules: StopRules, is_complete: Callable[[int], bool]) -> ChoiceEvents:
    """(number of the choice, PromptEvent or Piece) as they come; each choice ends with a Piece with a finish_reason.
    After a LostEvent a choice begins again.

    `is_complete`: of a choice whose events so far were read, ends it.
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
                case LostEvent():
                    texts[number] = OutputText(text, rows.requests[number], rules, eos)
                    yield number, event
                    continue
                case TokenEvent():
                    piece = texts[number].token(event)
                case FinishEvent():
                    piece = texts[number].finish(event)
                case _:
                    raise InternalError(f"The engine pooled {event.request_id}, which was to be continued.")
            rows.generated(number, len(piece.token_ids))
            if piece.finish_reason is not None:
                rows.end(number, piece.finish_reason)
            yield number, piece
            may_end = rows.use.counts(number)[1] >= rows.requests[number].sampling.min_tokens
            if piece.finish_reason is None and may_end and is_complete(number):
                rows.end(number, FinishReason.STOP)
                yield number, Piece(finish_reason=FinishReason.STOP)
    rows.context.decode = time.monotonic() - (first_token_at or time.monotonic())


async def answer(request: web.Request, body: AnswerBody) -> web.StreamResponse:
    """Have the requests of `body` answered and send it, streamed if its fields ask for that."""
    services, fields, model = request.app[SERVICES], body.fields, body.model
    shows_tokens = fields.answer_tokens != 0
    rows = Rows(services, body.context, model, body.requests, use=body.use, shows_tokens=shows_tokens)
    rules = StopRules(fields.stop, fields.include_stop_str_in_output, fields.skip_special_tokens, body.shown_tokens)
    if services.overflow is not None:
        # A neighbour's text holds no special tokens, so that it could find no stop string beside those shown here.
        stop = () if body.shown_tokens or not fields.skip_special_tokens else fields.stop
        rows.upstream = services.overflow.upstream_for(
            request, model.adapters, model.spec, body.requests, is_whole=not fields.stream, stop=stop
        )
    events = generate(rows, rules, body.is_complete)
    if fields.stream:
        return await _stream(request, events, body, rows)
    async with aclosing(events):
        async for choice, event in events:
            if isinstance(event, LostEvent):
                body.forget(choice)
            else:
                body.add(choice, event)
    return await json_answer(request, body.whole, body.num_values)


async def _stream(request: web.Request, events: ChoiceEvents, body: AnswerBody, rows: Rows) -> web.StreamResponse:
    """Write the answer as it grows. A slow client is waited for in `_write`."""
    response = web.StreamResponse(headers=SSE_HEADERS)
    early: list[tuple[int, bytes]] = []  # choice and chunks that came before the last choice was admitted
    num_unadmitted = len(rows.requests)
    yielding = _Yielding()
    try:
        async with aclosing(events):
            async for choice, event in events:
                if isinstance(event, LostEvent):  # so nothing was written yet
                    body.forget(choice)
                    early = [one for one in early if one[0] != choice]
                    num_unadmitted += 1
                    continue
                data = await _encoded(body, choice, event)
                await yielding.took(len(data))
                if num_unadmitted == 0:
                    await _write(response, data)
                    continue
                early.append((choice, data))
                num_unadmitted -= isinstance(event, PromptEvent)
                if num_unadmitted == 0:
                    rows.is_shown = True
                    await response.prepare(request)
                    for _, data in early:
                        await _write(response, data)
                        await yielding.took(len(data))
                    early.clear()  # it may be large, and the stream long
        await _write(response, _data(body, body.last_chunks()))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if not response.prepared:
            raise
        await _write(response, body.sse(body.error_chunk(wire_error(error, request[CONTEXT].request_id))))
    await _write(response, body.ending)
    await response.write_eof()
    return response


async def _encoded(body: AnswerBody, choice: int, event: PromptEvent | Piece) -> bytes:
    """The chunks of an event; those of a prompt with log-probabilities (`echo`) may be large."""
    entries = event.prompt_logprobs if isinstance(event, PromptEvent) else None
    if entries is None or num_values(entries) <= LONG:
        return _data(body, body.chunks(choice, event))
    return await asyncio.to_thread(
        lambda: b"".join(b"data: %b\n\n" % b"".join(written(chunk, compact)) for chunk in body.chunks(choice, event))
    )


async def _write(response: web.StreamResponse, data: bytes) -> None:
    for start in range(0, len(data), SEND_BYTES):
        if start:
            await asyncio.sleep(0)
        await response.write(data[start : start + SEND_BYTES])


class _Yielding:
    """Lets others have their turn now and then: many rows have events at once, and a fast client takes all of them."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def took(self, num_bytes: int) -> None:
        """So many were encoded, or sent."""
        self._num_bytes += num_bytes + SEND_COST
        if self._num_bytes >= YIELD_BYTES:
            self._num_bytes = 0
            await asyncio.sleep(0)


def _data(body: AnswerBody, chunks: Iterable[Struct]) -> bytes:
    return b"".join(map(body.sse, chunks))
